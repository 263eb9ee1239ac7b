"""`with_structured_output` on random weights: every method gives the schema, and a part of an answer is an error."""

from typing import Any, Literal

import pytest
from pydantic import BaseModel

from ragkv.langchain import ChatRagKV

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
def test_structured_output_has_the_schema_with_every_method(llm: ChatRagKV, method: Any, schema: Any) -> None:
    got = llm.with_structured_output(schema, method=method).invoke("How good is it?")
    assert Rating.model_validate(got)
    raw = llm.with_structured_output(schema, method=method, include_raw=True).invoke("How good is it?")
    assert Rating.model_validate(raw["parsed"]) == Rating.model_validate(got) and raw["parsing_error"] is None


def test_structured_output_that_is_cut_is_an_error_and_not_a_part_of_it(tiny: str) -> None:
    cut = chat(tiny, max_tokens=3).with_structured_output(Rating.model_json_schema(), include_raw=True)
    got = cut.invoke("How good is it?")
    assert got["parsed"] is None and "max_tokens" in str(got["parsing_error"])


def test_a_stream_ends_with_the_whole_value(llm: ChatRagKV) -> None:
    *_, last = llm.with_structured_output(Rating.model_json_schema()).stream("How good is it?")
    assert Rating.model_validate(last) == llm.with_structured_output(Rating).invoke("How good is it?")


def test_json_mode_without_a_schema_gives_an_object(llm: ChatRagKV) -> None:
    got = llm.bind(response_format={"type": "json_object"}, min_p=0.0).invoke("How good is it?")
    assert str(got.content).startswith("{")
