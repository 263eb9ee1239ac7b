"""What happens to every request before and around its route. Pure ASGI, so that streams flow as they are made.

From the outside in:
1. `ObservabilityMiddleware` gives the request an id, times, logs and counts it, and answers every error.
2. `AccessMiddleware` refuses a request to another host or of a foreign web page, while the server is not ready, without
   a valid key, or above the key's rate.
3. `BodyMiddleware` refuses a body of the wrong type, and one that is too large.
"""

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from ..service import Service
from .access import AccessMiddleware
from .body import BodyMiddleware
from .observability import ObservabilityMiddleware


def install(app: FastAPI, service: Service) -> None:
    """Add the middleware to `app`, which has all its routes."""
    app.add_middleware(BodyMiddleware, service=service)
    app.add_middleware(AccessMiddleware, service=service)
    if service.config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.config.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "x-request-id", "x-session-id"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(ObservabilityMiddleware, service=service)  # added last: the outermost


__all__ = ["install"]
