"""Many requests share a decode step: each gets the same tokens as alone, and none blocks
another.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ragkv import Engine
from ragkv.model import Adapter, PromptKV, adapt, full_pass
from ragkv.model.decode.batching import DecodeRow, decode_rows
from ragkv.model.decode.sampling import Sampler, Sampling
from ragkv.runtime import FairLock
from ragkv.scheduling import DecodeBatch, decode_batch
from ragkv.scheduling.decode_batch import DecodeSlot
from tests import tiny_models
from tests.engine.helpers import A, B, C, engine_of
from tests.faults import at_each_layer, raising

from .helpers import begin, together, until

LENGTHS = (4, 11, 23, 37)
STEPS = 16
CHUNKS = [A, B, C]
ORDERS = [[A, B, C], [C, B, A], [B, A], [A, A], [C], [], [B, C, B], [A, C]]


@pytest.fixture(scope="module")
def adapter() -> Adapter:
    return adapt(tiny_models.model("llama"))


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each step."""
    seen: list[int] = []

    def spying(adapter: Adapter, rows: list[DecodeRow]) -> torch.Tensor:
        seen.append(len(rows))
        return decode_rows(adapter, rows)

    monkeypatch.setattr(decode_batch, "decode_rows", spying)
    return seen


def prompt(adapter: Adapter, length: int) -> tuple[PromptKV, torch.Tensor]:
    """The KV of a prompt, with space for an answer, and the logits behind it."""
    kv = adapter.new_kv(length + STEPS)
    with torch.no_grad():
        hidden = full_pass(adapter, torch.tensor(tiny_models.tokens(length, seed=length)), kv)
        return kv, adapter.logits(hidden[:, -1:])[0]


def greedy() -> Sampler:
    return Sampler(Sampling(), torch.tensor([1]), ())


def tokens_of(
    step: Callable[[int], torch.Tensor], logits: torch.Tensor, sampler: Sampler | None = None
) -> Iterator[int]:
    """The plain loop of one prompt; `step` returns the logits behind a token."""
    sampler = sampler or greedy()
    for count in range(1, STEPS + 1):
        yield (token := sampler.choose(logits))
        if count < STEPS:
            logits = step(token)


def logits_of(slot: DecodeSlot) -> Callable[[int], torch.Tensor]:
    return lambda token: slot.verify(token)[0]


def solo_step(adapter: Adapter, kv: PromptKV) -> Callable[[int], torch.Tensor]:
    return lambda token: decode_rows(adapter, [DecodeRow(kv, token)])[0]


def solo(adapter: Adapter, length: int) -> list[int]:
    kv, logits = prompt(adapter, length)
    return list(tokens_of(solo_step(adapter, kv), logits))


def through(batch: DecodeBatch, adapter: Adapter, length: int, tenant: str = "") -> list[int]:
    kv, logits = prompt(adapter, length)
    with batch.slot(kv, tenant=tenant) as slot:
        return list(tokens_of(logits_of(slot), logits))


def batch_of(engine: Engine) -> DecodeBatch:
    return engine.parts.scheduler.batch


def at_rest(batch: DecodeBatch) -> bool:
    return not batch.waiting and not batch.lock.held and not batch.lock.waiting


class TestManyThreads:
    @pytest.mark.parametrize(
        "sampled",
        [
            dict(),
            dict(temperature=0.8),
            dict(top_p=0.9, frequency_penalty=0.5, logit_bias={7: 2.0}),
        ],
        ids=["greedy", "sampled", "penalised"],
    )
    @pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "mixtral"])
    def test_sixteen_threads_get_the_same_answers_as_alone(
        self, family: str, sampled: dict[str, Any], sizes: list[int]
    ) -> None:
        with engine_of(family) as engine:
            engine.entries.encode(CHUNKS)
            calls = [
                lambda at=at: engine.answer(
                    tiny_models.tokens(3, 30 + at),
                    ORDERS[at % len(ORDERS)],
                    max_new_tokens=4 + at,
                    ratio=0.3,
                    **(sampled and dict(sampled, seed=at)),
                )
                for at in range(16)
            ]
            wanted = [call().token_ids for call in calls]
            assert set(sizes) == {1}
            assert [answer.token_ids for answer in together(calls)] == wanted
            assert max(sizes) > 2
            assert at_rest(batch_of(engine))

    def test_requests_that_ask_again_at_once_share_one_step(
        self, adapter: Adapter, sizes: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(decode_batch, "PATIENCE", 1000.0)
        batch = DecodeBatch(adapter, FairLock())
        together([lambda at=at: through(batch, adapter, LENGTHS[at % 4]) for at in range(16)])
        assert sum(sizes) == 16 * (STEPS - 1)
        assert sum(sizes) / len(sizes) > 8


@pytest.mark.parametrize(
    ("other", "rows"),
    [("nothing", 12), ("prefills", decode_batch.FEW_ROWS), ("decodes", decode_batch.FEW_ROWS)],
)
def test_a_step_has_few_rows_while_another_tenant_computes_or_will_ask_again(
    adapter: Adapter, sizes: list[int], other: str, rows: int
) -> None:
    batch = DecodeBatch(adapter, FairLock())
    kv, logits = prompt(adapter, 11)

    def ask() -> list[int]:
        return through(batch, adapter, 11, tenant="many")

    with ThreadPoolExecutor(12) as pool, batch.slot(kv, tenant="other") as slot:
        if other == "decodes":
            slot.verify(int(logits.argmax()))
        with batch.lock.hold("other" if other == "prefills" else "many"):
            answers = [pool.submit(ask) for _ in range(12)]
            until(lambda: len(batch.waiting) == 12)
            sizes.clear()
            batch.step_waiting()
            assert sizes == [rows]
        assert [one.result() for one in answers] == [solo(adapter, 11)] * 12


def test_a_slot_knows_the_seconds_of_its_own_step_after_others_stepped(adapter: Adapter) -> None:
    batch = DecodeBatch(adapter, FairLock())
    (kv, logits), (other_kv, _) = prompt(adapter, 11), prompt(adapter, 7)
    with batch.slot(kv) as slot, batch.slot(other_kv) as other:
        slot.verify(int(logits.argmax()))
        took_s = batch.step_s
        other.verify(1)
        assert batch.step_s != took_s
        assert (slot.step_s, other.step_s) == (took_s, batch.step_s)


@pytest.mark.parametrize("others", [1, 6])
def test_a_step_with_drafts_has_no_more_rows_than_may_be_computed_together(
    adapter: Adapter, others: int
) -> None:
    batch = DecodeBatch(adapter, FairLock())
    (kv, logits) = prompt(adapter, 11)
    batch.most_rows = decode_batch.FEW_ROWS
    with ThreadPoolExecutor(1 + others) as pool, batch.slot(kv) as slot:
        drafts = (5,) * slot.room  # as many as there is room for: nobody else decodes yet
        with batch.lock.hold():
            mine = pool.submit(slot.verify, int(logits.argmax()), drafts)
            until(lambda: len(batch.waiting) == 1)
            answers = [pool.submit(through, batch, adapter, 11) for _ in range(others)]
            until(lambda: len(batch.waiting) == 1 + others)
            batch.step_waiting()
            assert (
                mine.result().shape[0] == 1 + len(drafts) == decode_batch.FEW_ROWS
                and len(batch.waiting) == others
            )
        assert [one.result() for one in answers] == [solo(adapter, 11)] * others


def test_a_slow_consumer_delays_only_itself(adapter: Adapter) -> None:
    batch = DecodeBatch(adapter, FairLock())
    kv, logits = prompt(adapter, 11)
    with batch.slot(kv) as slot:
        slow = tokens_of(logits_of(slot), logits)
        first = [next(slow), next(slow)]
        together([lambda length=length: through(batch, adapter, length) for length in LENGTHS])
        assert [*first, *slow] == solo(adapter, 11)
    assert at_rest(batch)


class TestErrors:
    def test_an_error_of_one_sampler_fails_only_its_own_row(self, adapter: Adapter) -> None:
        batch = DecodeBatch(adapter, FairLock())

        def broken() -> str:
            kv, logits = prompt(adapter, 9)
            sampler = greedy()
            with batch.slot(kv) as slot, pytest.raises(ZeroDivisionError):
                for step, _ in enumerate(tokens_of(logits_of(slot), logits, sampler)):
                    if step == 4:
                        sampler._processors = lambda *_: 1 / 0
            return "failed"

        results = together(
            [
                broken,
                *(lambda length=length: through(batch, adapter, length) for length in LENGTHS),
                broken,
            ]
        )
        assert results == ["failed", *(solo(adapter, length) for length in LENGTHS), "failed"]
        assert at_rest(batch)

    def test_an_error_of_one_kv_cache_fails_only_its_own_row(
        self, adapter: Adapter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(decode_batch, "PATIENCE", 1000.0)
        batch = DecodeBatch(adapter, FairLock())

        def full() -> int:
            kv, logits = prompt(adapter, 57)
            kv.capacity = 64
            for tensors in (kv.keys, kv.values):
                tensors[:] = [tensor[:, :, : kv.capacity] for tensor in tensors]
            done: list[int] = []
            with (
                batch.slot(kv) as slot,
                pytest.raises(RuntimeError, match="exceeds dimension size"),
            ):
                done.extend(tokens_of(logits_of(slot), logits))
            return len(done)

        results = together(
            [full, *(lambda length=length: through(batch, adapter, length) for length in LENGTHS)]
        )
        assert results == [8, *(solo(adapter, length) for length in LENGTHS)]

    def test_an_error_of_the_model_fails_every_row(
        self, adapter: Adapter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        batch = DecodeBatch(adapter, FairLock())
        monkeypatch.setattr(
            decode_batch, "decode_rows", raising(RuntimeError("the device is gone"))
        )

        def ask(length: int) -> str:
            with pytest.raises(RuntimeError, match="device is gone"):
                through(batch, adapter, length)
            return "failed"

        assert together([lambda length=length: ask(length) for length in LENGTHS]) == ["failed"] * 4
        assert at_rest(batch)

    def test_an_interrupt_of_the_leader_ends_only_its_own_request(
        self, adapter: Adapter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compute = FairLock()
        batch = DecodeBatch(adapter, compute)
        interrupted: list[int] = []

        def once(adapter: Adapter, rows: list[DecodeRow]) -> torch.Tensor:
            logits = decode_rows(adapter, rows)
            if len(rows) == 3 and not interrupted:
                interrupted.append(1)
                raise KeyboardInterrupt
            return logits

        monkeypatch.setattr(decode_batch, "decode_rows", once)

        def ask(length: int) -> Any:
            with batch.slot(prompt(adapter, length)[0]) as slot:
                got = []
                try:
                    got.append(int(logits_of(slot)(7).argmax()))
                    got.append(int(logits_of(slot)(8).argmax()))
                except KeyboardInterrupt:
                    return "interrupted"
            return got

        def wanted(length: int) -> list[int]:
            step = solo_step(adapter, prompt(adapter, length)[0])
            return [int(step(7).argmax()), int(step(8).argmax())]

        compute.acquire()
        results: list[Any] = []
        thread = begin(lambda: results.extend(together([lambda n=n: ask(n) for n in (4, 11, 23)])))
        until(lambda: compute.waiting == 3)
        compute.release()
        thread.join(60)
        assert results.count("interrupted") == 1
        assert [got for got in results if got != "interrupted"] == [
            wanted(length)
            for length, got in zip((4, 11, 23), results, strict=True)
            if got != "interrupted"
        ]
        assert at_rest(batch)


def test_a_long_prefill_lets_others_decode_between_its_layers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(engine)
    events = engine.stream([5, 6], max_new_tokens=60, min_new_tokens=60)
    next(events)
    events_seen: list[object] = []
    at_layer = threading.Event()

    def slow(layer: int) -> None:
        at_layer.set()
        until(lambda: batch.is_due)
        events_seen.append(f"layer {layer}")

    at_each_layer(monkeypatch, slow)

    def prefill() -> None:
        engine.prefill([7, 8], [A], reuse="none")
        events_seen.append("prefilled")

    thread = begin(prefill)
    assert at_layer.wait(60)
    for _ in range(8):
        next(events)
        events_seen.append("token")
    thread.join(60)
    before = events_seen[: events_seen.index("prefilled")]
    layers = dict.fromkeys(event for event in before if event != "token")
    assert list(layers) == [f"layer {layer}" for layer in range(4)]
    assert before.count("token") >= 3  # one per layer; the last one may be recorded a moment later
    assert len(list(events)) == 60 - 9 + 1
    assert at_rest(batch)
