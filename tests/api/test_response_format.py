"""`response_format` of /v1/chat/completions."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel

from ragkv import Engine

from .helpers import FACTS, app_on, client_at, events, filled, on_port

pytest.importorskip("llguidance")

HELLO = [{"role": "user", "content": "Which city?"}]
CITY = {
    "type": "object",
    "properties": {
        "sources": {"type": "array", "items": {"const": 7}, "minItems": 1, "maxItems": 1},
        "old": {"type": "boolean"},
    },
    "required": ["sources", "old"],
    "additionalProperties": False,
}


def form(schema: Any = CITY) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": "city", "strict": True, "schema": schema},
    }


def body(**more: Any) -> dict[str, Any]:
    return {"model": "talker", "messages": HELLO, "max_tokens": 60, **more}


def test_an_answer_has_the_schema_of_the_request(talk: TestClient) -> None:
    got = talk.post("/v1/chat/completions", json=body(response_format=form())).json()["choices"][0]
    jsonschema.validate(json.loads(got["message"]["content"]), CITY)
    assert got["finish_reason"] == "stop"


def test_numbers_in_brackets_are_json_and_no_markers_of_sources(talk: TestClient) -> None:
    documents = [{"text": text} for text in FACTS]
    got = talk.post(
        "/v1/chat/completions", json=body(response_format=form(), documents=documents)
    ).json()
    message = got["choices"][0]["message"]
    assert json.loads(message["content"])["sources"] == [7] and message["annotations"] == []
    assert len(got["ragkv"]["sources"]) == 2


def test_an_answer_in_json_begins_with_a_brace_and_its_finish_reason_says_if_it_is_cut(
    talk: TestClient,
) -> None:
    sent = body(response_format={"type": "json_object"}, max_tokens=1)
    got = talk.post("/v1/chat/completions", json=sent).json()
    assert (
        got["choices"][0]["message"]["content"].startswith("{")
        and got["choices"][0]["finish_reason"] == "length"
    )
    assert any("response format" in note for note in got["ragkv"]["reuse"]["notes"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("response_format", "part"),
    [
        (
            form({"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}),
            "Unimplemented keys",
        ),
        (form({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
        (form({"enum": []}), "schema"),
        (form({"const": "x" * 200_000}), "100000 characters"),
        ({"type": "json_schema"}, "json_schema"),
        ({"type": "json_object", "json_schema": {"schema": {}}}, "json_schema"),
        ({"type": "xml"}, "type"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_schema_that_cannot_be_kept_is_a_400_that_names_the_part(
    talk: TestClient, response_format: Any, part: str, stream: bool
) -> None:
    response = talk.post(
        "/v1/chat/completions", json=body(response_format=response_format, stream=stream)
    )
    error = response.json()["error"]
    assert response.status_code == 400 and part in error["message"], error
    assert error["param"].startswith("response_format")


class City(BaseModel):
    """A city."""

    old: bool
    size: int | None


@pytest.mark.enable_socket
def test_openais_client_parses_an_answer_into_a_class(talker: Engine, tmp_path: Path) -> None:
    app = app_on(talker, tmp_path, model=str(tmp_path / "talker"))
    with on_port(app) as url, client_at(url, max_retries=0) as client:
        got: Any = client.chat.completions.parse(
            model="talker", messages=HELLO, response_format=City, max_tokens=60
        )  # type: ignore[arg-type]
        assert isinstance(got.choices[0].message.parsed, City)


def test_an_answer_of_ask_has_the_schema_and_its_citations(talk: TestClient) -> None:
    filled(talk, "default")
    schema = {"type": "object", "properties": {"by": {"const": "Lena Moss"}}, "required": ["by"]}
    closed = form({**schema, "additionalProperties": False})
    sent: dict[str, Any] = {
        "question": "Who built the harbour?",
        "max_tokens": 60,
        "response_format": closed,
    }
    got = talk.post("/v1/ask", json=sent).json()
    assert json.loads(got["answer"]) == {"by": "Lena Moss"} and got["finish_reason"] == "stop"
    assert len(got["sources"]) == 2
    streamed = dict(events(talk.post("/v1/ask", json={**sent, "stream": True}).text))
    assert json.loads(streamed["answer"]["answer"]) == json.loads(got["answer"])
    assert len(streamed["answer"]["citations"]) == len(got["citations"])
    refused = talk.post("/v1/ask", json={**sent, "response_format": form({"not": {}})})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "response_format"
    wrong = talk.post("/v1/ask", json={**sent, "response_format": {"type": "json_schema"}})
    assert wrong.json()["error"]["param"] == "response_format.json_schema"
