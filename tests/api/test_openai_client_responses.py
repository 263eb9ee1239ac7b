"""The openai client's `responses`: texts, items, continued responses, tools, forms, streams, deletion."""

from typing import Any

import openai
import pytest

from .test_openai_client_chat import SAY, chat, text
from .test_openai_client_tools import City
from .test_responses import TOOLS
from .test_tools import checked

pytest.importorskip("llguidance")
pytestmark = pytest.mark.enable_socket
TEXT = SAY[0]["content"]
CALLING: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_output_tokens": 900}


def respond(client: openai.OpenAI, given: Any = TEXT, **more: Any) -> Any:
    return client.responses.create(**{"model": "talker", "input": given, "max_output_tokens": 8, **more})


def test_a_text_is_answered(openai_client: openai.OpenAI) -> None:
    got = respond(openai_client)
    assert got.output_text == text(chat(openai_client)) and got.status == "incomplete"
    assert got.incomplete_details.reason == "max_output_tokens" and got.usage.output_tokens == 8


def test_messages_and_instructions_are_answered(openai_client: openai.OpenAI) -> None:
    got = respond(openai_client, [{"role": "user", "content": TEXT}], instructions="Be kind.")
    assert got.output_text == text(chat(openai_client, [{"role": "system", "content": "Be kind."}, *SAY]))
    assert got.instructions == "Be kind."


def test_a_response_is_continued(openai_client: openai.OpenAI) -> None:
    first = respond(openai_client)
    got = respond(openai_client, "And the mill?", previous_response_id=first.id)
    assert got.previous_response_id == first.id
    assert got.usage.input_tokens_details.cached_tokens > first.usage.input_tokens


def test_output_items_can_be_sent_back_instead(openai_client: openai.OpenAI) -> None:
    first = respond(openai_client, extra_body={"logit_bias": {"40": 100}})  # letters: bytes have no text to send back
    question = {"role": "user", "content": "And the mill?"}
    sent = respond(openai_client, [{"role": "user", "content": TEXT}, *first.output, question], store=False)
    assert sent.output_text == respond(openai_client, "And the mill?", previous_response_id=first.id).output_text


def test_a_stored_response_is_shown_and_deleted(openai_client: openai.OpenAI) -> None:
    first = respond(openai_client, metadata={"topic": "ports"})
    shown = openai_client.responses.retrieve(first.id)
    assert shown.output_text == first.output_text and shown.metadata == {"topic": "ports"}
    openai_client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="no stored response"):
        openai_client.responses.retrieve(first.id)


def test_a_response_that_is_not_stored_is_not_found(openai_client: openai.OpenAI) -> None:
    first = respond(openai_client, store=False)
    with pytest.raises(openai.NotFoundError) as caught:
        respond(openai_client, "And?", previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"


def test_calls_and_their_results(openai_client: openai.OpenAI) -> None:
    first = respond(openai_client, **CALLING)
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "Tam Reed."} for call in first.output
    ]
    for call in first.output:
        assert call.type == "function_call"
        checked({"function": {"name": call.name, "arguments": call.arguments}})
    got = respond(openai_client, results, previous_response_id=first.id, tools=TOOLS, tool_choice="none")
    assert got.output_text and results


def test_a_pydantic_class_is_parsed(openai_client: openai.OpenAI) -> None:
    got = openai_client.responses.parse(model="talker", input=TEXT, text_format=City, max_output_tokens=60)
    assert isinstance(got.output_parsed, City) and got.status == "completed"


def test_a_stream_is_the_whole_text(openai_client: openai.OpenAI) -> None:
    events = list(respond(openai_client, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == respond(openai_client).output_text and len(deltas) > 1
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")


def test_the_streams_helper_assembles_a_text_in_a_form(openai_client: openai.OpenAI) -> None:
    how: Any = {"model": "talker", "input": TEXT, "text_format": City, "max_output_tokens": 60}
    with openai_client.responses.stream(**how) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, City) and kinds[-1] == "response.completed"


def test_the_streams_helper_assembles_calls(openai_client: openai.OpenAI) -> None:
    with openai_client.responses.stream(model="talker", input=TEXT, **CALLING) as stream:
        final = stream.get_final_response()
    assert final.output and all(item.type == "function_call" for item in final.output)


def test_log_probabilities_are_included_on_request(openai_client: openai.OpenAI) -> None:
    got = respond(openai_client, include=["message.output_text.logprobs"], top_logprobs=2)
    logprobs = got.output[0].content[0].logprobs
    assert len(logprobs) == 8 and all(len(one.top_logprobs) == 2 for one in logprobs)


def test_what_is_not_offered_is_a_bad_request(openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        respond(openai_client, background=True)
    assert caught.value.param == "background" and caught.value.code == "unsupported_parameter"
