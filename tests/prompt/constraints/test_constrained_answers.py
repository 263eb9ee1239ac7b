"""Answers that a schema constrains, from random weights: every finished one validates, however it
is asked for.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis
import jsonschema
import pytest
from hypothesis import HealthCheck, Phase

from ragkv import Answer, Engine, ResponseFormat, TokenEvent
from ragkv.errors import InputError, SchemaError

from .helpers import schemas, tiny_engine

pytest.importorskip("llguidance")

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "year": {"type": "integer", "minimum": 1000, "maximum": 2026},
        "tags": {"type": "array", "items": {"enum": ["sea", "hill"]}, "maxItems": 3},
    },
    "required": ["name", "year", "tags"],
    "additionalProperties": False,
}
FORM = ResponseFormat.json_schema(CITY)
FACTS = [
    "The harbour of Oro was built by Lena Moss.",
    "The mill of Oro was built by Tam Reed in 1832.",
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()


def checked(answer: Answer, schema: Any = CITY) -> Any:
    """The value of an answer that has finished and validates."""
    assert answer.finish_reason == "stop" and not answer.reuse.notes
    value = json.loads(answer.text)
    jsonschema.validate(value, schema)
    return value


def _random_schemas(examples: int) -> tuple[int, int]:
    """Answers to random schemas, checked: how many finished, and how many there were."""
    engine = tiny_engine()
    counts = [0, 0]

    @hypothesis.settings(
        max_examples=examples, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @hypothesis.given(schemas)
    def answer(schema: Any) -> None:
        form = ResponseFormat.json_schema(schema)
        got = engine.answer(
            "Say it.", response_format=form, max_new_tokens=300, temperature=1.0, seed=counts[1]
        )
        counts[1] += 1
        if got.finish_reason == "stop":
            jsonschema.validate(json.loads(got.text), schema)
            counts[0] += 1
        else:
            assert any("response format" in note for note in got.reuse.notes)

    answer()
    return counts[0], counts[1]


def test_every_finished_answer_to_30_random_schemas_validates() -> None:
    finished, asked = _random_schemas(30)
    assert asked >= 30 and finished > 0.7 * asked


@pytest.mark.slow
def test_every_finished_answer_to_1000_random_schemas_validates() -> None:
    finished, asked = _random_schemas(1000)
    print(f"{finished} of {asked} finished and validated")
    assert asked >= 1000 and finished > 0.9 * asked


def test_any_json_object_is_an_object_and_nothing_else(engine: Engine) -> None:
    for seed in range(5):
        got = engine.answer(
            "Say it.", response_format=ResponseFormat.json_object(), temperature=1.0, seed=seed
        )
        assert got.text.startswith("{")
        assert got.finish_reason == "length" or isinstance(json.loads(got.text), dict)


def test_streamed_pieces_are_the_answer(engine: Engine) -> None:
    # stores what it missed, and what is exact behind the prefix
    engine.answer("Which city?", FACTS, max_new_tokens=1)
    engine.answer("Which city?", FACTS, max_new_tokens=1)
    *events, last = engine.stream("Which city?", FACTS, response_format=FORM, max_new_tokens=200)
    assert isinstance(last, Answer)
    assert "".join(event.text for event in events if isinstance(event, TokenEvent)) == last.text
    assert checked(last) == checked(
        engine.answer("Which city?", FACTS, response_format=FORM, max_new_tokens=200)
    )


def test_a_constrained_answer_over_fused_chunks_is_that_over_the_full_prompt_at_ratio_1(
    engine: Engine,
) -> None:
    engine.entries.encode(FACTS)
    fused = engine.answer("Which city?", FACTS, response_format=FORM, max_new_tokens=200, ratio=1.0)
    full = engine.answer(
        "Which city?", FACTS, response_format=FORM, max_new_tokens=200, reuse="none"
    )
    assert fused.reuse.exact > 0 and fused.text == full.text and checked(fused)
    assert checked(
        engine.answer("Which city?", FACTS, response_format=FORM, max_new_tokens=200, ratio=0.0)
    )


def test_an_answer_that_is_cut_says_that_it_lacks_its_form(engine: Engine) -> None:
    cut = engine.answer("Which city?", response_format=FORM, max_new_tokens=5)
    assert cut.finish_reason == "length" and cut.text.startswith("{") and len(cut.token_ids) == 5
    assert "max_new_tokens=5" in cut.reuse.notes[-1]
    stopped = engine.answer(
        "Which city?", response_format=FORM, max_new_tokens=200, stop=['"year"']
    )
    assert stopped.finish_reason == "stop" and '"year"' not in stopped.text
    assert "a stop string" in stopped.reuse.notes[-1]
    whole = engine.answer("Which city?", response_format=FORM, max_new_tokens=200, stop=["}}"])
    assert checked(whole)


def test_a_number_ends_with_an_end_token_or_at_the_limit(engine: Engine) -> None:
    form = ResponseFormat.json_schema({"type": "integer"})
    for limit in (1, 3, 200):
        got = engine.answer(
            "How many?", response_format=form, max_new_tokens=limit, temperature=1.0, seed=limit
        )
        assert got.text == "-" or isinstance(json.loads(got.text), int)
        assert bool(got.reuse.notes) == (got.text == "-")


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0, "seed": 3, "top_k": 1},
        {"temperature": 2.0, "seed": 3, "top_p": 0.1},
        {"temperature": 1.0, "seed": 3, "min_p": 0.9},
        {"repetition_penalty": 5.0},
        {"min_new_tokens": 150},
    ],
    ids=str,
)
def test_sampling_and_repetition_rules_choose_among_what_the_schema_allows(
    engine: Engine, options: Any
) -> None:
    assert checked(
        engine.answer("Which city?", response_format=FORM, max_new_tokens=200, **options)
    )


def test_requests_of_different_schemas_and_plain_ones_decode_in_one_batch_as_they_do_alone(
    engine: Engine,
) -> None:
    forms: list[ResponseFormat | None] = [
        None,
        FORM,
        ResponseFormat.json_schema({"enum": ["x", "yy"]}),
        None,
        FORM,
    ]
    forms.append(
        ResponseFormat.json_schema({"type": "array", "items": {"type": "boolean"}, "minItems": 9})
    )

    def ask(number: int) -> str:
        return engine.answer(
            f"Question {number}?", response_format=forms[number % 6], max_new_tokens=60
        ).text

    alone = [ask(number) for number in range(12)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(12))) == alone


def test_a_conversation_goes_on_after_a_constrained_answer(engine: Engine) -> None:
    with_schema = engine.session("structured")
    first = engine.answer(
        "Which city?", session=with_schema, response_format=FORM, max_new_tokens=200
    )
    assert checked(first)
    again = engine.answer(
        "And which else?", session=with_schema, response_format=FORM, max_new_tokens=200
    )
    assert checked(again) and again.reuse.exact > len(first.token_ids)


def test_a_wrong_response_format_is_refused_before_any_work(engine: Engine) -> None:
    with pytest.raises(InputError, match="ResponseFormat"):
        engine.answer("x", response_format={"type": "json_object"})  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match=r'\["not"\]'):
        engine.answer(
            "x", response_format=ResponseFormat.json_schema({"properties": {"a": {"not": {}}}})
        )
