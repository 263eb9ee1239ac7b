"""The openai client, unmodified, against a server on a port: it parses what the other tests say of
the answers.
"""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi import FastAPI

from ragkv import Engine
from ragkv.api.settings import LimitsConfig, QueueConfig

from .helpers import app_on, client_at, on_port, service_of, wait_until

pytestmark = pytest.mark.enable_socket
SAY: list[Any] = [{"role": "user", "content": "Tell me of the harbour."}]


@pytest.fixture
def app(talker: Engine, tmp_path: Path) -> FastAPI:
    limits = LimitsConfig(max_tokens=4000)
    return app_on(
        talker, tmp_path, model=str(tmp_path / "talker"), queue=QueueConfig(limit=2), limits=limits
    )


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


def test_openais_client_parses_the_annotations(reader: Engine, tmp_path: Path) -> None:
    with on_port(app_on(reader, tmp_path)) as url, client_at(url) as client:
        questions: Any = [{"role": "user", "content": "What is the job of Rasina?"}]
        body = {"documents": [{"title": "People", "text": "The job of Rasina is potter."}]}
        got = (
            client.chat.completions.create(model="reader", messages=questions, extra_body=body)
            .choices[0]
            .message
        )
        assert got.content and len(got.annotations) == 1
        there = got.annotations[0].url_citation
        assert got.content[there.start_index : there.end_index] == "[1]" and there.title == "People"


def test_openais_client_raises_not_found_for_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4o", messages=SAY)
    assert caught.value.code == "model_not_found"
    assert [model.id for model in client.models.list()] == ["talker"]
    assert client.models.retrieve("talker").owned_by == "ragkv"


def test_openais_client_retries_a_full_server(
    app: FastAPI, url: str, client: openai.OpenAI
) -> None:
    running = [
        client.chat.completions.create(model="talker", messages=SAY, max_tokens=4000, stream=True)
        for _ in "ab"
    ]
    with pytest.raises(openai.InternalServerError, match=r"queue\.limit") as caught:
        client.chat.completions.create(model="talker", messages=SAY, max_tokens=2)
    assert caught.value.status_code == 503 and caught.value.response.headers["retry-after"]
    threading.Timer(0.5, lambda: [stream.close() for stream in running]).start()
    with client_at(url, max_retries=8) as patient:  # the client retries by itself
        assert patient.chat.completions.create(model="talker", messages=SAY, max_tokens=2).choices
    wait_until(lambda: service_of(app).answer_pool.accepted == set())
