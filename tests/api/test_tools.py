"""Tools in /v1/chat/completions, on random weights: constrained choices always validate."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from ragkv import Engine
from ragkv.api.answers import AnswerJob

from .helpers import FACTS, app_on, client_of, events, filled

pytest.importorskip("llguidance")

HELLO: list[Any] = [{"role": "user", "content": "Who built the mill of Oro?"}]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": "It helps.", "parameters": schema},
    }


SEARCH = tool(
    "search", query={"enum": ["mill", "port"]}, k={"type": "integer", "minimum": 1, "maximum": 9}
)
CLOCK = {"type": "function", "function": {"name": "clock"}}


def ask(talk: TestClient, **more: Any) -> Any:
    body = {
        "model": "talker",
        "messages": HELLO,
        "max_tokens": 900,
        "tools": [SEARCH, CLOCK],
        **more,
    }
    return talk.post("/v1/chat/completions", json=body)


def checked(call: dict[str, Any]) -> None:
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "search":
        assert (
            arguments["query"] in ("mill", "port")
            and 1 <= arguments["k"] <= 9
            and len(arguments) == 2
        )
    else:
        assert call["function"]["name"] == "clock" and arguments == {}


def test_a_form_that_cannot_be_kept_is_refused_before_anything_is_searched(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(client)
    searched = list[str]()
    monkeypatch.setattr(AnswerJob, "retrieve", lambda _, question, *__: searched.append(question))
    search = tool("search", query={"type": "string"})
    search["function"]["parameters"]["x-guidance"] = {}  # no form may have options of the compiler
    body = {
        "model": "reader:facts",
        "messages": HELLO,
        "tools": [search],
        "tool_choice": "required",
    }
    refused = client.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
    assert searched == []


@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_names_a_tool_and_its_arguments_validate(
    talk: TestClient, seed: int
) -> None:
    choice = ask(talk, tool_choice="required", temperature=1.0, seed=seed).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    for call in choice["message"]["tool_calls"]:
        checked(call)


def test_a_named_tool_is_called_once(talk: TestClient) -> None:
    named = {"type": "function", "function": {"name": "clock"}}
    (call,) = ask(talk, tool_choice=named).json()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "clock", "arguments": "{}"} and call["type"] == "function"


def test_a_streamed_call_comes_as_deltas_and_nothing_of_it_as_text(talk: TestClient) -> None:
    got = [data for _, data in events(ask(talk, tool_choice="required", stream=True).text)]
    assert got[-1] == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in got[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == ""
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == list(range(len(calls))) and calls
    for call in calls:
        checked(call)
    assert got[-2]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_an_answer_in_text_is_the_same_streamed_or_not(talk: TestClient, choice: Any) -> None:
    more = {"tool_choice": choice, "max_tokens": 12}
    whole = ask(talk, **more).json()["choices"][0]
    text = ask(talk, stream=True, **more).text
    streamed = "".join(
        d["choices"][0]["delta"].get("content") or "" for _, d in events(text) if d != "[DONE]"
    )
    assert streamed == whole["message"]["content"] and whole["message"]["tool_calls"] is None


def test_results_go_back_as_tool_messages_and_chunks_stay_reusable_with_the_same_tools(
    talk: TestClient,
) -> None:
    documents = [{"text": text} for text in FACTS]
    first = ask(talk, tool_choice="required", parallel_tool_calls=False, documents=documents).json()
    called = first["choices"][0]["message"]
    assert first["ragkv"]["reuse"]["missed_chunks"] == 2
    service: Any = talk.app
    for tenant in service.state.service.tenants.opened().values():
        tenant.engine.flush()
    result = {
        "role": "tool",
        "tool_call_id": called["tool_calls"][0]["id"],
        "content": "Tam Reed built it.",
    }
    again = ask(
        talk,
        messages=[*HELLO, {**called, "annotations": None}, result],
        documents=documents,
        max_tokens=5,
    )
    assert again.status_code == 200, again.text
    reuse = again.json()["ragkv"]["reuse"]
    assert reuse["missed_chunks"] == 0 and reuse["fused"] > 0


@pytest.mark.parametrize("seed", range(4))
def test_with_a_response_format_the_answer_is_json_of_the_schema_or_calls(
    talk: TestClient, seed: int
) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    sent = {"response_format": form, "temperature": 1.5, "seed": seed}
    choice = ask(talk, **sent).json()["choices"][0]
    if calls := choice["message"]["tool_calls"]:
        for call in calls:
            checked(call)
    else:
        assert (
            json.loads(choice["message"]["content"])["n"] in (1, 2)
            and choice["finish_reason"] == "stop"
        )
    deltas = [
        d["choices"][0]["delta"]
        for _, d in events(ask(talk, stream=True, **sent).text)
        if d != "[DONE]"
    ]
    streamed = "".join(delta.get("content") or "" for delta in deltas)
    assert streamed == (choice["message"]["content"] or "")


def test_a_named_session_with_a_tools_result_says_after_a_restart_what_a_full_recompute_says(
    talker: Engine, tmp_path: Path
) -> None:
    app = {"model": str(tmp_path / "talker")}
    with client_of(app_on(talker, tmp_path, **app)) as client:
        ask(client, session_id="s", tool_choice="required", parallel_tool_calls=False)
    result = {"role": "tool", "tool_call_id": "x", "content": "Tam Reed built it."}
    said = {}
    with client_of(app_on(talker, tmp_path, **app)) as client:
        for reuse, tools in itertools.product(("prefix", "none"), ([SEARCH, CLOCK], [CLOCK])):
            name = f"{reuse}-{len(tools)}"
            sent = {"messages": [*HELLO, result], "tools": tools, "tool_choice": "none"}
            assert client.post("/v1/sessions/s/fork", json={"to": name}).status_code == 201
            got = ask(client, session_id=name, ragkv={"reuse": reuse}, max_tokens=12, **sent).json()
            said[name] = got["choices"][0]["message"]["content"]
            if len(tools) == 1:
                assert got["ragkv"]["reuse"]["exact"] == 0, (
                    "the history was computed behind other tools"
                )
            elif reuse == "prefix":
                assert got["ragkv"]["reuse"]["exact"] > 50
    assert said["prefix-2"] == said["none-2"] and said["prefix-1"] == said["none-1"]


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": [SEARCH, SEARCH]}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [tool("bad", a={"not": {}})], "tool_choice": "required"}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ],
    ids=str,
)
def test_wrong_tools_are_refused_and_the_field_is_named(
    talk: TestClient, extra: Any, param: str
) -> None:
    response = ask(talk, **extra)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text
