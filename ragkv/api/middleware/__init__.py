"""What happens to every request before and around its route. Pure ASGI, so that streams flow as they are made.

From the outside in:
1. `ObservabilityMiddleware` gives the request an id, times, logs and counts it, and answers every error.
2. `OriginMiddleware` refuses a request that is addressed to another host, or that a foreign web page sends.
3. `AuthMiddleware` refuses a request while the server is not ready, without a valid key, or above the key's rate.
4. `BodyMiddleware` refuses a body of the wrong type, and one that is too large.
"""

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from ..service import Service
from .auth import AuthMiddleware
from .body import BodyMiddleware
from .observability import ObservabilityMiddleware
from .origin import OriginMiddleware


def install(app: FastAPI, service: Service) -> None:
    """Add the middleware to `app`, which has all its routes."""
    app.add_middleware(BodyMiddleware, service=service)
    app.add_middleware(AuthMiddleware, service=service)
    if service.config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.config.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "x-request-id", "x-session-id"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(OriginMiddleware, service=service)
    app.add_middleware(ObservabilityMiddleware, service=service)  # added last: the outermost


__all__ = ["install"]
