"""Remote tiers over the servers of `servers.py`, each under a prefix of its own."""

import itertools
from dataclasses import replace
from typing import Any

from ragkv.cluster import RemoteTier
from ragkv.config import RedisConfig, S3Config, StoreConfig
from ragkv.store.opening import open_store, open_tiers
from ragkv.store.store import Store
from ragkv.store.tiers import Tier, TierKind, TierStats
from tests.store.entries import IDENTITY, ids_of, make_entry, read_all, same

from .servers import RedisServer, S3Server

_NUMBERS = itertools.count()
LAYER_GROUPS = 12  # No entry of these tests has more.


def unique_prefix() -> str:
    """A prefix that no other test uses."""
    return f"test{next(_NUMBERS)}"


def redis_config(server: RedisServer, **changes: Any) -> RedisConfig:
    """A configuration under a prefix of its own, through the unix socket."""
    return RedisConfig(**{"url": f"unix://{server.socket}", "prefix": unique_prefix(), **changes})


def s3_config(server: S3Server, **changes: Any) -> S3Config:
    """A configuration under a prefix of its own."""
    # moto is one busy Python process
    where = {"bucket": server.BUCKET, "endpoint": server.url, "timeout_s": 20.0}
    return S3Config(**{**where, "prefix": unique_prefix(), **changes})


def remote_of(config: StoreConfig) -> RemoteTier:
    """The remote tier that `config` describes, which has no other."""
    (tier,) = open_tiers(replace(config, memory_bytes=0))
    assert isinstance(tier, RemoteTier)
    return tier


def remote_tier(server: RedisServer | S3Server, **changes: Any) -> RemoteTier:
    """A tier over `server`; `changes` are of its configuration."""
    if isinstance(server, RedisServer):
        config = StoreConfig(redis=redis_config(server, timeout_s=10.0, **changes))
    else:
        config = StoreConfig(s3=s3_config(server, **changes))
    return remote_of(config)


def redis_store(config: RedisConfig, **changes: Any) -> Store:
    """A store of a Redis tier alone."""
    return open_store(StoreConfig(**{"memory_bytes": 0, "redis": config, **changes}))


def redis_tier_of(store: Store) -> RemoteTier:
    """The Redis tier of `store`."""
    (tier,) = (tier for tier in store.tiers if tier.kind == TierKind.REDIS)
    assert isinstance(tier, RemoteTier)
    return tier


def counted(tier: Tier) -> TierStats:
    """The stats of a tier; what a remote one holds is counted here."""
    if not isinstance(tier, RemoteTier):
        return tier.stats()
    keys = list(tier.connector.all_keys())
    connector = tier.connector
    values = (connector.get(key, number) for key in keys for number in range(LAYER_GROUPS))
    used_bytes = sum(len(value) for value in values if value is not None)
    return replace(tier.stats(), entries=len(keys), used_bytes=used_bytes)


def hit(store: Store, number: int) -> str | None:
    """The tier that a request reads entry `number` from, with the right bytes; its promotion is
    done on return.
    """
    lease = store.lease(IDENTITY, ids_of(number))
    if lease is None:
        return None
    with lease:
        kind = lease.kind
        assert same(read_all(lease), make_entry(number))
    store.flush()
    return kind
