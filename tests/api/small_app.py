"""An app with the real conduct and routes of its own, without a model."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, UploadFile
from fastapi.responses import StreamingResponse
from starlette.testclient import TestClient

from ragkv.api import errors
from ragkv.api.metrics import Tenant, answered, embedded
from ragkv.api.middleware import ServerState, install
from ragkv.api.settings import ServeConfig
from ragkv.types import Reuse, Timing

TIMING = Timing(queue_s=0.01, lookup_s=0.02, prefill_s=0.05, first_token_s=0.1, decode_s=0.4)
REUSE = Reuse(exact=10, fused=20, recomputed=5, computed=7, ratio=0.2, missed_chunks=1)


class Held:
    """Tenants, as the conduct asks of them."""

    def __init__(self, tenants: Sequence[Tenant] = (), directories: Sequence[Path] = ()) -> None:
        self.tenants, self.places = tenants, directories

    def stats(self) -> Sequence[Tenant]:
        return self.tenants

    def directories(self) -> Sequence[Path]:
        return self.places


def small_app(config: ServeConfig, held: Held | None = None, ready: bool = True) -> FastAPI:
    """Routes that echo, fail, answer and stream."""
    app = FastAPI(docs_url=None, redoc_url=None)
    errors.install(app)

    @app.post("/v1/echo")
    async def echo(request: Request) -> dict[str, Any]:
        body = await request.body()
        return {"bytes": len(body), "tenant": request.state.principal.tenant}

    @app.post("/v1/collections/{name}/documents")
    async def upload(name: str, file: UploadFile) -> dict[str, Any]:
        return {"bytes": len(await file.read()), "name": name}

    @app.get("/v1/fails/{word}")
    async def fails(word: str) -> None:
        raise ValueError(f"it says {word}")

    @app.post("/v1/answers")
    async def answers(request: Request) -> dict[str, str]:
        await request.body()
        answered(request, TIMING, REUSE, 5)
        return {"answer": "a private answer"}

    @app.post("/v1/embeds")
    async def embeds(request: Request) -> None:
        embedded(request, 30)

    @app.get("/v1/stream")
    async def stream(wait_s: float = 0.0, count: int = 3, fail: bool = False) -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            for number in range(count):
                yield f"data: {number}\n\n".encode()
                await asyncio.sleep(wait_s)
            if fail:
                raise ValueError("late")

        return StreamingResponse(parts(), media_type="text/event-stream")

    conduct = install(app, config, held or Held())
    if ready:
        conduct.readiness.ready()
    return app


@contextmanager
def client(config: ServeConfig, held: Held | None = None, ready: bool = True) -> Any:
    """A client of such an app."""
    app = small_app(config, held, ready)
    with TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False) as it:
        yield it


def conduct_of(it: TestClient) -> ServerState:
    """What the client's app goes by."""
    app: Any = it.app
    conduct: ServerState = app.state.server
    return conduct
