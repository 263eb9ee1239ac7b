"""A chunk that is encoded for one tenant lets other tenants compute between its layers."""

import threading
import time
from collections.abc import Callable

import pytest

from ragkv import Engine, EngineConfig, StoreConfig
from tests.engine.helpers import A, B, Q, close, engine_of, full_prefill, ids
from tests.scheduling.helpers import begin, between_layers


def encode_while(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    encode: Callable[[], object],
    other: Callable[[], None],
) -> None:
    """Run `encode` for a first tenant and, from its first layer on, `other` for a second one."""
    begun = threading.Event()

    def slow_layer() -> None:
        begun.set()
        time.sleep(0.05)  # more than a tenant may use before another one is due

    between_layers(monkeypatch, engine, slow_layer)

    thread = begin(encode)
    assert begun.wait(60)
    other()
    thread.join()


@pytest.mark.parametrize("how", ["encode", "background"])
def test_another_tenant_computes_before_the_chunk_is_complete(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(store=StoreConfig(tenant="first")) as engine:
        identity = engine.entries.encoder.identity
        seen = list[bool]()
        tenants = list[set[str]]()

        other = engine.with_config(EngineConfig(store=StoreConfig(tenant="second")))

        def compute() -> None:
            with other.parts.scheduler.computing():
                seen.append(engine.parts.store.lease(identity, tuple(A)) is None)
                tenants.append(engine.parts.scheduler.batch.lock.tenants)

        def background() -> None:
            engine.entries.background.add(tuple(A))
            engine.flush()

        encode_while(
            engine,
            monkeypatch,
            lambda: engine.entries.encode([A]) if how == "encode" else background(),
            compute,
        )
        assert seen == [True]
        # it uses time of whom it is computed for, also in the background
        assert tenants == [{"first", "second"}]
        monkeypatch.undo()
        other.close()
        assert engine.prefill(Q, [A]).reuse.missed_chunks == 0


def test_a_prefill_of_another_tenant_in_between_changes_neither_result(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.entries.encode([B])
    results = []
    encode_while(
        engine,
        monkeypatch,
        lambda: engine.entries.encode([A]),
        lambda: results.append(engine.prefill(Q, [B], ratio=1.0)),
    )
    close(results[0].logits, full_prefill(ids([B]))[0])
    monkeypatch.undo()
    # the first chunk is exact
    close(engine.prefill(Q, [A], ratio=0.0).logits, full_prefill(ids([A]))[0])


def test_decode_steps_run_between_the_layers_of_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of() as engine:
        steps: list[int] = []
        between_layers(monkeypatch, engine, lambda: steps.append(1))
        engine.entries.encode([A])
        assert len(steps) >= engine.model.adapter.layer_count - 1
