"""/v1/completions: texts are continued as they are; several texts, several continuations, streams, known passages."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient

from ragkv import Engine

from .helpers import FACTS, app_on, client_of, engine_of, events, filled

TEXT = "Once upon a time in Oro"


@pytest.fixture
def talk(talker: Engine, tmp_path: Path) -> Iterator[TestClient]:
    with client_of(app_on(talker, tmp_path / "talks", model=str(tmp_path / "talker"))) as client:
        yield client


def complete(client: TestClient, prompt: Any = TEXT, **more: Any) -> Any:
    body = {"model": "talker", "prompt": prompt, "max_tokens": 8, **more}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return events(response.text) if more.get("stream") else response.json()


def texts(got: Any) -> list[str]:
    return [choice["text"] for choice in got["choices"]]


def test_a_text_is_continued_without_a_template(talk: TestClient) -> None:
    got = complete(talk)
    assert got["object"] == "text_completion" and got["id"].startswith("cmpl-")
    assert got["usage"]["prompt_tokens"] == 1 + len(TEXT)  # BOS, and a token for each byte
    (report,) = got["ragkv"]["prompts"]
    assert report["reuse"]["tokens"] == 1 + len(TEXT)
    engine = engine_of(talk.app)
    ids = [int(engine.tokenizer.bos_token_id), *engine.tokenizer(TEXT, add_special_tokens=False)["input_ids"]]
    prompt = torch.tensor([ids])
    made = engine.parts.adapter.model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False
    )
    wanted = made[0, len(ids) :]
    assert texts(got) == [engine.tokenizer.decode(wanted, skip_special_tokens=True)]


def test_several_texts_have_each_its_continuations_in_order(talk: TestClient) -> None:
    got = complete(talk, [TEXT, "Another text"], n=2, temperature=1.2, seed=4)
    assert [choice["index"] for choice in got["choices"]] == [0, 1, 2, 3]
    assert texts(got)[:2] == texts(complete(talk, n=2, temperature=1.2, seed=4))
    assert len(set(texts(got))) == 4
    assert got["usage"]["completion_tokens"] == 32 and len(got["ragkv"]["prompts"]) == 2
    refused = talk.post("/v1/completions", json={"model": "talker", "prompt": [TEXT] * 5, "n": 2})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"


def test_a_stream_has_the_text_and_the_log_probabilities_of_the_whole_response(talk: TestClient) -> None:
    whole = complete(talk, logprobs=2)
    told = [data for _, data in complete(talk, logprobs=2, stream=True, stream_options={"include_usage": True})]
    assert told.pop() == "[DONE]"
    assert told[-1]["usage"]["completion_tokens"] == 8 and "prompts" in told[-1]["ragkv"]
    pieces = [chunk["choices"][0] for chunk in told[:-1]]
    assert "".join(piece["text"] for piece in pieces) == texts(whole)[0]
    assert pieces[-1]["finish_reason"] == "length"
    logprobs = whole["choices"][0]["logprobs"]
    streamed = [value for piece in pieces if piece["logprobs"] for value in piece["logprobs"]["token_logprobs"]]
    assert streamed == logprobs["token_logprobs"] and len(logprobs["tokens"]) == len(logprobs["text_offset"]) == 8
    assert all(len(one) == 2 for one in logprobs["top_logprobs"])


def test_known_passages_in_a_text_are_reused(talk: TestClient) -> None:
    filled(talk)
    text = "\n\n".join([*FACTS, "Who built the harbour?"])
    reuse = complete(talk, text)["ragkv"]["prompts"][0]["reuse"]
    assert reuse["missed_chunks"] == 0 and reuse["fused"] + reuse["recomputed"] + reuse["exact"] > 60
    assert texts(complete(talk, text, ragkv={"ratio": 1})) == texts(complete(talk, text, ragkv={"reuse": "none"}))


@pytest.mark.parametrize(
    ("extra", "param"),
    [({"echo": True}, "echo"), ({"best_of": 3}, "best_of"), ({"suffix": "x"}, "suffix"), ({"prompt": [[1, 2]]}, None)],
    ids=str,
)
def test_what_is_not_offered_is_refused_by_name(talk: TestClient, extra: dict[str, Any], param: str | None) -> None:
    response = talk.post("/v1/completions", json={"model": "talker", "prompt": TEXT, **extra})
    assert response.status_code == 400
    assert param is None or response.json()["error"]["param"] == param


def test_ignored_fields_are_noted(talk: TestClient) -> None:
    assert complete(talk, user="me")["ragkv"]["notes"] == ["user is ignored: the key says who asks"]


@pytest.mark.parametrize(
    "field", [{"echo": 0}, {"echo": True}, {"best_of": True}, {"best_of": 2}, {"repetition_penalty": 1e-300}]
)
def test_values_that_only_look_like_what_is_offered_are_refused(reader: Engine, tmp_path: Path, field: Any) -> None:
    with client_of(app_on(reader, tmp_path)) as client:
        body = {"model": "reader", "prompt": "Kiralus works as a", "max_tokens": 1}
        assert client.post("/v1/completions", json=body).status_code == 200
        refused = client.post("/v1/completions", json={**body, **field})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(field)))
