"""Drafts from the prompt change how fast an answer comes, and nothing of the answer."""

import itertools
from itertools import pairwise
from typing import Any

import pytest
import torch

from ragkv import Answer, Engine, ResponseFormat, SessionConfig, TokenEvent
from ragkv.prompt.drafts import FIRST_DRAFTS, GRANTED, MOST_LOST, Drafts
from tests import tiny_models
from tests.engine.helpers import engine_of, text_engine

STORY = [*range(10, 30), 5, *range(30, 50)]


def copying(engine: Engine) -> None:
    """Make the model continue as `STORY` does, but for one jump, which no draft foresees."""
    adapter = engine.model.adapter
    original = engine.model.adapter.logits
    embed = engine.model.adapter.embed
    follows = {**dict(pairwise(STORY)), 22: 40}
    seen = []

    def embedding(tokens: Any) -> Any:
        seen[:] = tokens.tolist()
        return embed(tokens)

    def logits(hidden: Any) -> Any:
        out = original(hidden)
        for row, token in zip(out, seen[-len(out) :], strict=True):
            if token in follows:
                row[follows[token]] += 40.0
        return out

    # type: ignore[method-assign]
    adapter.embed = embedding
    adapter.logits = logits


@pytest.fixture(autouse=True)
def drafts_on_every_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers here are certain by far, so they bear the last bits in which some processors'
    products of rows differ.
    """
    monkeypatch.setattr("ragkv.scheduling.decode_batch.rows_are_alike", lambda *_: True)


def answers(family: str, **options: Any) -> list[tuple[Answer, Answer]]:
    """Two answers of an engine with drafts, and the same of one without."""
    made = []
    for drafts in (16, 0):
        with engine_of(family, drafts=drafts) as engine:
            copying(engine)
            made.append(
                [
                    engine.answer([7, *STORY[:3]], [STORY], max_new_tokens=30, **options)
                    for _ in range(2)
                ]
            )
    return list(zip(*made, strict=True))


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes as long as another one: whether drafts pay does not depend on a pause."""
    verified = Drafts.verified

    def in_equal_time(self: Drafts, drafted: int, accepted: int, _: float) -> None:
        verified(self, drafted, accepted, 0.01)

    monkeypatch.setattr(Drafts, "verified", in_equal_time)


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_a_greedy_answer_is_the_same_token_for_token_in_every_family(family: str) -> None:
    rope = engine_of(family).model.adapter.rope
    for drafted, plain in answers(family):
        assert drafted.token_ids == plain.token_ids and len(plain.token_ids) >= 15
        assert plain.timing.drafted == 0
        if rope.depends_on_length:  # a key's rotation is then another one in each step
            assert drafted.timing.drafted == 0
        else:
            assert drafted.timing.drafted > drafted.timing.accepted >= 8


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=0.9, seed=3),
        dict(frequency_penalty=0.7, logprobs=2),
        dict(repetition_penalty=1.3),
        dict(ratio=1.0),
    ],
    ids=str,
)
def test_sampling_penalties_and_log_probabilities_are_the_same(options: dict[str, Any]) -> None:
    for drafted, plain in answers("llama", **options):
        assert drafted.token_ids == plain.token_ids and drafted.timing.accepted > 0
        for mine, other in zip(drafted.logprobs, plain.logprobs, strict=True):
            assert mine.token_id == other.token_id and mine.logprob == pytest.approx(
                other.logprob, abs=1e-3
            )


@pytest.mark.parametrize("after", [*range(1, 24), 30])
def test_a_conversation_goes_on_from_the_same_history_wherever_its_reader_leaves(
    after: int,
) -> None:
    found = []
    for drafts in (16, 0):
        with engine_of("llama", drafts=drafts, session=SessionConfig(block_tokens=1)) as engine:
            copying(engine)
            talk = engine.session("s")
            stream = engine.stream([7, *STORY[:3]], [STORY], talk, max_new_tokens=30)
            tokens = [
                event.token_id
                for event in itertools.islice(stream, after)
                if isinstance(event, TokenEvent)
            ]
            if after == 30:
                list(stream)
            stream.close()
            found.append((tokens, engine.prefill([8, 9], [], talk)))
    (drafted, with_drafts), (plain, without) = found
    assert drafted == plain and with_drafts.reuse.exact == without.reuse.exact
    torch.testing.assert_close(with_drafts.logits, without.logits, atol=1e-3, rtol=1e-3)


def test_stop_strings_and_formats_end_an_answer_as_they_do_without_drafts() -> None:
    schema = {"type": "array", "items": {"enum": ["abab", "cd"]}, "minItems": 6, "maxItems": 6}
    form = ResponseFormat.json_schema(schema)
    for options in (dict(stop=["b"]), dict(response_format=form)):
        found = []
        for drafts in (16, 0):
            with text_engine(drafts=drafts) as engine:
                found.append(
                    engine.answer(
                        "Why?", ["abab", '["abab","cd","abab"]'], max_new_tokens=70, **options
                    )
                )
        assert found[0].text == found[1].text and found[0].finish_reason == found[1].finish_reason
        assert found[0].reuse.notes == found[1].reuse.notes


def test_what_followed_in_the_prompt_is_proposed_and_more_of_it_once_it_was_right() -> None:
    drafts = Drafts([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 1, 2], 16)
    assert drafts.propose(99) == ()  # a step without drafts must have shown how long one takes
    drafts.verified(0, 0, 1.0)
    assert drafts.propose(99) == (3, 4, 5) and len(drafts.propose(99)) == FIRST_DRAFTS
    assert drafts.propose(2) == (3, 4) and drafts.propose(0) == ()
    drafts.verified(3, 3, 1.0)
    for token in (3, 4, 5, 6, 7):
        drafts.add(token)
    assert drafts.propose(99) == (8, 9, 10, 11, 12, 13)
    drafts.add(99)
    assert drafts.propose(99) == ()
    assert (drafts.proposed, drafts.accepted) == (3, 3)


@pytest.mark.parametrize("step_s", [1.1, 1.3, 2.0, 4.0])
def test_drafts_that_are_always_wrong_cost_an_answer_little_and_are_tried_again(
    step_s: float,
) -> None:
    drafts = Drafts([1, 2, 1, 2], 16)
    drafts.verified(0, 0, 1.0)
    tried = 0
    spent_s = 0.0
    for token in range(1, 401):
        took_s = step_s if drafts.propose(99) else 1.0
        drafts.verified(4 if took_s > 1 else 0, 0, took_s)
        tried = tried + (took_s > 1)
        spent_s = spent_s + took_s
        drafts.add(1 + (token - 1) % 2)
        # the first one is not known before
        assert spent_s - token <= max(step_s - 1, MOST_LOST * (token + GRANTED))
    assert tried >= 2


def test_a_step_that_was_disturbed_does_not_end_the_drafts_of_an_answer() -> None:
    drafts = Drafts([1, 2, 1, 2], 16)
    drafts.verified(0, 0, 1.0)
    drafts.verified(3, 0, 1.3)
    drafts.verified(2, 0, 50.0)  # the processor was away
    for token in range(60):
        drafts.add(1 + token % 2)
    assert drafts.propose(99)


def test_drafts_that_save_time_are_made_all_the_time() -> None:
    drafts = Drafts([1, 2, 1, 2], 16)
    drafts.verified(0, 0, 1.0)
    for token in range(400):
        assert drafts.propose(99)
        drafts.verified(3, token % 2, 1.4)  # every other step saves .6, the others lose .4
        drafts.add(1 + token % 2)
