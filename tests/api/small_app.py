"""A small app with the server's middleware and monitoring routes, routes of its own, and
no model.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request, UploadFile
from fastapi.responses import StreamingResponse
from starlette.testclient import TestClient

from ragkv.api import failures, health, middleware
from ragkv.api.call import ApiCallDep
from ragkv.api.metrics import TenantStats
from ragkv.api.service import Service
from ragkv.api.settings import ServeConfig
from ragkv.types import Reuse, Timing

TIMING = Timing(queue_s=0.01, lookup_s=0.02, prefill_s=0.05, first_token_s=0.1, decode_s=0.4)
REUSE = Reuse(exact=10, fused=20, recomputed=5, computed=7, ratio=0.2, missed_chunks=1)


class SmallService(Service):
    """A service without a model, whose metrics see `tenants`."""

    def __init__(self, config: ServeConfig, tenants: Sequence[TenantStats]) -> None:
        self._stats = tenants
        super().__init__(config)

    def tenant_stats(self) -> Sequence[TenantStats]:
        return self._stats


def small_app(
    config: ServeConfig, tenants: Sequence[TenantStats] = (), ready: bool = True
) -> FastAPI:
    """An app whose routes echo, fail, answer and stream. Its metrics see `tenants`."""
    app = FastAPI(docs_url=None, redoc_url=None)
    failures.install(app)
    service = app.state.service = SmallService(config, tenants)
    app.include_router(health.router(service))

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
    async def answers(call: ApiCallDep) -> dict[str, str]:
        await call.request.body()
        call.record_answer(TIMING, REUSE, 5)
        return {"answer": "a private answer"}

    @app.post("/v1/hangs")
    def hangs() -> None:
        print('{"event": "hangs"}', file=sys.stderr, flush=True)
        time.sleep(3600)  # in a thread that nothing can stop

    @app.post("/v1/embeds")
    async def embeds(call: ApiCallDep) -> None:
        call.record_embedding(30)

    @app.get("/v1/stream")
    async def stream(wait_s: float = 0.0, count: int = 3, fail: bool = False) -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            for number in range(count):
                yield f"data: {number}\n\n".encode()
                await asyncio.sleep(wait_s)
            if fail:
                raise ValueError("late")

        return StreamingResponse(parts(), media_type="text/event-stream")

    middleware.install(app, service)
    if ready:
        service.unavailable_reason = None
    return app


@contextmanager
def small_client(config: ServeConfig, **more: Any) -> Iterator[TestClient]:
    """A client of a small app; `more` is what `small_app` takes."""
    app = small_app(config, **more)
    with TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False) as client:
        yield client


def state_of(client: TestClient) -> Service:
    """The service of the client's app."""
    app: Any = client.app
    service: Service = app.state.service
    return service
