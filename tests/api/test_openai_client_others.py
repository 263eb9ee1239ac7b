"""Embeddings, models and errors of the openai client."""

import math
from pathlib import Path
from typing import Any

import openai
import pytest

from ragkv import Engine
from ragkv.api.keys import KeyFile, RateLimit
from ragkv.api.settings import LimitsConfig

from .helpers import app_on, client_at, on_port
from .test_openai_client_chat import SAY, chat

pytestmark = pytest.mark.enable_socket


def test_one_text_is_embedded_as_a_unit_vector(openai_client: openai.OpenAI) -> None:
    (one,) = openai_client.embeddings.create(model="hash", input="the harbour").data
    assert math.hypot(*one.embedding) == pytest.approx(1.0, abs=1e-4) and one.index == 0


def test_embeddings_count_their_tokens(openai_client: openai.OpenAI) -> None:
    usage = openai_client.embeddings.create(model="hash", input=["the harbour", "the mill"]).usage
    assert usage.prompt_tokens == usage.total_tokens > 0


def test_embeddings_of_another_size_are_a_bad_request(openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        openai_client.embeddings.create(model="hash", input="x", dimensions=7)


def test_models_are_listed_and_shown(openai_client: openai.OpenAI) -> None:
    assert "talker" in [model.id for model in openai_client.models.list()]
    assert openai_client.models.retrieve("talker").object == "model"


def test_an_unknown_model_is_not_found(openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        chat(openai_client, model="gpt-9")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"temperature": 3.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 99}, "n"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_value_is_a_bad_request_that_names_the_field(
    openai_client: openai.OpenAI, extra: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(openai_client, **extra)
    assert str(caught.value.param).startswith(param) and caught.value.type == "invalid_request_error"


def test_an_image_is_a_bad_request(openai_client: openai.OpenAI) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,x"}}
    with pytest.raises(openai.BadRequestError, match="images are not supported"):
        chat(openai_client, [{"role": "user", "content": [image]}])


def test_a_prompt_that_does_not_fit_the_context_is_named_so(openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(openai_client, [{"role": "user", "content": "x" * 9000}])
    assert caught.value.code == "context_length_exceeded"


def test_a_key_above_its_rate_gets_a_rate_limit_error(talker: Engine, tmp_path: Path) -> None:
    key, _ = KeyFile(tmp_path / "keys.json").add("me", rate=RateLimit(requests_per_minute=1))
    app = app_on(talker, tmp_path, model=str(tmp_path / "talker"))
    with on_port(app) as url, client_at(url, key, max_retries=0) as client:
        assert chat(client, max_tokens=1).choices
        with pytest.raises(openai.RateLimitError) as caught:
            chat(client, max_tokens=1)
    assert int(caught.value.response.headers["retry-after"]) > 0


def test_a_body_that_is_too_large_has_its_own_status(talker: Engine, tmp_path: Path) -> None:
    app = app_on(talker, tmp_path, model=str(tmp_path / "talker"), limits=LimitsConfig(json_bytes=2000))
    with on_port(app) as url, client_at(url, max_retries=0) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            chat(client, [{"role": "user", "content": "x" * 5000}])
        assert chat(client, SAY, max_tokens=1).choices
    assert caught.value.status_code == 413
