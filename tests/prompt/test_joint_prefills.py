"""Prompts that wait for the model are fused in one pass: each gets what it gets alone, whatever
befalls the others.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.config import SessionConfig
from ragkv.errors import CancelledError, EntryDamagedError
from ragkv.fusion import Fusor
from ragkv.fusion.passes import _LayerLoop
from ragkv.fusion.pipeline import HostPlacing
from ragkv.runtime import Claim, FairLock
from ragkv.scheduling.joint_prefills import JointPrefills
from tests import tiny_models
from tests.engine.helpers import A, B, C, Q, close, engine_of, full_prefill
from tests.faults import at_each_layer, raising
from tests.scheduling.helpers import until

PROMPTS = {"attention": [B, A], "hkvd-gradual": [C, B, A], "first-k": [A, C, B, A]}


def together(engine: Engine, asks: Sequence[Callable[[], Any]]) -> list[Any]:
    """What `asks` return or raise, all of which wait for the model of `engine` at the same time."""
    with ThreadPoolExecutor(len(asks)) as pool:
        with engine.parts.scheduler.computing():
            futures = [pool.submit(ask) for ask in asks]
            until(lambda: engine.parts.scheduler.prefills.waiting == len(asks))
        return [future.exception() or future.result() for future in futures]


def asks_of(engine: Engine) -> tuple[list[Callable[[], Any]], list[Any]]:
    """Requests, and what they get alone, once all is stored."""
    engine.entries.encode([A, B, C])
    asks = [
        partial(engine.prefill, Q, chunks, selector=name, ratio=0.5)
        for name, chunks in PROMPTS.items()
    ]
    for ask in asks:
        ask()
    engine.flush()
    return asks, [ask() for ask in asks]


def same(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(
        got.logits, wanted.logits, atol=1e-5 * float(wanted.logits.abs().max()), rtol=0
    )
    assert replace(got.reuse, notes=()) == replace(wanted.reuse, notes=())


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_each_prompt_gets_what_it_gets_alone(family: str) -> None:
    with engine_of(family) as engine:
        asks, alone = asks_of(engine)
        for wanted, got in zip(alone, together(engine, asks), strict=True):
            same(got, wanted)
            assert (wanted.reuse.notes, got.reuse.notes) == (
                (),
                ("computed in one pass with 2 other prompts",),
            )


def test_a_prompt_that_another_thread_computed_begins_no_pass_and_hands_no_lock_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks, _ = asks_of(engine)
    lock = engine.model.compute.lock
    passes: list[tuple[int, bool]] = []
    made = Fusor.run

    def run(fusor: Fusor, prompts: Sequence[Any], pause: Callable[[], None]) -> None:
        passes.append((len(prompts), lock.is_mine))
        made(fusor, prompts, pause)

    monkeypatch.setattr(Fusor, "run", run)
    together(engine, asks)
    assert passes == [(len(asks), True)]


@pytest.mark.parametrize("what", ["cancelled", "damaged", "all fail"])
def test_what_befalls_one_prompt_touches_no_other(
    engine: Engine, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks, alone = asks_of(engine)
    adapter = engine.model.adapter
    cancel = threading.Event()
    key = engine.entries.encoder.identity.key(tuple(A))
    asks[0] = partial(asks[0], cancel=cancel)
    place = HostPlacing.place
    call_layer = adapter.call_layer
    own = [0, 1]  # the chunks of the prompt whose selector asks

    def fail_one(one: HostPlacing, layer: int) -> None:
        is_own = [span.chunk for span in one._spans if span.chunk is not None] == own
        if is_own and layer == 1 and not failed and what != "all fail":
            failed.append(one)
            if what == "damaged":
                raise EntryDamagedError(key, "on purpose")
            cancel.set()
        place(one, layer)

    def fail_all(layer: int, hidden: Any, rows: Any, step: Any) -> Any:
        if what == "all fail" and layer == 1 and len(step._parts) > 1:
            raise RuntimeError("on purpose")
        return call_layer(layer, hidden, rows, step)

    failed: list[HostPlacing] = []
    monkeypatch.setattr(HostPlacing, "place", fail_one)
    monkeypatch.setattr(adapter, "call_layer", fail_all)
    first, *others = together(engine, asks)
    is_cancelled = isinstance(first, CancelledError)
    assert is_cancelled == (what == "cancelled") and (
        is_cancelled or first.reuse.missed_chunks == len(failed)
    )
    for wanted, got in zip(alone[1:], others, strict=True):
        same(got, wanted)


def test_prompts_whose_pass_failed_wait_for_none_of_their_own_misses(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    call_layer = engine.model.adapter.call_layer

    def fail_together(layer: int, hidden: Any, rows: Any, step: Any) -> Any:
        if len(getattr(step, "_parts", ())) > 1:
            raise RuntimeError("on purpose")
        return call_layer(layer, hidden, rows, step)

    monkeypatch.setattr(engine.model.adapter, "call_layer", fail_together)
    found = together(engine, [partial(engine.prefill, Q, [chunks]) for chunks in (A, B)])
    assert [(one.reuse.missed_chunks, one.reuse.fused) for one in found] == [(1, 0), (1, 0)]


def test_a_pass_that_failed_says_why_in_the_log(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    call_layer = engine.model.adapter.call_layer

    def fail_together(layer: int, hidden: Any, rows: Any, step: Any) -> Any:
        if len(getattr(step, "_parts", ())) > 1:
            raise RuntimeError("the cause")
        return call_layer(layer, hidden, rows, step)

    monkeypatch.setattr(engine.model.adapter, "call_layer", fail_together)
    together(engine, [partial(engine.prefill, Q, [chunk]) for chunk in (A, B)])
    (said,) = [one for one in caplog.records if "A pass over 2 prompts failed" in one.message]
    assert said.exc_info is not None and str(said.exc_info[1]) == "the cause"


def test_a_pass_that_all_prompts_have_left_did_not_fail(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here the engine is closed just after both callers have left."""
    cancel = threading.Event()
    asks = [partial(engine.prefill, Q, [chunk], cancel=cancel) for chunk in (A, B)]
    at_each_layer(monkeypatch, lambda _: cancel.set())

    pause = _LayerLoop._let_others_compute

    def close_then(self: _LayerLoop) -> None:
        pause(self)
        if all(prompt.ended for prompt in self._prompts):
            raise RuntimeError("the engine is closed")

    monkeypatch.setattr(_LayerLoop, "_let_others_compute", close_then)
    found = together(engine, asks)
    assert [type(error) for error in found] == [CancelledError, CancelledError]
    assert "failed" not in caplog.text


def test_turns_of_several_conversations_stay_exact() -> None:
    with engine_of(session=SessionConfig(block_tokens=4)) as engine:
        engine.entries.encode([C])
        turns = [
            partial(engine.append, engine.session(name), Q, B[:5], [C], ratio=1.0) for name in "abc"
        ]
        assert all(got.reuse.notes for got in together(engine, turns))
        for name in "abc":
            follow = engine.prefill(Q, session=engine.session(name))
            close(follow.logits, full_prefill(follow.token_ids.tolist())[0])
            assert follow.reuse.exact > len(C) + len(Q)


def test_prompts_with_many_rows_are_computed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragkv.scheduling.joint_prefills.JOINT_ROWS", 8)
    with engine_of() as engine:
        asks, _ = asks_of(engine)
        assert {got.reuse.notes for got in together(engine, asks)} == {()}


def test_a_pass_has_prompts_of_one_tenant() -> None:
    with engine_of() as engine:
        asks, _ = asks_of(engine)
        with engine.with_config(EngineConfig(store=StoreConfig(tenant="b"))) as other:
            other.entries.encode([C, B, A])
            asks[1] = partial(other.prefill, Q, [C, B, A], ratio=0.5)
            notes = [got.reuse.notes for got in together(engine, asks)]
    several = ("computed in one pass with 1 other prompts",)
    assert notes == [several, (), several]


def test_an_interrupt_while_others_are_taken_along_keeps_the_model_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lock = FairLock()
    prefills = JointPrefills[str](lock)
    monkeypatch.setattr(lock, "dismiss", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt), prefills.joined("prompt", 1, Claim()):
        pass
    assert not lock.held
