"""The ollama client, unmodified, against a server on a port; and the models that name a
collection.
"""

from collections.abc import Iterator
from typing import Any

import ollama
import openai
import pytest

from ragkv import Engine, __version__
from ragkv.api.bodies.ollama import OllamaRequest
from ragkv.api.routes.ollama import API_VERSION

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
    assert [one.model for one in client.list().models] == ["reader:people", "reader"]
    shown = client.show("reader:latest")
    assert shown.capabilities and "completion" in shown.capabilities and shown.modelinfo
    with plain(url) as raw:
        assert raw.get("/api/version").json() == {"version": API_VERSION, "ragkv": __version__}
        assert [raw.head(path).status_code for path in ("/", "/api/tags")] == [200, 200]
    for one in client.list().models:
        assert one.size and one.modified_at and one.details and one.details.parameter_size
    for loaded in client.ps().models:
        assert loaded.expires_at and loaded.context_length and loaded.size_vram == 0


def test_a_version_is_one_that_ollamas_clients_connect_to() -> None:
    assert tuple(map(int, API_VERSION.split("."))) >= (0, 6, 4)  # VS Code's least


def test_an_answer_without_documents_says_so_where_there_are_some(url: str) -> None:
    def notes(path: str, **body: Any) -> list[str]:
        with plain(url) as raw:
            answered = raw.post(path, json=body).json()
        found: list[str] = answered.get("ragkv", answered)["notes"]
        return [note for note in found if "without documents" in note]

    asked = {"model": "reader", "messages": ASK, "max_tokens": 4}
    assert "reader:people answers from" in notes("/v1/chat/completions", **asked)[0]
    assert notes("/api/chat", model="reader", messages=ASK, stream=False)
    assert not notes("/v1/chat/completions", **{**asked, "model": "reader:people"})
    assert not notes("/v1/chat/completions", **asked, documents=[{"text": "Rasina is a potter."}])

    nothing = {"collection": "people", "filter": {"title": "none"}}
    assert "people matches" in notes("/v1/chat/completions", **asked, rag=nothing)[0]
    assert "people matches" in notes("/v1/ask", question="Who?", **nothing)[0]


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
    assert client.generate("reader", "", keep_alive=0).done_reason == "unload"


@pytest.mark.parametrize("limit", [0, -1, -2])
def test_no_limit_in_ollamas_words_is_the_servers_own(client: ollama.Client, limit: int) -> None:
    said = client.chat("reader:people", ASK, options={"num_predict": limit})
    assert said.done_reason == "stop" and said.message.content


def test_ollamas_client_embeds_texts_as_openais_does(client: ollama.Client, url: str) -> None:
    texts = ["a mill", "a bridge"]
    with plain(url) as raw:
        body = {"model": "hash", "input": texts}
        theirs = [one["embedding"] for one in raw.post("/v1/embeddings", json=body).json()["data"]]
    assert client.embed("hash", texts).embeddings == theirs
    assert client.embeddings("hash", texts[0]).embedding == theirs[0]
    with pytest.raises(ollama.ResponseError, match="There is no model 'reader'"):
        client.embed("reader", texts)
    with pytest.raises(ollama.ResponseError, match="at least 1 character"):
        client.embed("hash", [""])


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded"])
def test_curl_needs_no_content_type_and_a_web_page_does(url: str, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    sent = b'{"model": "reader", "prompt": "Who?", "stream": false}'
    with plain(url) as raw:
        assert raw.post("/api/generate", content=sent, headers=headers).status_code == 200
        browser = {**headers, "sec-fetch-site": "cross-site"}
        assert raw.post("/api/generate", content=sent, headers=browser).status_code == 415
        assert raw.post("/v1/ask", content=sent, headers=headers).status_code == 415


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
        assert [one.id for one in client.models.list()] == ["reader:people", "reader"]
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
