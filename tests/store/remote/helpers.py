"""Remote tiers over the servers of `servers.py`, each under a prefix of its own."""

import itertools
from typing import Any

from ragkv.config import RedisConfig, S3Config, StoreConfig
from ragkv.store import Entry
from ragkv.store.encoded import EncodedEntry
from ragkv.store.remote import RemoteTier, open_remote, values
from ragkv.store.remote.values import Digester
from tests.store.remote.servers import RedisServer, S3Server

_NUMBERS = itertools.count()


def unique_prefix() -> str:
    """That nobody else has."""
    return f"test{next(_NUMBERS)}"


def value_bytes(entry: Entry, group_bytes: int = 512 * 1024) -> int:
    """What `entry` takes on a remote."""
    return sum(map(len, values.pack(EncodedEntry.of(entry), group_bytes, Digester())))


def redis_config(server: RedisServer, **changes: Any) -> RedisConfig:
    """Of a prefix that nobody else has, through the unix socket."""
    return RedisConfig(**{"url": f"unix://{server.socket}", "prefix": unique_prefix(), **changes})


def s3_config(server: S3Server, **changes: Any) -> S3Config:
    """Of a prefix that nobody else has."""
    where = {"bucket": server.BUCKET, "endpoint": server.url, "timeout_s": 20.0}  # moto is one busy Python process
    return S3Config(**{**where, "prefix": unique_prefix(), **changes})


def remote_tier(server: RedisServer | S3Server, max_bytes: int = 10**7, **changes: Any) -> RemoteTier:
    """The tier over `server`; `changes` are of its config."""
    if isinstance(server, RedisServer):
        config = StoreConfig(redis=redis_config(server, max_bytes=max_bytes, timeout_s=10.0, **changes))
    else:
        config = StoreConfig(s3=s3_config(server, max_bytes=max_bytes, **changes))
    (tier,) = open_remote(config)
    return tier
