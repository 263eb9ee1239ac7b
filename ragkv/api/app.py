"""The FastAPI application: routes, middleware and page. It loads the model at startup and flushes
at shutdown.
"""

import asyncio
import contextlib
import functools
import json
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response, Security
from fastapi.responses import HTMLResponse
from fastapi.security import HTTPBearer
from fastapi.staticfiles import StaticFiles

from ragkv import __version__
from ragkv.engine import Engine
from ragkv.errors import RagKVError
from ragkv.registry import SELECTORS
from ragkv.retrieval import Embedder
from ragkv.runtime import examples, freeze_objects

from . import failures, health, middleware
from .routes import ROUTERS
from .service import Service
from .settings import ServeConfig

log = logging.getLogger(__name__)

PAGE = Path(__file__).parent / "page"
# Newer versions of FastAPI trace and log requests by themselves, with paths and texts of errors.
# Ours hold neither.
OWN_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "operation_spans": False}
# The OpenAPI document says that routes take a key. `middleware.Access` checks it, before anything
# of the body is read.
_DOCUMENTED_KEY = HTTPBearer(
    scheme_name="key",
    description="A key made by `ragkv keys add`, if keys exist.",
    auto_error=False,
)


def create_app(
    config: ServeConfig | None = None,
    *,
    engine: Engine | None = None,
    embedder: Embedder | None = None,
    replica: str | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> FastAPI:
    """The REST service of `config`. It loads the model in the background at startup, unless
    `engine` is given.

    `engine` holds the model to serve and no documents of its own; it is closed with the app.
    `replica` names this process in logs, headers and stats; `None`: a random word. `on_ready` is
    called when questions are answered from now on. Raises `ConfigError`.
    """
    config = (config or ServeConfig()).of_home()
    config.check_servable()
    service = Service(config, replica)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.ensure_future(_load(service, engine, embedder, on_ready))
        # Consume the exception: /readyz and the log report it.
        loading.add_done_callback(lambda task: task.cancelled() or task.exception())
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
        description="Answers over documents from stored KV: a chunk is computed once and fused "
        "at question time.",
        lifespan=lifespan,
        openapi_url=None,
        redirect_slashes=False,
        telemetry=OWN_TELEMETRY,
        # client generators make method names of them
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.service = service
    failures.install(app)
    for router in ROUTERS:
        app.include_router(
            router, responses=failures.RESPONSES, dependencies=[Security(_DOCUMENTED_KEY)]
        )
    app.include_router(health.router(service))
    _serve_openapi(app)
    if (PAGE / "index.html").is_file():
        # Ollama's clients send HEAD to see whether the server is there
        @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
        async def page() -> HTMLResponse:
            """The page."""
            return HTMLResponse(page_text())

        app.add_api_route("/static/examples.json", _examples_for_the_page, include_in_schema=False)
        app.mount("/static", StaticFiles(directory=PAGE), name="static")
    middleware.install(app, service)
    return app


def _serve_openapi(app: FastAPI) -> None:
    """Serve `/openapi.json`. It is made once, on a thread: that takes half a second."""

    @functools.cache
    def made() -> asyncio.Future[bytes]:
        return asyncio.ensure_future(asyncio.to_thread(lambda: json.dumps(app.openapi()).encode()))

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        """The OpenAPI document."""
        return Response(await asyncio.shield(made()), media_type="application/json")


@functools.cache
def page_text() -> str:
    """The page, which offers every selector."""
    options = "".join(f"<option>{name}</option>" for name in SELECTORS)
    return (PAGE / "index.html").read_text("utf-8").replace("<!-- selectors -->", options)


@functools.cache
def _examples_for_the_page() -> dict[str, Any]:
    """The example articles and the questions about them."""
    if (folder := examples()) is None:
        return {"documents": [], "questions": []}
    documents = []
    for file in sorted((folder / "corpus").glob("*.md")):
        text = file.read_text("utf-8")
        title = text.split("\n")[0].strip("# ")
        documents.append({"id": file.name, "title": title, "text": text})
    lines = (folder / "questions.jsonl").read_text("utf-8").splitlines()
    asked = [one["question"] for one in map(json.loads, lines) if "before" not in one]
    return {"documents": documents, "questions": asked}


async def _load(
    service: Service, engine: Engine | None, embedder: Embedder | None, on_ready: Callable[[], None]
) -> None:
    try:
        await asyncio.to_thread(service.load, engine, embedder)
    except Exception as error:
        log.error("model_not_loaded", exc_info=error)
        reason = f": {error}" if isinstance(error, RagKVError) else "; the server's log says why."
        service.unavailable_reason = f"The model could not be loaded{reason}"
        raise
    if engine is None:  # this process is a server: what it has loaded stays
        await asyncio.to_thread(freeze_objects)
    service.unavailable_reason = None
    on_ready()
