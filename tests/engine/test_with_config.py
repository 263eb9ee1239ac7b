"""Several engines on one loaded model: same answers as alone; they share the model and nothing
else.
"""

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ragkv import Engine, EngineConfig, RagKVError, StoreConfig
from ragkv.scheduling import decode_batch
from ragkv.types import Answer
from tests import tiny_models
from tests.scheduling.helpers import together

CHUNKS = [(5, 6, 7, 8, 9, 10), (11, 12, 13, 14, 15), (16, 17, 18, 19)]
QUESTION = (20, 21, 22)


@pytest.fixture
def first() -> Iterator[Engine]:
    with Engine(tiny_models.model("llama")) as engine:
        yield engine


@pytest.fixture
def second(first: Engine) -> Iterator[Engine]:
    with first.with_config(EngineConfig()) as engine:
        yield engine


def answer(engine: Engine, **how: object) -> Answer:
    return engine.answer(QUESTION, CHUNKS, max_new_tokens=6, **how)


def test_a_second_engine_on_a_model_answers_like_a_separate_one(second: Engine) -> None:
    second.entries.encode(CHUNKS)
    with Engine(tiny_models.model("llama")) as alone:
        alone.entries.encode(CHUNKS)
        for reuse in ("none", "prefix", "fused"):
            own = alone.answer(QUESTION, CHUNKS, reuse=reuse)
            shared = second.answer(QUESTION, CHUNKS, reuse=reuse)
            assert own.token_ids == shared.token_ids
            timeless = partial(replace, decision=())  # which names measured times
            assert timeless(own.reuse) == timeless(shared.reuse)


def test_two_engines_on_one_model_share_its_weights_and_no_entries_or_sessions(
    first: Engine, second: Engine
) -> None:
    assert second.model.adapter is first.model.adapter
    assert second.parts.scheduler.batch is first.parts.scheduler.batch
    first.entries.encode(CHUNKS)
    assert answer(first).reuse.missed_chunks == 0
    assert answer(second).reuse.missed_chunks == len(CHUNKS)
    first.answer(QUESTION, session=first.session("s"), max_new_tokens=3)
    assert (first.session("s").turns, second.session("s").turns) == (1, 0)


def test_tenants_in_one_directory_never_share_entries(first: Engine, tmp_path: Path) -> None:
    def store(tenant: str) -> EngineConfig:
        return EngineConfig(store=StoreConfig(directory=str(tmp_path), tenant=tenant))

    with first.with_config(store("a")) as a:
        a.entries.encode(CHUNKS)
    with first.with_config(store("b")) as b:
        assert answer(b).reuse.missed_chunks == len(CHUNKS)
    with first.with_config(store("a")) as a:
        assert answer(a).reuse.missed_chunks == 0


@pytest.mark.parametrize("closed", [0, 1])
def test_closing_one_engine_leaves_the_other_working(
    first: Engine, second: Engine, closed: int
) -> None:
    engines = [first, second]
    gone = engines.pop(closed)
    left = engines[0]
    expected = answer(left, reuse="none")
    gone.close()
    assert answer(left, reuse="none").token_ids == expected.token_ids
    left.flush()  # what was missed is encoded behind it
    with pytest.raises(RagKVError, match="closed"):
        answer(gone)


def test_a_closed_engine_refuses_with_config(first: Engine) -> None:
    first.close()
    with pytest.raises(RagKVError, match="closed"):
        first.with_config(EngineConfig())


def test_rows_of_two_engines_decode_in_one_step(
    first: Engine, second: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = [
        partial(engine.answer, QUESTION, max_new_tokens=40, min_new_tokens=40)
        for engine in (first, second)
    ]
    alone = [ask().token_ids for ask in asks]
    sizes = list[int]()
    step = decode_batch.decode_rows
    monkeypatch.setattr(decode_batch, "PATIENCE", 1000.0)
    monkeypatch.setattr(
        decode_batch,
        "decode_rows",
        lambda model, rows: sizes.append(len(rows)) or step(model, rows),
    )
    assert [answer.token_ids for answer in together(asks)] == alone
    assert max(sizes) == 2


def test_an_engine_that_is_collected_while_another_one_computes_is_closed_elsewhere(
    first: Engine, tmp_path: Path
) -> None:
    """The thread that computes may collect it: it would wait for itself."""
    other = first.with_config(EngineConfig(store=StoreConfig(directory=str(tmp_path))))
    other.entries.encode(CHUNKS)

    def collect() -> None:
        with first.parts.scheduler.computing():
            other.close()

    closing = threading.Thread(target=collect, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    for thread in threading.enumerate():
        if thread.name == "ragkv-closer":
            thread.join(60)
    with Engine(tiny_models.model("llama"), config=other.config) as again:
        assert answer(again).reuse.missed_chunks == 0  # it was closed: its folder is free
