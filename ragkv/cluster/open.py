"""Opens the shared storage that the settings ask for, and imports its libraries."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragkv.config import RedisConfig, RemoteConfig, StoreConfig
from ragkv.errors import ConfigError
from ragkv.store.entry import Identity
from ragkv.store.record import RECORD_VERSION
from ragkv.store.tiers.base import TierRequest

from .connector import Connector
from .entry_values import digest_of
from .pending_deletions import PendingDeletions
from .remote_tier import RemoteTier

if TYPE_CHECKING:
    from .redis_session_storage import RedisSessionStorage

MIN_SECRET_CHARS = 16


def open_redis(asked: TierRequest) -> RemoteTier:
    """The tier that `store.redis` asks for. Connects to nothing yet.

    Raises `MissingExtraError` if a library is not installed, `ConfigError` if a secret is not in
    the environment.
    """
    from .redis_connector import RedisConnector  # loads redis-py

    assert asked.config.redis is not None
    return _opened(RedisConnector, RedisConnector.kind, asked.config.redis, asked.config)


def open_s3(asked: TierRequest) -> RemoteTier:
    """The tier that `store.s3` asks for. See `open_redis`."""
    from .s3_connector import S3Connector  # loads obstore

    assert asked.config.s3 is not None
    return _opened(S3Connector, S3Connector.kind, asked.config.s3, asked.config)


def open_session_storage(
    config: RedisConfig, base: Identity, vocabulary: int
) -> "RedisSessionStorage":
    """Where replicas keep the states of conversations. Raises as `open_redis` does."""
    from .redis_session_storage import RedisSessionStorage  # loads redis-py

    return RedisSessionStorage(config, base, vocabulary, secret_from_environment(config))


def secret_from_environment(config: RemoteConfig) -> str | None:
    """The secret that authenticates shared values; `None` if none is configured, `ConfigError` if
    it is not there.
    """
    if config.secret_variable is None:
        return None
    secret = os.environ.get(config.secret_variable, "")
    if len(secret) < MIN_SECRET_CHARS:
        raise ConfigError(
            f"The environment variable {config.secret_variable} must hold the secret that "
            "authenticates shared "
            f"entries; it has {len(secret)} characters and needs at least {MIN_SECRET_CHARS}."
        )
    return secret


def _opened(
    connect: Callable[[Any, str], Connector], kind: str, remote: RemoteConfig, config: StoreConfig
) -> RemoteTier:
    secret = secret_from_environment(remote)
    # A part of every name on the remote. Its digest does not reveal the salt. Another secret has
    # other names, and so has another version, which would take these values for damage.
    salt = f"{RECORD_VERSION}:{len(config.tenant)}:{config.tenant}{secret or ''}".encode()
    tenant = hashlib.blake2b(salt, digest_size=8).hexdigest()
    path = None
    if config.directory is not None and not config.read_only:
        path = Path(config.directory) / f"deletions-{kind}-{tenant}.json"
    pending = PendingDeletions(path)  # it may raise, so before anything is open
    connector = connect(remote, tenant)
    try:
        return RemoteTier(connector, remote, digest_of(secret), pending, config.write_buffer_bytes)
    except BaseException:
        connector.close()
        raise
