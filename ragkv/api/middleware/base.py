"""What the three middlewares share: each handles HTTP requests and passes on everything else."""

from abc import ABC, abstractmethod

from starlette.types import ASGIApp, Receive, Scope, Send

from ..service import Service


class HTTPMiddleware(ABC):
    """An ASGI middleware for HTTP requests. `service` is what all requests share."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self.handle if scope["type"] == "http" else self._app)(scope, receive, send)

    @abstractmethod
    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request."""
