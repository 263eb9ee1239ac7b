"""The event stream of /v1/responses: its order, its numbers, and that it holds what the whole response has."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from ragkv import Engine
from ragkv.api.settings import QueueConfig

from .helpers import FACTS, app_on, client_of, events
from .test_responses import TOOLS, post, respond, said


@pytest.fixture
def client(talker: Engine, tmp_path: Path) -> Iterator[TestClient]:
    with client_of(app_on(talker, tmp_path, model=str(tmp_path / "talker"))) as client:
        yield client


def streamed(client: TestClient, **more: Any) -> list[Any]:
    response = post(client, stream=True, **more)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    found = events(response.text)
    assert all(name == data["type"] for name, data in found)
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    return [data for _, data in found]


def test_a_streamed_text_is_the_whole_text_in_openais_order_of_events(client: TestClient) -> None:
    whole = respond(client)
    told = streamed(client)
    kinds = [data["type"].removeprefix("response.") for data in told]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    deltas = [data for data in told if data["type"] == "response.output_text.delta"]
    assert len(deltas) > 1 and "".join(data["delta"] for data in deltas) == said(whole) == told[-4]["text"]
    final = told[-1]["response"]
    assert said(final) == said(whole) and final["id"] == told[0]["response"]["id"]
    assert {data["item_id"] for data in deltas} == {final["output"][0]["id"]}
    assert told[0]["response"]["status"] == "in_progress" and told[0]["response"]["output"] == []
    assert final["usage"] and final["ragkv"]["reuse"]["tokens"] == final["usage"]["input_tokens"]
    again = respond(client, "And?", previous_response_id=final["id"])
    assert again["ragkv"]["reuse"]["exact"] > final["usage"]["input_tokens"]


def test_a_streamed_call_is_an_item_with_its_arguments_and_no_text(client: TestClient) -> None:
    pytest.importorskip("llguidance")
    told = streamed(client, tools=TOOLS, tool_choice="required", max_output_tokens=900)
    kinds = [data["type"].removeprefix("response.") for data in told]
    calls = told[-1]["response"]["output"]
    one = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds == ["created", "in_progress", *one * len(calls), "completed"] and calls
    done = [data for data in told if data["type"] == "response.function_call_arguments.done"]
    assert [data["arguments"] for data in done] == [call["arguments"] for call in calls]
    assert [data["output_index"] for data in done] == list(range(len(calls)))


def test_a_streamed_text_has_its_log_probabilities_and_citations(reader: Engine, tmp_path: Path) -> None:
    documents = [{"title": "People", "text": "The job of Rasina is potter."}, {"text": FACTS[0]}]
    sent: dict[str, Any] = {
        "model": "reader",
        "input": "What is the job of Rasina?",
        "documents": documents,
        "include": ["message.output_text.logprobs"],
    }
    with client_of(app_on(reader, tmp_path)) as client:
        whole = client.post("/v1/responses", json=sent).json()["output"][0]["content"][0]
        told = [data for _, data in events(client.post("/v1/responses", json={**sent, "stream": True}).text)]
    assert whole["text"] == "potter [1]" or whole["annotations"] == []
    noted = [data["annotation"] for data in told if data["type"] == "response.output_text.annotation.added"]
    assert noted == whole["annotations"] and all(one["title"] == "People" for one in noted)
    tokens = [entry for data in told if data["type"].endswith("text.delta") for entry in data["logprobs"]]
    assert [token["token"] for token in tokens] == [token["token"] for token in whole["logprobs"]] and tokens


def test_a_refusal_before_the_first_token_has_its_status_and_one_after_it_is_an_event(
    talker: Engine, tmp_path: Path
) -> None:
    queue = QueueConfig(deadline_s=0.4)
    with client_of(app_on(talker, tmp_path, model=str(tmp_path / "talker"), queue=queue)) as client:
        assert post(client, stream=True, previous_response_id="resp_x").status_code == 404
        response = client.post(
            "/v1/responses", json={"model": "talker", "input": "Hello", "max_output_tokens": 1024, "stream": True}
        )
        name, last = events(response.text)[-1]
    assert name == last["type"] == "error" and last["code"] == "deadline_exceeded" and "deadline" in last["message"]
