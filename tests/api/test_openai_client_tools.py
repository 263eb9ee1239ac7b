"""Tools and forms of answers with the openai client, on random weights: constrained answers always validate."""

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from .test_openai_client_chat import SAY, chat, text
from .test_tools import CLOCK, SEARCH, checked

pytest.importorskip("llguidance")
pytestmark = pytest.mark.enable_socket
TOOLS: list[Any] = [SEARCH, CLOCK]
MANY = 900


class City(BaseModel):
    """A form that random weights can fill."""

    name: Literal["Oro", "Marl"]
    old: bool


CLOSED = {**City.model_json_schema(), "additionalProperties": False}


def calls(got: Any) -> list[Any]:
    return list(got.choices[0].message.tool_calls or ())


@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_is_of_a_given_tool_and_validates(openai_client: openai.OpenAI, seed: int) -> None:
    got = chat(openai_client, tools=TOOLS, tool_choice="required", temperature=1.0, seed=seed, max_tokens=MANY)
    assert got.choices[0].finish_reason == "tool_calls" and calls(got)
    for call in calls(got):
        checked(call.model_dump())


def test_a_named_tool_is_called(openai_client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "clock"}}
    assert [
        call.function.name for call in calls(chat(openai_client, tools=TOOLS, tool_choice=choice, max_tokens=MANY))
    ] == ["clock"]


def test_the_ids_of_calls_differ(openai_client: openai.OpenAI) -> None:
    how: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_tokens": MANY}
    ids = [call.id for _ in range(2) for call in calls(chat(openai_client, **how))]
    assert len(set(ids)) == len(ids) and all(len(one) == 9 for one in ids)


def test_without_tools_to_choose_the_answer_is_text(openai_client: openai.OpenAI) -> None:
    got = chat(openai_client, tools=TOOLS, tool_choice="none")
    assert text(got) and not calls(got)


def test_a_result_goes_back_as_a_tool_message(openai_client: openai.OpenAI) -> None:
    first = chat(openai_client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=MANY)
    (call,) = calls(first)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Tam Reed built it."}
    got = chat(openai_client, [*SAY, first.choices[0].message, result], tools=TOOLS, tool_choice="none")
    assert text(got) and got.usage.prompt_tokens > first.usage.prompt_tokens


def test_the_streams_helper_assembles_the_calls(openai_client: openai.OpenAI) -> None:
    how: Any = {"model": "talker", "messages": SAY, "tools": TOOLS, "tool_choice": "required", "max_tokens": MANY}
    with openai_client.chat.completions.stream(**how) as stream:
        final = stream.get_final_completion()
    for call in calls(final):
        checked(call.model_dump())
    assert calls(final)


def test_an_answer_has_the_schema_of_a_pydantic_class(openai_client: openai.OpenAI) -> None:
    got = openai_client.chat.completions.parse(model="talker", messages=SAY, response_format=City, max_tokens=60)
    city = got.choices[0].message.parsed
    assert isinstance(city, City) and got.choices[0].finish_reason == "stop"


def test_a_streamed_answer_has_the_schema(openai_client: openai.OpenAI) -> None:
    how: Any = {"model": "talker", "messages": SAY, "response_format": City, "max_tokens": 60}
    with openai_client.chat.completions.stream(**how) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, City)


def test_every_one_of_several_answers_has_the_schema(openai_client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CLOSED}}
    got = chat(openai_client, n=3, temperature=1.5, seed=2, response_format=form, max_tokens=60)
    for choice in got.choices:
        City.model_validate_json(choice.message.content)


def test_an_answer_of_any_json_object_begins_as_one(openai_client: openai.OpenAI) -> None:
    assert text(chat(openai_client, response_format={"type": "json_object"})).startswith("{")


def test_a_form_together_with_tools_gives_json_or_calls(openai_client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CLOSED}}
    got = chat(openai_client, tools=TOOLS, response_format=form, max_tokens=MANY)
    for call in calls(got):
        checked(call.model_dump())
    if not calls(got):
        assert set(json.loads(text(got))) == {"name", "old"}


def test_a_schema_that_cannot_be_kept_is_a_bad_request(openai_client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="/properties/a") as caught:
        chat(openai_client, response_format=form)
    assert caught.value.code == "unsupported_schema" and caught.value.param == "response_format"


def test_a_choice_of_an_unknown_tool_is_a_bad_request(openai_client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "other"}}
    with pytest.raises(openai.BadRequestError, match="other"):
        chat(openai_client, tools=TOOLS, tool_choice=choice)
