"""Engines that share storage: an entry of one is a hit of the other, and no network fault fails a
request.
"""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ragkv import Engine, StoreConfig
from ragkv.runtime import Closing
from tests.cluster.faulty_proxy import Proxy
from tests.engine.helpers import A, B, C, Q, close, engine_of, full_prefill, ids

from .helpers import redis_config, s3_config, unique_prefix
from .servers import LOOPBACK, RedisServer

pytestmark = pytest.mark.allow_hosts([LOOPBACK])


@pytest.fixture(params=["redis", "s3"])
def shared(request: pytest.FixtureRequest) -> dict[str, Any]:
    server = request.getfixturevalue(f"{request.param}_server")
    if request.param == "redis":
        return {"redis": redis_config(server, timeout_s=10.0, group_bytes=1)}
    return {"s3": s3_config(server, group_bytes=1)}


@pytest.fixture
def replicas(shared: dict[str, Any], tmp_path: Path) -> Iterator[list[Engine]]:
    made = [
        engine_of(store=StoreConfig(directory=str(tmp_path / name), memory_bytes=10**7, **shared))
        for name in "ab"
    ]
    yield made
    for engine in made:
        engine.close()


def test_chunks_warmed_by_one_replica_are_hits_on_the_other_and_give_equal_answers(
    replicas: list[Engine], shared: dict[str, Any]
) -> None:
    (kind,) = shared
    one, other = replicas
    one.entries.encode([A, B, C])
    here, there = (engine.prefill(Q, [B, A, C], ratio=0.3, selector="hkvd") for engine in replicas)
    assert there.reuse.missed_chunks == 0
    assert there.reuse.bytes_by_tier[kind] > 0
    assert torch.equal(here.logits, there.logits)
    assert (
        one.answer(Q, [A, B], max_new_tokens=4).token_ids
        == other.answer(Q, [A, B], max_new_tokens=4).token_ids
    )
    other.flush()
    assert kind not in other.prefill(Q, [B, A, C]).reuse.bytes_by_tier  # it was promoted


class Network(Closing):
    """An engine that reaches Redis through a proxy; another engine encoded its chunks."""

    def __init__(self, server: RedisServer, prefix: str, timeout_s: float = 10.0) -> None:
        self.proxy = Proxy((LOOPBACK, server.port))
        past = redis_config(server, prefix=prefix, timeout_s=10.0, group_bytes=1)
        with engine_of(store=StoreConfig(redis=past)) as other:
            other.entries.encode([A, B, C])
        through = replace(past, url=f"redis://{LOOPBACK}:{self.proxy.port}/0", timeout_s=timeout_s)
        self.engine = engine_of(store=StoreConfig(redis=through, memory_bytes=0))

    def close(self) -> None:
        self.engine.close()
        self.proxy.close()


@pytest.mark.parametrize("fault", ["refusing", "stalled", "trickling", "cut", "flipped"])
def test_a_network_fault_leaves_answers_right_and_costs_two_timeouts_at_most(
    redis_server: RedisServer, fault: str
) -> None:
    network = Network(redis_server, unique_prefix(), timeout_s=2.0)
    wanted, _ = full_prefill(ids([A, B, C]))
    prefill = network.engine.prefill(Q, [A, B, C], ratio=1.0)
    assert prefill.reuse.missed_chunks == 0
    close(prefill.logits, wanted)
    if fault == "cut":
        network.proxy.cut_after_bytes = 3000
    elif fault == "flipped":
        network.proxy.change = lambda data: bytes(
            byte ^ (at % 700 == 0) for at, byte in enumerate(data)
        )
    else:
        setattr(network.proxy, fault, True)
        if fault == "refusing":
            network.proxy.close_connections()
    began = time.monotonic()
    for _ in range(4):
        prefill = network.engine.prefill(Q, [A, B, C], ratio=1.0)
        close(prefill.logits, wanted)
        assert (
            sum(
                (
                    prefill.reuse.exact,
                    prefill.reuse.fused,
                    prefill.reuse.recomputed,
                    prefill.reuse.computed,
                )
            )
            == 29
        )
    assert time.monotonic() - began < 2 * 2.0 + 6.0
    network.proxy.stalled = network.proxy.trickling = False
    network.close()


def test_a_server_killed_while_layers_are_read_fails_no_request(own_redis: RedisServer) -> None:
    with Network(own_redis, unique_prefix()) as network:
        wanted, _ = full_prefill(ids([A, B, C]))
        killer = threading.Timer(0.02, own_redis.kill)
        killer.start()
        for _ in range(6):
            close(network.engine.prefill(Q, [A, B, C], ratio=1.0).logits, wanted)
        killer.join()
        own_redis.start()


def test_chunks_that_load_slower_than_they_compute_are_computed_and_the_report_says_so(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Network(redis_server, unique_prefix()) as network:
        network.engine.parts.profiler.measure(quick=True)
        network.engine.prefill(Q, [A, B, C])  # no speed was measured before
        monkeypatch.setattr(network.engine.parts.store.tiers[-1], "speed", lambda: 20e3)
        for how in ({}, {"ratio": 0.3}):
            prefill = network.engine.prefill(Q, [A, B, C], **how)
            assert prefill.reuse.missed_chunks == 0
            assert any(
                "computed instead of loaded" in why and "redis" in why
                for why in prefill.reuse.decision
            )
            assert prefill.reuse.computed > len(Q)
