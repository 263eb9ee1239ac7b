"""The application: routes, conduct and page put together; the model loaded at its beginning, all flushed at its end."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

from ragkv import __version__
from ragkv.engine import Engine
from ragkv.errors import RagKVError
from ragkv.retrieval import Embedder

from . import errors, middleware, openapi
from .routes import ROUTERS
from .service import Service
from .settings import ServeConfig

log = logging.getLogger(__name__)

PAGE = Path(__file__).parent / "page"
DESCRIPTION = "Answers over documents from stored KV: a chunk is computed once and fused at question time."


def create_app(
    config: ServeConfig | None = None, *, engine: Engine | None = None, embedder: Embedder | None = None
) -> FastAPI:
    """The service of `config`. It loads the model when it starts, in the background, unless it is given an `engine`.

    A given `engine` is an engine on the model to be served, without documents of its own; it is closed with the app.
    """
    service = Service(config or ServeConfig())

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.ensure_future(_load(app, service, engine, embedder))
        loading.add_done_callback(lambda task: task.cancelled() or task.exception())  # /readyz says it, and the log
        if engine is not None:
            await loading
        try:
            yield
        finally:
            await asyncio.wait({loading})
            await asyncio.to_thread(service.close)

    app = FastAPI(
        title="ragkv",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    errors.install(app)
    openapi.install(app, service.config.limits)
    for router in ROUTERS:
        app.include_router(router)
    _add_page(app)
    middleware.install(app, service.config, service)
    return app


async def _load(app: FastAPI, service: Service, engine: Engine | None, embedder: Embedder | None) -> None:
    gate = app.state.server.readiness
    try:
        await asyncio.to_thread(service.load, engine, embedder)
    except RagKVError as error:
        log.error("model_not_loaded", exc_info=error)
        gate.failed(f"The model could not be loaded: {error}")
        raise
    except Exception as error:
        log.error("model_not_loaded", exc_info=error)
        gate.failed("The model could not be loaded; the server's log says why.")
        raise
    gate.ready()


def _add_page(app: FastAPI) -> None:
    if not (PAGE / "index.html").is_file():
        return

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        """The page."""
        return FileResponse(PAGE / "index.html", media_type="text/html")

    app.mount("/static", StaticFiles(directory=PAGE), name="static")


__all__ = ["create_app"]
