"""/v1/responses: inputs, conversations of stored responses, tools, forms, deletion, limits."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from ragkv import Engine, EngineConfig, SessionConfig
from ragkv.api.keys import KeyFile, Quota
from ragkv.api.settings import LimitsConfig, QuotaConfig

from .helpers import FACTS, app_on, client_of, engine_of, filled
from .test_tools import CLOCK, SEARCH

TEXT = "Tell me of the harbour."
GIVEN: list[Any] = [SEARCH, CLOCK]
TOOLS = [{"type": "function", **tool["function"]} for tool in GIVEN]
UNKNOWN = "resp_" + "0" * 32


@pytest.fixture
def client(talker: Engine, tmp_path: Path) -> Iterator[TestClient]:
    with client_of(app_on(talker, tmp_path, model=str(tmp_path / "talker"))) as client:
        yield client


def post(client: TestClient, given: Any = TEXT, **more: Any) -> Any:
    return client.post("/v1/responses", json={"model": "talker", "input": given, "max_output_tokens": 8, **more})


def respond(client: TestClient, given: Any = TEXT, **more: Any) -> Any:
    response = post(client, given, **more)
    assert response.status_code == 200, response.text
    return response.json()


def said(response: Any) -> str:
    return str(response["output"][0]["content"][0]["text"])


def chat(client: TestClient, messages: list[Any], **more: Any) -> Any:
    body = {"model": "talker", "messages": messages, "max_tokens": 8, **more}
    return client.post("/v1/chat/completions", json=body).json()


def test_a_text_is_answered_as_a_chat_of_one_user_message(client: TestClient) -> None:
    got = respond(client)
    plain = chat(client, [{"role": "user", "content": TEXT}])
    assert said(got) == plain["choices"][0]["message"]["content"]
    assert got["object"] == "response" and got["status"] == "incomplete"
    assert got["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (got["output"][0]["role"], got["output"][0]["status"]) == ("assistant", "incomplete")
    usage = got["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] == plain["usage"]["total_tokens"]


def test_items_and_instructions_are_messages_and_a_system_message(client: TestClient) -> None:
    items = [
        {"role": "user", "content": "Who are you?"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Ada.", "annotations": []}],
        },
        {"role": "user", "content": [{"type": "input_text", "text": "And "}, {"type": "input_text", "text": "where?"}]},
    ]
    got = respond(client, items, instructions="Be kind.")
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "Ada."},
        {"role": "user", "content": "And where?"},
    ]
    assert said(got) == chat(client, messages)["choices"][0]["message"]["content"]
    assert got["instructions"] == "Be kind."


def test_a_response_is_continued_and_what_was_said_is_reused(client: TestClient) -> None:
    first = respond(client)
    again = respond(client, "And the mill?", previous_response_id=first["id"])
    messages = [
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": said(first)},
        {"role": "user", "content": "And the mill?"},
    ]
    full = chat(client, messages, ragkv={"reuse": "none"})
    assert said(again) == full["choices"][0]["message"]["content"]
    reuse = again["ragkv"]["reuse"]
    cached = again["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached == reuse["exact"] + reuse["fused"] > first["usage"]["input_tokens"]
    assert again["previous_response_id"] == first["id"]


def test_two_responses_may_continue_the_same_one(client: TestClient) -> None:
    first = respond(client)
    one = respond(client, "And the mill?", previous_response_id=first["id"])
    other = respond(client, "And the port?", previous_response_id=first["id"])
    assert one["ragkv"]["reuse"]["exact"] == other["ragkv"]["reuse"]["exact"] > 0
    assert len({first["id"], one["id"], other["id"]}) == 3


def test_instructions_are_those_of_the_request_alone(client: TestClient) -> None:
    first = respond(client, instructions="Be kind.")
    again = respond(client, "And the mill?", previous_response_id=first["id"], instructions="Be short.")
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": said(first)},
        {"role": "user", "content": "And the mill?"},
    ]
    assert said(again) == chat(client, messages, ragkv={"reuse": "none"})["choices"][0]["message"]["content"]


def test_documents_stay_in_the_conversation(client: TestClient) -> None:
    filled(client)
    first = respond(client, "Who built the mill?", rag={"collection": "facts", "k": 2})
    assert len(first["ragkv"]["sources"]) == 2
    again = respond(client, "And when?", previous_response_id=first["id"])
    tokens = sum(len(text) for text in FACTS)  # of bytes
    assert again["usage"]["input_tokens"] > first["usage"]["input_tokens"] > tokens
    reuse = again["ragkv"]["reuse"]
    assert reuse["exact"] + reuse["fused"] > tokens


def test_a_stored_response_outlives_a_restart(talker: Engine, tmp_path: Path) -> None:
    with client_of(app_on(talker, tmp_path, model=str(tmp_path / "talker"))) as client:
        first = respond(client, metadata={"topic": "ports"})
    with client_of(app_on(talker, tmp_path, model=str(tmp_path / "talker"))) as client:
        shown = client.get(f"/v1/responses/{first['id']}").json()
        assert shown == {**first, "ragkv": None} and shown["metadata"] == {"topic": "ports"}
        again = respond(client, "And the mill?", previous_response_id=first["id"])
        assert again["ragkv"]["reuse"]["exact"] > first["usage"]["input_tokens"]


def test_a_deleted_response_is_gone_with_its_conversation(client: TestClient, tmp_path: Path) -> None:
    first = respond(client)
    sessions = engine_of(client.app).session_ids
    assert [name for name in sessions() if name.startswith("chat-")]
    deleted = client.delete(f"/v1/responses/{first['id']}")
    assert deleted.json() == {"id": first["id"], "object": "response", "deleted": True}
    assert sessions() == () and list((tmp_path / "responses").iterdir()) == []
    for response in (
        client.get(f"/v1/responses/{first['id']}"),
        client.delete(f"/v1/responses/{first['id']}"),
        post(client, "And?", previous_response_id=first["id"]),
    ):
        assert response.status_code == 404
        assert response.json()["error"]["message"] == f"There is no stored response '{first['id']}'."


def test_a_response_that_is_not_stored_leaves_nothing(client: TestClient, tmp_path: Path) -> None:
    got = respond(client, store=False)
    assert got["store"] is False
    assert client.get(f"/v1/responses/{got['id']}").status_code == 404
    assert not (tmp_path / "responses").exists() and engine_of(client.app).session_ids() == ()


@pytest.mark.parametrize("name", [UNKNOWN, "resp_x", "../../keys", "x" * 128])
def test_an_unknown_response_is_not_found(client: TestClient, name: str) -> None:
    response = post(client, previous_response_id=name)
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "previous_response_id"


def test_another_tenants_response_is_not_found(talker: Engine, tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    (one, _), (other, _) = keys.add("one", "alpha"), keys.add("other", "beta")
    app = app_on(talker, tmp_path, model=str(tmp_path / "talker"))
    with client_of(app, one) as ours, client_of(app, other) as theirs:
        first = respond(ours)
        for response in (
            theirs.get(f"/v1/responses/{first['id']}"),
            theirs.delete(f"/v1/responses/{first['id']}"),
            post(theirs, previous_response_id=first["id"]),
        ):
            assert response.status_code == 404 and said(first) not in response.text
        assert ours.get(f"/v1/responses/{first['id']}").status_code == 200
        assert (tmp_path / "tenants" / "alpha" / "responses").stat().st_mode & 0o077 == 0


def test_beyond_the_quota_of_sessions_the_least_recently_used_response_is_deleted(
    talker: Engine, tmp_path: Path
) -> None:
    quotas = QuotaConfig(sessions=2)
    with client_of(app_on(talker, tmp_path, model=str(tmp_path / "talker"), quotas=quotas)) as client:
        first, second = respond(client), respond(client, "Two.")
        assert client.get(f"/v1/responses/{first['id']}").status_code == 200
        third = respond(client, "Three.")
        found = [client.get(f"/v1/responses/{one['id']}").status_code for one in (first, second, third)]
    assert found == [200, 404, 200]


def test_a_key_without_sessions_gets_answers_that_are_not_stored(talker: Engine, tmp_path: Path) -> None:
    key, _ = KeyFile(tmp_path / "keys.json").add("one", quota=Quota(sessions=0))
    with client_of(app_on(talker, tmp_path, model=str(tmp_path / "talker")), key) as client:
        got = respond(client)
        assert got["store"] is False and got["ragkv"]["notes"] == ["not stored: quotas.sessions is 0"]
        assert client.get(f"/v1/responses/{got['id']}").status_code == 404


def test_an_idle_response_expires_like_a_session(talker: Engine, tmp_path: Path) -> None:
    engine = EngineConfig(session=SessionConfig(ttl_s=1e-6))
    with client_of(app_on(talker, tmp_path, model=str(tmp_path / "talker"), engine=engine)) as client:
        first = respond(client)
        assert client.get(f"/v1/responses/{first['id']}").status_code == 404
        assert list((tmp_path / "responses").iterdir()) == []


def test_a_damaged_file_is_no_response(client: TestClient, tmp_path: Path) -> None:
    first = respond(client)
    (tmp_path / "responses" / f"{first['id']}.json").write_text("{")
    assert client.get(f"/v1/responses/{first['id']}").status_code == 404


def test_calls_are_items_and_their_results_continue_the_response(client: TestClient) -> None:
    pytest.importorskip("llguidance")
    more = {"tools": TOOLS, "max_output_tokens": 300}
    first = respond(client, tool_choice="required", parallel_tool_calls=False, **more)
    (call,) = first["output"]
    assert call["type"] == "function_call" and call["name"] in ("search", "clock") and first["status"] == "completed"
    assert isinstance(json.loads(call["arguments"]), dict)
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Tam Reed built it."}
    again = respond(client, [result], previous_response_id=first["id"], **{**more, "max_output_tokens": 5})
    assert again["output"][0]["type"] == "message"
    assert again["ragkv"]["reuse"]["exact"] > first["usage"]["output_tokens"], "the call is reused too"
    whole = [{"role": "user", "content": TEXT}, {**call, "status": "completed"}, result]
    alone = respond(client, whole, store=False, **{**more, "max_output_tokens": 5})
    assert said(alone) == said(again)


def test_a_named_tool_is_called(client: TestClient) -> None:
    pytest.importorskip("llguidance")
    choice = {"type": "function", "name": "clock"}
    got = respond(client, tools=TOOLS, tool_choice=choice, max_output_tokens=100)
    assert [item["name"] for item in got["output"]] == ["clock"] and got["tool_choice"] == choice
    assert got["tools"][0]["name"] == "search"


def test_the_text_has_the_form_of_the_request(client: TestClient) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"old": {"type": "boolean"}}, "required": ["old"]}
    form = {"type": "json_schema", "name": "age", "schema": {**schema, "additionalProperties": False}}
    got = respond(client, text={"format": form}, max_output_tokens=40)
    assert isinstance(json.loads(said(got))["old"], bool) and got["status"] == "completed"
    assert got["text"]["format"]["schema"] == form["schema"]
    refused = post(client, text={"format": {**form, "schema": {"not": {}}}})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "text.format"


def test_log_probabilities_come_with_the_text(client: TestClient) -> None:
    got = respond(client, include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=3)
    logprobs = got["output"][0]["content"][0]["logprobs"]
    assert len(logprobs) == 3 and all(len(one["top_logprobs"]) == 2 for one in logprobs)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"nonsense": 1}, "nonsense"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"input": [{"role": "system", "content": "Be kind."}]}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input.0"),
        ({"instructions": "x" * 2001}, "instructions"),
        ({"input": [{"role": "user", "content": "x" * 2001}]}, "input.0"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"stream_options": {}}, "stream_options"),
        ({"include": ["reasoning.encrypted_content"]}, "include.0"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_offered_is_refused_and_the_field_is_named(
    talker: Engine, tmp_path: Path, extra: Any, param: str
) -> None:
    limits = LimitsConfig(question_chars=2000)
    with client_of(app_on(talker, tmp_path, model=str(tmp_path / "talker"), limits=limits)) as client:
        error = post(client, extra.pop("input", TEXT), **extra).json()["error"]
    assert error["param"] == param, error


def test_an_image_is_refused_by_its_name(client: TestClient) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,x"}
    error = post(client, [{"role": "user", "content": [image]}]).json()["error"]
    assert "images are not supported" in error["message"]


def test_harmless_fields_are_taken_with_a_note(client: TestClient) -> None:
    got = respond(client, user="me", service_tier="auto", store=False)
    assert [note.split()[0] for note in got["ragkv"]["notes"]] == ["user", "service_tier"]
    shown = client.get(f"/v1/responses/{UNKNOWN}?stream=true").json()["error"]
    assert shown["param"] == "stream"
