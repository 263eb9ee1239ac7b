"""Log probabilities against transformers, several answers to one prompt, and the space before an answer."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ragkv import Answer, Engine, TokenEvent
from ragkv.config import KCacheConfig
from ragkv.errors import InputError
from ragkv.prompt import Past
from ragkv.scheduling import decode_batch

from .helpers import A, B, Q, engine_of, text_engine
from .test_streaming import write


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with engine_of() as engine:
        engine.warm([A, B])
        yield engine


def choices_of(engine: Engine, count: int, **how: Any) -> tuple[dict[int, list[TokenEvent]], dict[int, Answer]]:
    events: dict[int, list[TokenEvent]] = {}
    answers: dict[int, Answer] = {}
    for index, event in engine.stream_choices(Q, [A, B], choices=count, **{"max_new_tokens": 8, **how}):
        if isinstance(event, Answer):
            answers[index] = event
        else:
            events.setdefault(index, []).append(event)
    return events, answers


@pytest.mark.parametrize(
    "how", [dict(), dict(temperature=1.5, seed=3, frequency_penalty=1.0)], ids=["greedy", "sampled"]
)
def test_log_probabilities_are_transformers_log_softmax_on_the_same_ids(engine: Engine, how: dict[str, Any]) -> None:
    prompt = engine.prefill(Q, [A, B], ratio=1.0).token_ids
    answer = engine.answer(Q, [A, B], ratio=1.0, logprobs=5, max_new_tokens=10, min_new_tokens=10, **how)
    whole = torch.cat((prompt, torch.tensor(answer.token_ids)))
    with torch.no_grad():
        logits = engine.model.adapter.model(whole[None]).logits[0, len(prompt) - 1 : -1].float()
    wanted = logits.log_softmax(dim=-1)
    assert [one.token_id for one in answer.logprobs] == list(answer.token_ids)
    for row, one in zip(wanted, answer.logprobs, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-3)
        assert [token for token, _ in one.top] == row.topk(5).indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(row.topk(5).values.tolist(), abs=1e-3)


def test_log_probabilities_come_only_when_they_are_asked_for(engine: Engine) -> None:
    assert engine.answer(Q, [A], max_new_tokens=3).logprobs == ()
    answer = engine.answer(Q, [A], max_new_tokens=3, min_new_tokens=3, logprobs=0)
    assert [one.top for one in answer.logprobs] == [(), (), ()]


@pytest.mark.parametrize("wrong", [-1, 21, True])
def test_a_number_of_log_probabilities_out_of_range_is_refused(engine: Engine, wrong: Any) -> None:
    with pytest.raises(InputError, match=r"logprobs is .* \[0, 20\]"):
        engine.answer(Q, [A], logprobs=wrong)


def test_each_of_several_answers_is_what_its_own_request_would_give(engine: Engine) -> None:
    how: dict[str, Any] = dict(temperature=1.3, ratio=1.0, min_new_tokens=4)
    events, answers = choices_of(engine, 4, seed=7, **how)
    for index in range(4):
        alone = engine.answer(Q, [A, B], seed=7 + index, max_new_tokens=8, **how)
        assert answers[index].token_ids == alone.token_ids
        assert tuple(event.token_id for event in events[index]) == alone.token_ids
    assert len({answer.token_ids for answer in answers.values()}) > 1


def test_several_answers_need_one_prefill_and_decode_together(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, original = list[int](), decode_batch.decode_rows
    monkeypatch.setattr(
        decode_batch, "decode_rows", lambda adapter, rows: sizes.append(len(rows)) or original(adapter, rows)
    )
    prefills: list[Any] = []
    _, answers = choices_of(engine, 3, min_new_tokens=8, on_prefill=prefills.append)
    assert len(prefills) == 1 and sizes == [3] * 7
    assert len({answer.token_ids for answer in answers.values()}) == 1  # greedy: all alike
    assert all(answer.reuse == prefills[0].reuse for answer in answers.values())


def test_several_answers_with_values_in_host_memory_are_those_of_single_requests() -> None:
    config = KCacheConfig(top_n=4, resident_layers=1)
    with engine_of(kcache=config) as engine:
        engine.warm([A, B])  # else the later requests find chunks that the first one missed
        _, answers = choices_of(engine, 2, temperature=1.0, seed=1, min_new_tokens=8)
        alone = [
            engine.answer(Q, [A, B], temperature=1.0, seed=1 + n, max_new_tokens=8, min_new_tokens=8) for n in (0, 1)
        ]
    assert [answers[n].token_ids for n in (0, 1)] == [one.token_ids for one in alone]


def test_a_session_gains_no_turn_from_several_answers(engine: Engine) -> None:
    session = engine.session("several")
    engine.answer(Q, [A], session, max_new_tokens=4)
    turns = session.turns
    events = engine.stream_choices(Q, [B], session, choices=2, max_new_tokens=4)
    reports = [event.reuse for _, event in events if isinstance(event, Answer)]
    assert len(reports) == 2 and session.turns == turns
    assert reports[0].exact > len(A)


def test_no_answer_at_all_is_refused(engine: Engine) -> None:
    with pytest.raises(InputError, match="choices is 0"):
        list(engine.stream_choices(Q, choices=0))


@pytest.mark.parametrize(("raw", "wanted"), [(False, "It  is."), (True, " \n It  is.")])
def test_an_answer_does_not_begin_with_white_space_unless_it_continues_a_text(
    raw: bool, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with text_engine() as engine:
        engine.prefill("Why?")  # the first pass of an engine computes logits that are no answer's
        write(engine, " \n It  is.", monkeypatch)
        *events, answer = engine.stream("Why?", [], max_new_tokens=24, raw=raw)
    assert isinstance(answer, Answer)
    assert answer.text == wanted == "".join(event.text for event in events if isinstance(event, TokenEvent))


def test_a_raw_prompt_ends_with_its_question() -> None:
    with text_engine() as engine:
        question = tuple(engine.tokenizer("Once upon", add_special_tokens=False)["input_ids"])
        request = engine.intake.answer_request("Once upon", [], {"raw": True})
        assert engine.intake.prompt(request, Past()).token_ids[-len(question) :] == question
