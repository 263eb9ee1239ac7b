"""Log probabilities against transformers, and the space before an answer."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ragkv import Answer, Engine, TokenEvent
from ragkv.errors import InputError

from .helpers import A, B, Q, engine_of, text_engine
from .test_streaming import write


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with engine_of() as engine:
        engine.entries.encode([A, B])
        yield engine


@pytest.mark.parametrize(
    "how", [dict(), dict(temperature=1.5, seed=3, frequency_penalty=1.0)], ids=["greedy", "sampled"]
)
def test_log_probabilities_are_transformers_log_softmax_on_the_same_ids(
    engine: Engine, how: dict[str, Any]
) -> None:
    prompt = engine.prefill(Q, [A, B], ratio=1.0).token_ids
    answer = engine.answer(
        Q, [A, B], ratio=1.0, logprobs=5, max_new_tokens=10, min_new_tokens=10, **how
    )
    whole = torch.cat((prompt, torch.tensor(answer.token_ids)))
    with torch.no_grad():
        logits = engine.model.adapter.model(whole[None]).logits[0, len(prompt) - 1 : -1].float()
    wanted = logits.log_softmax(dim=-1)
    assert [one.token_id for one in answer.logprobs] == list(answer.token_ids)
    for row, one in zip(wanted, answer.logprobs, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-3)
        assert [token for token, _ in one.top] == row.topk(5).indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(
            row.topk(5).values.tolist(), abs=1e-3
        )


def test_log_probabilities_come_only_when_they_are_asked_for(engine: Engine) -> None:
    assert engine.answer(Q, [A], max_new_tokens=3).logprobs == ()
    answer = engine.answer(Q, [A], max_new_tokens=3, min_new_tokens=3, logprobs=0)
    assert [one.top for one in answer.logprobs] == [(), (), ()]


@pytest.mark.parametrize("wrong", [-1, 21, True])
def test_a_number_of_log_probabilities_out_of_range_is_refused(engine: Engine, wrong: Any) -> None:
    with pytest.raises(InputError, match=r"logprobs is .* \[0, 20\]"):
        engine.answer(Q, [A], logprobs=wrong)


@pytest.mark.parametrize(("raw", "wanted"), [(False, "It  is."), (True, " \n It  is.")])
def test_an_answer_does_not_begin_with_white_space_unless_it_continues_a_text(
    raw: bool, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with text_engine() as engine:
        # the first steps of an engine compute logits that are no answer's
        engine.answer("Why?", max_new_tokens=2)
        write(engine, " \n It  is.", monkeypatch)
        *events, answer = engine.stream("Why?", [], max_new_tokens=24, raw=raw)
    assert isinstance(answer, Answer)
    assert (
        answer.text
        == wanted
        == "".join(event.text for event in events if isinstance(event, TokenEvent))
    )


def test_a_raw_prompt_ends_with_its_question() -> None:
    with text_engine() as engine:
        question = tuple(engine.tokenizer("Once upon", add_special_tokens=False)["input_ids"])
        request = engine.parts.intake.answer_request("Once upon", [], {"raw": True})
        assert engine.parts.intake.prompt(request).token_ids[-len(question) :] == question
