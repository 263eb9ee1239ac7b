"""The remote tiers that settings ask for; the libraries they need are imported here, when they do."""

import hashlib
import os
from pathlib import Path

from ragkv.config import RedisConfig, S3Config, StoreConfig
from ragkv.errors import ConfigError

from ..tiers.base import TierKind
from .connector import Connector
from .tier import AUDIT_S, RemoteTier
from .tombstones import Tombstones
from .values import Seal

SECRET_CHARS = 16  # at least


def open_remote(config: StoreConfig) -> list[RemoteTier]:
    """The tiers of `config`, nearest first. Connects to nothing yet.

    Raises `MissingExtraError` if a library is not installed, `ConfigError` if a secret is not in the environment.
    """
    tiers = []
    if config.redis is not None:
        from .redis_connector import RedisConnector  # loads redis-py

        secret = secret_of(config.redis)
        connector: Connector = RedisConnector(config.redis, _tenant(config.tenant, secret))
        tiers.append(_tier(TierKind.REDIS, connector, config, config.redis, secret, AUDIT_S))
    if config.s3 is not None:
        from .s3_connector import S3Connector  # loads obstore

        secret = secret_of(config.s3)
        connector = S3Connector(config.s3, _tenant(config.tenant, secret))
        tiers.append(_tier(TierKind.S3, connector, config, config.s3, secret, config.s3.audit_s))
    return tiers


def _tier(
    kind: TierKind,
    connector: Connector,
    config: StoreConfig,
    remote: RedisConfig | S3Config,
    secret: str | None,
    audit_s: float,
) -> RemoteTier:
    writable = config.directory is not None and not config.read_only
    tenant = _tenant(config.tenant, secret)
    path = Path(config.directory or "") / f"deletions-{kind.value}-{tenant}.json" if writable else None
    return RemoteTier(
        kind,
        connector,
        timeout_s=remote.timeout_s,
        pool=remote.connections,
        group_bytes=remote.group_bytes,
        seal=Seal(secret),
        tombstones=Tombstones(path),
        keep_bytes=config.write_buffer_bytes,
        audit_s=audit_s,
    )


def secret_of(config: RedisConfig | S3Config) -> str | None:
    """The secret that authenticates what is shared, if one is to be; raises `ConfigError` if it is not there."""
    if config.secret_variable is None:
        return None
    secret = os.environ.get(config.secret_variable, "")
    if len(secret) < SECRET_CHARS:
        raise ConfigError(
            f"The secret that authenticates shared entries is to be in the environment, in {config.secret_variable}; "
            f"there are {len(secret)} characters in it, {SECRET_CHARS} are the least."
        )
    return secret


def _tenant(tenant: str, secret: str | None) -> str:
    """The part of a key that is the tenant's; the salt itself is not told. Another secret sees other keys."""
    return hashlib.blake2b(f"{len(tenant)}:{tenant}{secret or ''}".encode(), digest_size=8).hexdigest()
