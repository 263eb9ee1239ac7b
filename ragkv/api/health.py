"""The monitoring routes /livez, /readyz and /metrics. None needs an API key.

Ready means: the model is loaded, and a vLLM server that computes the answers is healthy and has the
same model.
"""

import asyncio
import hmac
from collections.abc import Iterable
from typing import Literal

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, Field

from .errors import ApiError, invalid_key
from .middleware import came_through_proxy
from .service import Service

# What a replica does without while shared storage does not answer.
CONVERSATIONS = (
    "The Redis server of the conversations does not answer: a request that names a conversation "
    "is refused with 503, "
    "and a conversation without a name is computed from its messages."
)


class HealthBody(BaseModel):
    """Whether the server works, and what it does without."""

    status: Literal["ok", "unavailable"] = Field(description="ok: all is well.")
    reason: str | None = Field(default=None, description="Why it is unavailable.")
    degraded: list[str] = Field(
        default=[], description="What does not answer, and what that means; requests go on."
    )


def router(service: Service) -> APIRouter:
    """The monitoring routes of one server."""
    routes = APIRouter(tags=["health"])

    @routes.get("/livez")
    async def livez() -> HealthBody:
        """The process answers."""
        return HealthBody(status="ok")

    @routes.get(
        "/readyz", responses={503: {"model": HealthBody, "description": "Not accepting requests"}}
    )
    async def readyz(response: Response) -> HealthBody:
        """Requests are accepted."""
        reason = service.unavailable_reason
        if reason is None and service.vllm is not None:
            reason = await asyncio.to_thread(service.vllm.failure)
        response.headers["cache-control"] = "no-store"
        if reason is None:
            return HealthBody(status="ok", degraded=described(service.away()))
        response.status_code = 503
        return HealthBody(status="unavailable", reason=reason)

    @routes.get("/metrics", include_in_schema=False)
    async def metrics(request: Request) -> Response:
        """Prometheus metrics: with the token if one is set, otherwise for this machine only."""
        token = service.config.auth.metrics_token
        if token is not None:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                raise invalid_key(
                    "The metrics require the token of the setting auth.metrics_token."
                )
        elif not service.config.is_private or came_through_proxy(request.headers):
            message = (
                "The metrics are for this machine only. Set auth.metrics_token to read them "
                "remotely."
            )
            raise ApiError(403, message)
        service.metrics.ready.set(service.unavailable_reason is None)
        # it collects the engines' stats
        text = await asyncio.to_thread(generate_latest, service.metrics.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return routes


def described(away: Iterable[str]) -> list[str]:
    """A sentence for each thing that does not answer; `away` is as in `Engine.away`."""
    tier = (
        "{} does not answer: what only it holds is computed, and other replicas do not find "
        "what is stored here now."
    )
    return [
        CONVERSATIONS if name == "conversations" else tier.format(name)
        for name in sorted(set(away))
    ]
