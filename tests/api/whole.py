"""The whole service on the small trained model: in this process or in its own."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.api import create_app
from ragkv.api.keys import KeyFile, Quota, RateLimit
from ragkv.api.settings import ServeConfig
from ragkv.config import MIB
from tests.reader import READER

from . import serving
from .helpers import WORLD

ENGINE = EngineConfig(store=StoreConfig(memory_bytes=32 * MIB, disk_bytes=256 * MIB))
SMALL = {
    "RAGKV_STORE__MEMORY_BYTES": str(32 * MIB),
    "RAGKV_STORE__DISK_BYTES": str(256 * MIB),
    "RAGKV_MODEL": READER,  # unless --model says another
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@contextmanager
def whole(home: Path, **settings: Any) -> Iterator[TestClient]:
    """A client of the service in this process."""
    model = Engine.from_pretrained(READER, EngineConfig(store=StoreConfig(memory_bytes=0)))
    config = ServeConfig(home=str(home), **{"engine": ENGINE, **settings})
    app = create_app(config, engine=model)
    with TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False) as client:
        yield client


@contextmanager
def server(
    home: Path, environment: Mapping[str, str] | None = None, *flags: str
) -> Iterator[serving.Process]:
    """The service in its own process, ready for requests."""
    command = [sys.executable, "-m", "ragkv", "serve", "--home", str(home), "--port", "0", *flags]
    with serving.process(command, {**SMALL, **(environment or {})}) as process:
        process.wait_ready()
        yield process


def key(
    home: Path, name: str, quota: Quota | None = None, rate: RateLimit | None = None, **more: Any
) -> dict[str, str]:
    """Add a key; returns the request headers that present it."""
    secret, _ = KeyFile(home / "keys.json").add(name, quota=quota, rate=rate, **more)
    return {"authorization": f"Bearer {secret}"}


def documents(count: int | None = None) -> list[dict[str, str]]:
    """The documents of the example corpus, as JSON."""
    paths = sorted((WORLD / "corpus").iterdir())[:count]
    return [{"id": path.name, "text": path.read_text("utf-8")} for path in paths]


def ingest(
    client: Any,
    docs: list[dict[str, str]],
    headers: Mapping[str, str] | None = None,
    name: str = "c",
) -> Any:
    """Store documents in a collection, which is created if necessary."""
    made = client.post("/v1/collections", json={"name": name}, headers=headers)
    assert made.status_code in (200, 201), made.text
    return client.post(
        f"/v1/collections/{name}/documents", json={"documents": docs}, headers=headers
    )


def ask(client: Any, question: str, headers: Mapping[str, str] | None = None, **more: Any) -> Any:
    """Ask a question over a collection."""
    body = {"question": question, "collection": "c", "max_tokens": 8, **more}
    return client.post("/v1/ask", json=body, headers=headers)


def turn(client: Any, session: str, text: str, **more: Any) -> Any:
    """The next turn of a conversation without documents."""
    body = {
        "model": "reader",
        "messages": [{"role": "user", "content": text}],
        "session_id": session,
        "max_tokens": 4,
    }
    return client.post("/v1/chat/completions", json={**body, **more})


def assert_goes_on(client: Any, name: str) -> None:
    """Assert that the next turn is the same from stored history and from a full recompute."""
    said = []
    for reuse in ("prefix", "none"):
        copy = client.post(f"/v1/sessions/{name}/fork", json={"to": f"{name}-{reuse}"})
        assert copy.status_code == 201, copy.text
        answered = turn(client, f"{name}-{reuse}", "What else?", ragkv={"reuse": reuse})
        assert answered.status_code == 200, answered.text
        said.append(answered.json()["choices"][0]["message"]["content"])
        assert client.delete(f"/v1/sessions/{name}-{reuse}").status_code == 200
    assert said[0] == said[1], f"{name}: from its history {said[0]!r}, computed {said[1]!r}"
