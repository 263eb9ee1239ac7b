"""What happens to every request around its route, in pure ASGI, so that streams flow as they are
made.

`RequestMiddleware` gives the request an id, times, logs and counts it, and answers every error.
`Access` refuses it to another host, of a foreign web page, while the server is not ready, without a
valid key, or above the key's rate. `bounded` refuses a body of the wrong type, and one that is too
large.
"""

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from ..service import Service
from .observability import RequestMiddleware


def install(app: FastAPI, service: Service) -> None:
    """Add the middleware to `app`, which has all its routes."""
    app.add_middleware(RequestMiddleware, service=service)
    if service.config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.config.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id", "retry-after"],
        )


__all__ = ["install"]
