"""Shared by the service's tests: apps on one loaded model, clients, a server on a port, the example
corpus.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient

from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.api import ServeConfig, create_app
from ragkv.api.service import Service
from ragkv.retrieval import Embedder
from tests.fixed import fixed
from tests.retrieval.fakes import HashEmbedder
from tests.scheduling.helpers import begin
from tests.scheduling.helpers import until as wait_until

WORLD = Path(__file__).parents[1] / "world"  # the invented world that the small reader reads
# config of the engine that only holds the model
BARE = EngineConfig(store=StoreConfig(memory_bytes=0))
FACTS = [
    "The harbour of Oro was built by Lena Moss.",
    "The mill of Oro was built by Tam Reed in 1832.",
]


@functools.cache
def questions() -> list[dict[str, Any]]:
    """The example questions."""
    return [
        json.loads(line) for line in (WORLD / "questions.jsonl").read_text("utf-8").splitlines()
    ]


def corpus() -> list[tuple[str, tuple[str, bytes]]]:
    """The example corpus, as the files of a form."""
    return [
        ("files", (path.name, path.read_bytes()))
        for path in sorted((WORLD / "corpus").glob("*.md"))
    ]


def app_on(
    loaded: Engine,
    home: Path,
    embedder: Embedder | None = HashEmbedder(),  # noqa: B008
    **config: Any,
) -> FastAPI:
    """An app on a loaded model, which fuses prompts of a few tokens, whatever was measured."""
    config.setdefault("engine", EngineConfig(fusion=fixed()))
    return create_app(
        ServeConfig(home=str(home), **config), engine=loaded.with_config(BARE), embedder=embedder
    )


def service_of(app: FastAPI) -> Service:
    service: Service = app.state.service
    return service


def engine_of(app: Any) -> Engine:
    """The open engine of the anonymous tenant."""
    return service_of(app).tenants.opened()[""].engine


def client_of(app: FastAPI, key: str | None = None) -> TestClient:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return TestClient(app, base_url="http://localhost", headers=headers)


def filled(client: TestClient, name: str = "facts", texts: list[str] | None = None) -> str:
    """Store the one-line documents `0`, `1` ... in a collection; returns its name."""
    assert client.post("/v1/collections", json={"name": name}).status_code in (200, 201)
    documents = [{"id": str(number), "text": text} for number, text in enumerate(texts or FACTS)]
    assert (
        client.post(f"/v1/collections/{name}/documents", json={"documents": documents}).status_code
        == 201
    )
    return name


def events(text: str) -> list[tuple[str, Any]]:
    """Parse server-sent events into (name, data)."""
    found = []
    for block in text.strip().split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in block.splitlines() if not line.startswith(":")
        )
        if data := fields.get("data"):
            found.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found


@contextmanager
def on_port(app: FastAPI) -> Iterator[str]:
    """Serve the app on a port of 127.0.0.1; yields its URL."""
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, access_log=False)
    )
    thread = begin(server.run)
    try:
        wait_until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def client_at(url: str, key: str = "none", **more: Any) -> Any:
    """The openai client of a server."""
    import openai

    client = httpx.Client(trust_env=False)
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, http_client=client, **more)


def plain(url: str, **more: Any) -> httpx.Client:
    return httpx.Client(base_url=url, trust_env=False, timeout=60, **more)


def entries(client: TestClient) -> int:
    """The number of entries in the slowest tier of the caller's store."""
    return int(client.get("/v1/stats").json()["tiers"][-1]["entries"])


def metrics(client: Any) -> Mapping[str, float]:
    """The samples of /metrics by name and labels."""
    lines = (line for line in client.get("/metrics").text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
