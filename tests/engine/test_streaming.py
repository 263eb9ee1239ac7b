"""A streamed answer: the events are the answer, the end token never shows, the seed decides."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ragkv import Answer, Engine, TokenEvent
from ragkv.errors import CancelledError
from ragkv.prompt import PrefilledPrompt, Task
from ragkv.prompt.prefill import Prefiller
from tests import tiny_models
from tests.scheduling.helpers import until
from tests.toy_tokenizers import EOS

from .helpers import A, Q, engine_of, full_prefill, ids, text_engine


@pytest.fixture(scope="module")
def engine() -> Any:
    with text_engine(drafts=0) as engine:  # `write` needs a step for each token
        engine.entries.encode(["ab", "cd"])
        yield engine


def run(engine: Engine, question: Any = "Why?", **how: Any) -> tuple[list[TokenEvent], Answer]:
    *events, answer = engine.stream(question, ["ab", "cd"], **{"max_new_tokens": 24, **how})
    assert isinstance(answer, Answer)
    assert all(isinstance(event, TokenEvent) for event in events)
    return events, answer


def write(engine: Engine, text: str, monkeypatch: pytest.MonkeyPatch, end: bool = True) -> None:
    """Make the engine's next answers say `text`, and then end."""
    said = [*engine.tokenizer(text, add_special_tokens=False)["input_ids"], *([EOS] if end else [])]
    adapter = engine.model.adapter
    original = engine.model.adapter.logits
    step = iter(said)

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(original(hidden), -100.0)
        out[:, next(step, EOS)] = 100.0
        return out

    monkeypatch.setattr(adapter, "logits", logits)


@pytest.mark.parametrize(
    "sampled", [dict(), dict(temperature=1.0, seed=5)], ids=["greedy", "sampled"]
)
def test_the_events_joined_are_the_answer(engine: Engine, sampled: dict[str, Any]) -> None:
    engine.prefill("Why?", ["ab", "cd"])
    engine.flush()  # the first passage has exact KV now, so each answer sees the same
    events, answer = run(engine, **sampled)
    assert "".join(event.text for event in events) == answer.text
    tokens = [event.token_id for event in events if event.token_id is not None]
    assert tuple(tokens) == answer.token_ids
    assert answer.text.rstrip("\ufffd") in engine.tokenizer.decode(
        answer.token_ids, skip_special_tokens=True
    )
    assert (
        engine.answer("Why?", ["ab", "cd"], max_new_tokens=24, **sampled).token_ids
        == answer.token_ids
    )


@pytest.mark.parametrize(
    ("text", "stop", "left", "reason"),
    [
        ("one END two", "END", "one ", "stop"),
        ("one EN", ["END"], "one EN", "stop"),
        ("é€", ["€"], "é", "stop"),
    ],
)
def test_no_part_of_a_stop_string_is_streamed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, text: str, stop: Any, left: str, reason: str
) -> None:
    write(engine, text, monkeypatch)
    events, answer = run(engine, stop=stop)
    assert (answer.text, answer.finish_reason) == (left, reason)
    assert "".join(event.text for event in events) == left


def test_stop_strings_may_come_from_an_iterator(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(engine, "one END two", monkeypatch)
    assert run(engine, stop=iter(["END"]))[1].text == "one "


def test_an_answer_that_ends_at_once_is_empty(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(engine, "", monkeypatch)
    events, answer = run(engine)
    assert (events, answer.text, answer.token_ids, answer.finish_reason) == ([], "", (), "stop")


def test_an_answer_cut_by_the_limit_says_so(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(engine, "so it is", monkeypatch)
    events, answer = run(engine, max_new_tokens=3)
    assert (answer.text, len(events), answer.finish_reason) == ("so ", 3, "length")


def test_a_character_cut_by_the_limit_is_marked_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(engine, "a🦊", monkeypatch)
    _, answer = run(engine, max_new_tokens=3)
    assert answer.text == "a\ufffd"


def test_decoding_is_greedy_even_if_the_models_generation_config_samples() -> None:
    model = tiny_models.model("llama")
    model.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=3.0)
    with Engine(model) as engine:
        answers = {engine.answer(Q, [A], ratio=1.0, max_new_tokens=6).token_ids for _ in range(3)}
    with engine_of() as plain:
        assert answers == {plain.answer(Q, [A], ratio=1.0, max_new_tokens=6).token_ids}


def test_an_answer_without_a_tokenizer_has_ids_and_no_text() -> None:
    with engine_of() as engine:
        *events, answer = engine.stream(Q, [A], max_new_tokens=4, min_new_tokens=4)
        assert (answer.text, len(answer.token_ids), len(events)) == ("", 4, 4)
        assert {event.text for event in events} == {""}
        assert full_prefill(ids([A]))[0].argmax() == answer.token_ids[0]


def test_an_answer_cites_the_chunks_that_say_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(engine, "the fox", monkeypatch)
    chunks = [
        engine.chunk(text, {"source": text[0]})
        for text in ("a dog", "See The Fox run.", "the foxes")
    ]
    answer = engine.answer("Who?", chunks)
    assert [
        (c.chunk, c.source, chunks[c.chunk].text[c.start : c.end]) for c in answer.citations
    ] == [(1, "S", "The Fox")]


def _answered(engine: Engine, **how: Any) -> None:
    engine.answer("Why?", ["a passage that is missed"], **how)


def _abandoned(engine: Engine, **how: Any) -> None:
    events = engine.stream("Why?", ["ab"], **how)
    next(iter(events))


def _cancelled(engine: Engine, **how: Any) -> None:
    cancel = threading.Event()
    with pytest.raises(CancelledError):
        for _ in engine.stream("Why?", ["ab"], cancel=cancel, **how):
            cancel.set()


@pytest.mark.parametrize("ask", [_answered, _abandoned, _cancelled])
def test_the_kv_of_a_request_is_freed_when_it_ends_without_a_search_for_garbage(
    engine: Engine, ask: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[weakref.ref[Any]] = []
    made = Prefiller.prefill

    def prefill(prefiller: Prefiller, task: Task) -> PrefilledPrompt:
        prefilled = made(prefiller, task)
        found.append(weakref.ref(prefilled.kv))
        return prefilled

    monkeypatch.setattr(Prefiller, "prefill", prefill)
    settled: list[bool] = []
    monkeypatch.setattr(engine, "settle", lambda _: settled.append(found[0]() is None))
    gc.disable()
    try:
        ask(engine, max_new_tokens=24)
        # an answer waits for encoding without its own prompt's KV
        assert settled == ([True] if ask is _answered else [])
        until(lambda: found[0]() is None)  # a thread may hold it for a moment
    finally:
        gc.enable()
