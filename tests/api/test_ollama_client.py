"""The ollama client, unmodified, against a server on a port; and the models that name a
collection.
"""

from collections.abc import Iterator
from typing import Any

import ollama
import openai
import pytest

from ragkv import Engine, __version__
from ragkv.api.routes.ollama import OllamaRequest

from .helpers import app_on, client_at, on_port, plain

pytestmark = pytest.mark.enable_socket
ASK: list[Any] = [{"role": "user", "content": "What is the job of Rasina?"}]
DOCUMENT = {"documents": [{"id": "people", "text": "The job of Rasina is potter."}]}


@pytest.fixture(scope="module")
def url(reader: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with on_port(app_on(reader, tmp_path_factory.mktemp("ollama"))) as url:
        with plain(url) as client:
            client.post("/v1/collections", json={"name": "people"})
            client.post("/v1/collections/people/documents", json=DOCUMENT)
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[ollama.Client]:
    with ollama.Client(url) as client:
        yield client


def test_ollamas_client_lists_and_shows_the_models(client: ollama.Client, url: str) -> None:
    assert [one.model for one in client.list().models] == ["reader", "reader:people"]
    shown = client.show("reader:latest")
    assert shown.capabilities and "completion" in shown.capabilities and shown.modelinfo
    with plain(url) as raw:
        assert raw.get("/api/version").json() == {"version": __version__}
        assert raw.get("/api/ps").json() == raw.get("/api/tags").json()


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_with_a_collections_name_answers_from_it_with_citations(
    client: ollama.Client, stream: bool
) -> None:
    said = client.chat(
        "reader:people", ASK, stream=stream, options={"num_predict": 8, "num_ctx": 4096}
    )
    pieces = list(said) if stream else [said]
    assert "".join(one.message.content or "" for one in pieces).split() == ["potter", "[1]"]
    last = pieces[-1]
    assert (
        last.done and last.done_reason == "stop" and last.eval_count and last.prompt_eval_duration
    )
    assert "potter" not in client.chat("reader", ASK).message.content


def test_ollamas_client_generates_with_a_system_text_and_a_schema(client: ollama.Client) -> None:
    form = {
        "type": "object",
        "properties": {"job": {"type": "string", "maxLength": 9}},
        "required": ["job"],
    }
    got = client.generate("reader:people", ASK[0]["content"], system="Be brief.", format=form)
    assert got.response.startswith("{") and got.done
    assert client.generate("reader", "").done_reason == "load"  # how a client has a model loaded


def test_ollamas_client_reads_a_refusal(client: ollama.Client) -> None:
    for name, more, status, said in (
        ("gpt", {}, 404, "There is no model 'gpt' here"),
        ("reader:no", {}, 404, "There is no collection 'no'"),
        ("reader", {"think": True}, 400, "think is not offered"),
        ("reader", {"options": {"temperature": 9.0}}, 400, "temperature"),
    ):
        with pytest.raises(ollama.ResponseError) as refused:
            client.chat(name, ASK, **more)
        assert refused.value.status_code == status and said in refused.value.error


def test_ollamas_client_has_a_tool_called_and_answered(client: ollama.Client) -> None:
    called = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "job", "arguments": {"of": "Rasina"}}}],
    }
    result = {"role": "tool", "content": "The job of Rasina is potter.", "tool_name": "job"}
    tool = {
        "type": "function",
        "function": {"name": "job", "parameters": {"type": "object", "properties": {}}},
    }
    got = client.chat(
        "reader", [*ASK, called, result, *ASK], tools=[tool], options={"num_predict": 8}
    )
    assert got.done and got.prompt_eval_count


def test_openais_client_finds_chat_models_and_asks_one_of_a_collection(url: str) -> None:
    with client_at(url) as client:
        assert [one.id for one in client.models.list()] == ["reader", "reader:people"]
        listed = client.models.list(extra_query={"type": "embedding"})
        assert [one.id for one in listed] == ["hash"] and client.models.retrieve(
            "hash"
        ).id == "hash"
        got = (
            client.chat.completions.create(model="reader:people", messages=ASK, max_tokens=8)
            .choices[0]
            .message
        )
        assert (got.content or "").split() == ["potter", "[1]"] and got.annotations[
            0
        ].url_citation.url == "/v1/collections/people/documents/people"
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="reader:no", messages=ASK)
        assert missing.value.param == "model"


def test_results_take_the_ids_of_the_calls_in_their_order() -> None:
    """Ollama's messages have no ids; a call without a result does not shift those behind it."""

    def call(*names: str) -> dict[str, object]:
        return {"role": "assistant", "tool_calls": [{"function": {"name": name}} for name in names]}

    result = {"role": "tool", "content": "yes"}
    messages = [
        *ASK,
        call("a", "b"),
        result,
        result,
        call("c", "d"),
        result,
        call("e"),
        result,
        *ASK,
    ]
    got = OllamaRequest(model="reader", messages=messages).as_chat("reader").messages
    assert [one.tool_call_id for one in got if one.role == "tool"] == [
        "call_0",
        "call_1",
        "call_2",
        "call_4",
    ]
    assert [one.id for message in got for one in message.tool_calls or ()] == [
        f"call_{number}" for number in range(5)
    ]


@pytest.mark.parametrize(
    "calls",
    [
        "job",
        {"function": {}},
        [1],
        [{"function": "job"}],
        [{"function": {"name": "job", "arguments": "{}"}}],
    ],
)
def test_calls_in_another_form_are_refused_with_their_place(url: str, calls: object) -> None:
    messages = [*ASK, {"role": "assistant", "tool_calls": calls}]
    with plain(url) as client:
        got = client.post(
            "/api/chat", json={"model": "reader", "messages": messages, "stream": False}
        )
    assert got.status_code == 400, got.text
    assert "messages.1.tool_calls" in got.text
