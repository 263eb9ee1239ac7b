"""/v1/embeddings: the vectors of retrieval, in both encodings, for texts and for token ids."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from ragkv import Engine
from ragkv.api.settings import LimitsConfig
from tests.retrieval.fakes import HashEmbedder

from .helpers import app_on, client_of

TEXTS = ["The harbour of Oro.", "The mill of Oro, which is old."]


def embed(client: TestClient, given: Any, **more: Any) -> Any:
    response = client.post("/v1/embeddings", json={"model": "hash", "input": given, **more})
    assert response.status_code == 200, response.text
    return response.json()


def vectors(response: Any) -> list[Any]:
    return [one["embedding"] for one in response["data"]]


def test_embeddings_are_the_embedders_vectors(client: TestClient) -> None:
    got = embed(client, TEXTS)
    own = HashEmbedder().embed_texts(TEXTS)
    np.testing.assert_allclose(vectors(got), [windows[0] for windows in own], rtol=1e-6)
    assert [one["index"] for one in got["data"]] == [0, 1]
    assert got["usage"] == {"prompt_tokens": 11, "total_tokens": 11} and got["model"] == "hash"
    assert vectors(embed(client, TEXTS[0])) == vectors(got)[:1]


def test_a_text_longer_than_the_window_gets_one_unit_vector(reader: Engine, tmp_path: Path) -> None:
    with client_of(app_on(reader, tmp_path, HashEmbedder(window_words=3))) as client:
        (vector,) = vectors(embed(client, "one two three four five six seven"))
    assert np.linalg.norm(vector) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("changed", "status", "param"),
    [
        ({"model": "text-embedding-3-small"}, 404, "model"),
        ({"input": ""}, 400, None),
        ({"input": []}, 400, None),
        ({"input": ["a", ""]}, 400, None),
        ({"input": [1, 2]}, 400, None),  # this embedder has no tokenizer
        ({"input": ["a", 1]}, 400, None),
        ({"dimensions": 32}, 400, "dimensions"),
        ({"dimensions": True}, 400, "dimensions"),
        ({"encoding_format": "int8"}, 400, "encoding_format"),
        ({"input": ["a"] * 5}, 400, "input"),
    ],
)
def test_a_wrong_embeddings_request_is_refused(
    reader: Engine, tmp_path: Path, changed: Any, status: int, param: str | None
) -> None:
    with client_of(app_on(reader, tmp_path, limits=LimitsConfig(inputs=4))) as client:
        response = client.post("/v1/embeddings", json={"model": "hash", "input": "a", **changed})
    assert response.status_code == status, response.text
    assert param is None or response.json()["error"]["param"] == param


def test_without_an_embedder_the_error_says_what_to_install(reader: Engine, tmp_path: Path) -> None:
    with client_of(app_on(reader, tmp_path, embedder=None)) as client:
        response = client.post("/v1/embeddings", json={"model": "hash", "input": "a"})
        assert response.status_code == 404 and "pip install" in response.json()["error"]["message"]
        assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["reader"]
