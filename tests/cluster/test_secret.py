"""Values authenticated by a secret: only processes that have it read or write them."""

from dataclasses import replace
from typing import Any

import pytest

from ragkv.cluster import entry_values
from ragkv.config import RedisConfig
from ragkv.store.record import checksum
from ragkv.store.stored_form import stored_form
from ragkv.store.tiers import TierKind
from tests.store.entries import make_entry

from .helpers import hit, redis_config, redis_store, redis_tier_of
from .servers import LOOPBACK, RedisServer

pytestmark = pytest.mark.allow_hosts([LOOPBACK])


@pytest.fixture
def config(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> RedisConfig:
    monkeypatch.setenv("OUR_SECRET", "a secret of many characters")
    return redis_config(redis_server, timeout_s=10.0, secret_variable="OUR_SECRET")


def test_a_process_without_the_secret_or_with_another_sees_nothing_and_deletes_nothing(
    config: RedisConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redis_store(config) as store:
        store.durable.put(make_entry(1))
        with redis_store(replace(config, secret_variable=None)) as other:
            assert hit(other, 1) is None
        monkeypatch.setenv("OUR_SECRET", "another secret of many characters")
        with redis_store(config) as other:
            assert hit(other, 1) is None
        assert hit(store, 1) == TierKind.REDIS


def test_a_value_written_without_the_secret_is_refused_though_its_checksums_are_right(
    config: RedisConfig,
) -> None:
    """The forger can write to the server and knows the format, but not the secret."""
    with redis_store(config) as store:
        store.durable.put(make_entry(1))
        forged = make_entry(1)
        forged.kv.zero_()
        connector: Any = redis_tier_of(store).connector
        for layer_group, value in enumerate(
            entry_values.pack(stored_form(forged), 512 * 1024, checksum)
        ):
            connector.client.hset(connector.name_of(forged.info.key), layer_group, value)
        assert hit(store, 1) is None
