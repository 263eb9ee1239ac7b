"""MCP's streamable HTTP in the REST service, at `/mcp`: behind the same keys, rates and checks.

Each tool calls the service's own endpoints, within the process, with the caller's key. So a key
reaches only its own documents, and the service's quotas and limits apply. No session is kept: any
replica answers any request.
"""

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

import httpx2
from mcp.server.mcpserver import Context
from mcp.server.transport_security import TransportSecuritySettings
from starlette.routing import Route

from ragkv.errors import InputError

from .corpus import ServedCorpus
from .tools import build_server

if TYPE_CHECKING:
    from fastapi import FastAPI

PATH = "/mcp"  # where the service has MCP
_FORWARDED = ("authorization", "host")  # the headers that its calls send, too


def mount(app: "FastAPI") -> None:
    """Serve the tools at `PATH` of `app`, which `ragkv.api.create_app` made and which does not run
    yet.
    """
    server = build_server(lambda context: _corpus_in(app, context), read_only=False)
    # The service's own middleware has checked host and origin.
    unchecked = TransportSecuritySettings(enable_dns_rebinding_protection=False)
    inner = server.streamable_http_app(
        streamable_http_path=PATH,
        stateless_http=True,
        json_response=True,
        transport_security=unchecked,
    )
    [route] = inner.routes
    assert isinstance(route, Route)
    route.methods = {"POST"}  # without sessions a GET would be a stream on which nothing ever comes
    app.router.routes.append(route)
    outer = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(running: Any) -> AsyncIterator[Any]:
        async with outer(running) as state, server.session_manager.run():
            yield state

    app.router.lifespan_context = lifespan


def _corpus_in(app: "FastAPI", context: Context[Any]) -> ServedCorpus:
    """The corpus that the caller's key opens."""
    given = context.headers or {}
    headers = {name: given[name] for name in _FORWARDED if name in given}

    async def send(method: str, path: str, body: Mapping[str, Any] | None) -> Mapping[str, Any]:
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=None
        ) as client:
            response = await client.request(method, path, json=body, headers=headers)
        found: dict[str, Any] = response.json()
        if not response.is_success:
            raise InputError(str(found["error"]["message"]))
        return found

    return ServedCorpus(send)
