"""`with_structured_output` on random weights: every method gives the schema, and a part of an
answer is an error.
"""

from typing import Any, Literal

import pytest
from pydantic import BaseModel

from ragkv.integrations.langchain import ChatRagKV

from .helpers import chat

pytest.importorskip("llguidance")


class Rating(BaseModel):
    """How good something is."""

    good: bool
    stars: Literal[1, 2, 3]


@pytest.fixture
def llm(tiny: str) -> ChatRagKV:
    return chat(tiny, max_tokens=200)


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
@pytest.mark.parametrize("schema", [Rating, Rating.model_json_schema()], ids=["class", "schema"])
def test_structured_output_has_the_schema_with_every_method(
    llm: ChatRagKV, method: Any, schema: Any
) -> None:
    got = llm.with_structured_output(schema, method=method).invoke("How good is it?")
    assert Rating.model_validate(got)
    raw = llm.with_structured_output(schema, method=method, include_raw=True).invoke(
        "How good is it?"
    )
    assert (
        Rating.model_validate(raw["parsed"]) == Rating.model_validate(got)
        and raw["parsing_error"] is None
    )


def test_function_calling_gives_the_call_in_raw(llm: ChatRagKV) -> None:
    got = llm.with_structured_output(Rating, method="function_calling", include_raw=True).invoke(
        "How good is it?"
    )
    (call,) = got["raw"].tool_calls
    assert call["name"] == "Rating" and Rating.model_validate(call["args"]) == got["parsed"]
    assert (
        got["raw"].response_metadata["finish_reason"] == "tool_calls"
        and got["parsing_error"] is None
    )


def test_an_object_has_no_properties_but_those_that_its_schema_names(llm: ChatRagKV) -> None:
    inner = {
        "type": "object",
        "properties": {"properties": {"enum": [1]}},
        "required": ["properties"],
    }
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": inner, "maxItems": 1}},
        "required": ["a"],
    }
    got = llm.with_structured_output(schema).invoke("x", temperature=1.0, seed=1)
    assert got in ({"a": []}, {"a": [{"properties": 1}]})


@pytest.mark.parametrize(
    "schema", [{"enum": ["yes", "no"]}, {"properties": {}, "additionalProperties": {"const": 1}}]
)
def test_a_schema_for_no_object_or_one_that_says_what_it_takes_stays_as_it_is(
    llm: ChatRagKV, schema: Any
) -> None:
    sent = llm.with_structured_output(schema).first.kwargs["response_format"]["json_schema"][
        "schema"
    ]  # type: ignore[attr-defined]
    assert sent == {"title": "answer", **schema}


@pytest.mark.parametrize("schema", [Rating, Rating.model_json_schema()], ids=["class", "schema"])
def test_structured_output_that_is_cut_is_an_error_and_not_a_part_of_it(
    tiny: str, schema: Any
) -> None:
    cut = chat(tiny, max_tokens=3).with_structured_output(schema, include_raw=True)
    got = cut.invoke("How good is it?")
    assert got["parsed"] is None and "max_tokens" in str(got["parsing_error"])


def test_a_stream_ends_with_the_whole_value(llm: ChatRagKV) -> None:
    *_, last = llm.with_structured_output(Rating.model_json_schema()).stream("How good is it?")
    assert Rating.model_validate(last) == llm.with_structured_output(Rating).invoke(
        "How good is it?"
    )


def test_json_mode_without_a_schema_gives_an_object(llm: ChatRagKV) -> None:
    got = llm.bind(response_format={"type": "json_object"}, min_p=0.0).invoke("How good is it?")
    assert str(got.content).startswith("{")
