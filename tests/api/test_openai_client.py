"""The openai client, unmodified, against a server on a port."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi import FastAPI

from ragkv import Engine
from ragkv.api.keys import KeyFile
from ragkv.api.settings import LimitsConfig, QueueConfig

from .helpers import FACTS, app_on, client_at, on_port, service_of, wait_until

pytestmark = pytest.mark.enable_socket
SAY: list[Any] = [{"role": "user", "content": "Tell me of the harbour."}]
DOCUMENTS = [{"id": str(number), "title": f"Fact {number}", "text": text} for number, text in enumerate(FACTS)]


@pytest.fixture
def app(talker: Engine, tmp_path: Path) -> FastAPI:
    limits = LimitsConfig(max_tokens=4000)
    return app_on(talker, tmp_path, model=str(tmp_path / "talker"), queue=QueueConfig(limit=2), limits=limits)


@pytest.fixture
def url(app: FastAPI) -> Iterator[str]:
    with on_port(app) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with client_at(url, max_retries=0) as client:
        yield client


def test_openais_client_gets_a_chat_completion(client: openai.OpenAI) -> None:
    got = client.chat.completions.create(model="talker", messages=SAY, max_tokens=9)
    assert got.choices[0].finish_reason == "length" and got.choices[0].message.content
    assert got.usage and got.usage.completion_tokens == 9 and got.usage.prompt_tokens_details
    assert got._request_id and got.model == "talker"


def test_openais_client_gets_a_streamed_chat_completion(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="talker", messages=SAY, max_completion_tokens=9)
    chunks = list(
        client.chat.completions.create(
            model="talker", messages=SAY, max_tokens=9, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [9]


def test_openais_client_can_set_stop_strings(client: openai.OpenAI) -> None:
    text = client.chat.completions.create(model="talker", messages=SAY, max_tokens=30).choices[0].message.content or ""
    stop = text[12:14]
    got = client.chat.completions.create(model="talker", messages=SAY, max_tokens=30, stop=[stop])
    assert got.choices[0].message.content == text[: text.index(stop)] and got.choices[0].finish_reason == "stop"


def test_openais_client_can_send_documents_and_read_the_report(client: openai.OpenAI) -> None:
    body: Any = {"documents": [*DOCUMENTS, {"text": "x"}], "session_id": "s"}
    text = client.chat.completions.create(model="talker", messages=SAY, max_tokens=4).choices[0].message.content or ""
    body["documents"][2]["text"] = f"Some say so: {text.strip()} and nothing else."
    got = client.chat.completions.create(model="talker", messages=SAY, max_tokens=4, extra_body=body)
    assert got.model_extra and len(got.model_extra["ragkv"]["sources"]) == 3
    assert client.chat.completions.create(model="talker", messages=SAY, extra_headers={"x-session-id": "s"})


def test_openais_client_parses_the_annotations(reader: Engine, tmp_path: Path) -> None:
    app = app_on(reader, tmp_path)
    with on_port(app) as url, client_at(url) as client:
        questions: Any = [{"role": "user", "content": "What is the job of Rasina?"}]
        body = {"documents": [{"title": "People", "text": "The job of Rasina is potter."}]}
        got = client.chat.completions.create(model="reader", messages=questions, extra_body=body)
        message = got.choices[0].message
        assert message.content and message.annotations is not None
        for annotation in message.annotations:
            there = annotation.url_citation
            assert message.content[there.start_index : there.end_index] == "[1]" and there.title == "People"


def test_openais_client_gets_several_answers_with_log_probabilities(client: openai.OpenAI) -> None:
    got = client.chat.completions.create(
        model="talker", messages=SAY, max_tokens=5, n=2, seed=1, temperature=1.2, logprobs=True, top_logprobs=3
    )
    assert [choice.index for choice in got.choices] == [0, 1] and got.usage and got.usage.completion_tokens == 10
    for choice in got.choices:
        assert choice.logprobs and choice.logprobs.content and len(choice.logprobs.content) == 5
        assert all(len(token.top_logprobs) == 3 and token.bytes for token in choice.logprobs.content)


@pytest.mark.parametrize(
    "extra",
    [{"modalities": ["text", "audio"]}, {"prediction": {"type": "content", "content": "x"}}],
    ids=lambda extra: next(iter(extra)),
)
def test_openais_client_raises_bad_request_for_what_is_not_offered(client: openai.OpenAI, extra: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=next(iter(extra))) as caught:
        client.chat.completions.create(model="talker", messages=SAY, **extra)
    assert str(caught.value.param).startswith(next(iter(extra)))


def test_openais_client_raises_not_found_for_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4o", messages=SAY)
    assert caught.value.code == "model_not_found"
    assert [model.id for model in client.models.list()] == ["talker", "hash"]
    assert client.models.retrieve("talker").owned_by == "ragkv"


def test_openais_client_retries_a_full_server(app: FastAPI, url: str, client: openai.OpenAI) -> None:
    running = [client.chat.completions.create(model="talker", messages=SAY, max_tokens=4000, stream=True) for _ in "ab"]
    with pytest.raises(openai.InternalServerError, match=r"queue\.limit") as caught:
        client.chat.completions.create(model="talker", messages=SAY, max_tokens=2)
    assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"]
    threading.Timer(0.5, lambda: [stream.close() for stream in running]).start()
    with client_at(url, max_retries=8) as patient:  # the client retries by itself
        assert patient.chat.completions.create(model="talker", messages=SAY, max_tokens=2).choices
    wait_until(lambda: service_of(app).answer_pool.running == 0)


def test_openais_client_raises_an_error_in_the_middle_of_a_stream(talker: Engine, tmp_path: Path) -> None:
    home, limits = str(tmp_path / "talker"), LimitsConfig(max_tokens=4000)
    app = app_on(talker, tmp_path, model=home, queue=QueueConfig(deadline_s=0.4), limits=limits)
    with on_port(app) as url, client_at(url) as client:
        stream = client.chat.completions.create(model="talker", messages=SAY, max_tokens=4000, stream=True)
        with pytest.raises(openai.APIError, match="deadline"):
            list(stream)


def test_openais_client_gets_equal_embeddings_in_both_encodings(client: openai.OpenAI) -> None:
    texts = ["the harbour", "the mill"]
    default = client.embeddings.create(model="hash", input=texts)  # the client asks for base64 and decodes it
    floats = client.embeddings.create(model="hash", input=texts, encoding_format="float")
    assert [one.embedding for one in default.data] == [one.embedding for one in floats.data]
    assert len(default.data[0].embedding) == 64


def test_openais_client_raises_authentication_error_for_a_wrong_key(talker: Engine, tmp_path: Path) -> None:
    key, _ = KeyFile(tmp_path / "keys.json").add("me")
    with on_port(app_on(talker, tmp_path, model=str(tmp_path / "talker"))) as url:
        with client_at(url, key) as client:
            assert client.models.list().data
        with client_at(url, "rk-wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
    assert caught.value.code == "invalid_api_key"
