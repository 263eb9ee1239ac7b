"""The Ray Serve application: a front, replicas, and the router between them. Only this file imports
Ray.

A lost replica costs a retry. As long as no byte of the response was forwarded, the front asks
another replica. Otherwise it ends the stream with an error event and the client asks again. The
conversation is unchanged then, because a turn becomes part of it only when its answer is complete.
A replica that is replaced finishes its answers and writes its stored KV.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from starlette.responses import Response

from ragkv.api import ServeConfig
from ragkv.api.errors import ApiError
from ragkv.api.sse import format_event
from ragkv.errors import ConfigError, MissingExtraError
from ragkv.runtime import is_loopback

from .forwarding import ForwardedRequest, ResponseStart, call_app
from .replica_directory import lock_directory
from .routing import rank, routing_key

if "ray" not in sys.modules and "RAY_ADDRESS" not in os.environ:
    # A cluster of this process alone: Ray's own processes then listen on loopback, not on every
    # interface. The variable is read when Ray is imported; its name is older than its use on Linux.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

try:
    import ray
    from ray import serve
    from ray.exceptions import RayActorError
    from ray.serve.config import AutoscalingConfig, HTTPOptions, RequestRouterConfig
    from ray.serve.handle import DeploymentHandle
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
except ImportError as error:
    raise MissingExtraError("ray[serve]", "ray", "Replicas") from error

log = logging.getLogger(__name__)

TRIES = 3  # to how many replicas a request is sent, if they are lost
NAME = "ragkv"
METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]

# What a replica gets of a request's ASGI scope: what can be sent to another process.
SCOPE = (
    "type",
    "asgi",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "headers",
    "client",
)
# The import path of each `serve.cluster.router`.
ROUTERS = {
    "sticky": "ragkv.cluster.ray.ray_app.StickyRouter",
    "round-robin": "ray.serve.experimental.round_robin_router.RoundRobinRouter",
}


class StickyRouter(RequestRouter):
    """Ranks replicas for Ray by `ragkv.cluster.ray.routing`. Runs in the front process."""

    def initialize_state(self, **_: Any) -> None:
        # requests in progress at each replica; all of them come through here
        self._running: Counter[str] = Counter()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        request = (
            pending_request.args[0]
            if pending_request is not None and pending_request.args
            else None
        )
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        key = request.key if isinstance(request, ForwardedRequest) else ""
        return [
            [by_name[name]] for name in rank(key, {name: self._running[name] for name in by_name})
        ]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        self._running[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._running[replica_id.unique_id] = max(0, self._running[replica_id.unique_id] - 1)


class Replica:
    """The whole service with its own engine."""

    async def __init__(self, config: ServeConfig) -> None:  # type: ignore[misc]  # Ray awaits it
        import torch

        from ragkv.api import create_app
        from ragkv.api.logs import configure_logging

        cluster = config.cluster
        torch.set_num_threads(cluster.threads or max(1, int(cluster.cpus)))
        name = serve.get_replica_context().replica_id.unique_id
        configure_logging(config.log, name)
        self._closing = contextlib.AsyncExitStack()
        kv_home, lock = lock_directory(Path(config.kv_home or config.home) / "replicas")
        self._closing.callback(lock.release)
        self._app = create_app(replace(config, kv_home=str(kv_home)), replica=name)
        log.info("replica_started: process %d, KV in %s", os.getpid(), kv_home)
        await self._closing.enter_async_context(self._app.router.lifespan_context(self._app))
        server = self._app.state.service
        while (reason := server.unavailable_reason) is not None:
            if "could not be loaded" in reason:
                raise ConfigError(reason)
            await asyncio.sleep(0.05)

    async def answer(
        self, request: ForwardedRequest
    ) -> AsyncGenerator[ResponseStart | bytes, None]:
        """The response to a request, part by part. Its `x-replica` header names this replica."""
        async with contextlib.aclosing(call_app(self._app, request)) as parts:
            async for part in parts:
                yield part

    def check_health(self) -> None:
        """Raise `ConfigError` if the replica takes no requests."""
        if (reason := self._app.state.service.unavailable_reason) is not None:
            raise ConfigError(reason)

    async def process(self) -> tuple[str, int]:
        """The replica's name, as in `x-replica`, and its process id."""
        return serve.get_replica_context().replica_id.unique_id, os.getpid()

    async def __del__(self) -> None:
        """Write the stored KV and close. Ray calls this when all requests in progress have
        ended.
        """
        if (closing := getattr(self, "_closing", None)) is not None:
            await closing.aclose()


front = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)


class Front:
    """Takes requests, forwards each to a replica, and returns the replica's response."""

    def __init__(self, config: ServeConfig, replicas: "DeploymentHandle[Any]") -> None:
        self._config = config
        self._replicas = replicas.options(method_name="answer", stream=True)

    @front.api_route("/{path:path}", methods=METHODS, include_in_schema=False)
    async def forward(self, path: str, request: Request) -> Response:
        """Handle any request."""
        try:
            parts = self._answer(await self._read(request))
            start = await anext(parts)
        except ApiError as error:
            return error.response(request.url.path)
        assert isinstance(start, ResponseStart)
        response = StreamingResponse(_body(parts), status_code=start.status)
        # Ray adds it
        response.raw_headers = [header for header in start.headers if header[0] != b"x-request-id"]
        return response

    async def _read(self, request: Request) -> ForwardedRequest:
        """Read the whole request. Raises `ApiError` if the body is too large."""
        body = bytearray()
        limit = self._config.limits.body_bytes
        async for piece in request.stream():
            body += piece
            if len(body) > limit:
                raise ApiError(
                    413, f"The body is larger than {limit} bytes. Send less.", code="body_too_large"
                )
        scope = {name: request.scope[name] for name in SCOPE if name in request.scope}
        key = routing_key(scope["path"], request.headers, bytes(body))
        return ForwardedRequest({**scope, "root_path": "", "server": None}, bytes(body), key)

    async def _answer(self, request: ForwardedRequest) -> AsyncIterator[ResponseStart | bytes]:
        """The response of a replica, or of another one if the first is lost before any byte was
        forwarded.

        Raises `ApiError` if every tried replica is lost.
        """
        for tried in range(1, TRIES + 1):
            forwarded = False
            content_type = b""
            start = None
            parts: Any = self._replicas.remote(request)
            try:
                async for part in parts:
                    if isinstance(part, ResponseStart):
                        start = part
                        content_type = dict(part.headers).get(b"content-type", b"")
                        continue  # held back until the first bytes of the body
                    if start is not None:
                        yield start
                        forwarded = True
                        start = None
                    yield part
                if start is not None:
                    yield start  # a response without a body
                return
            except RayActorError as error:
                log.warning(
                    "A replica was lost while it answered %s %s.",
                    request.scope["method"],
                    request.scope["path"],
                )
                message = "The replica that answered was lost. Ask again."
                lost = ApiError(503, message, code="replica_lost", retry_after_s=1)
                if forwarded:
                    if not content_type.startswith(b"text/event-stream"):
                        raise  # cuts the connection, so that the client notices
                    name = None if request.scope["path"] == "/v1/chat/completions" else "error"
                    yield format_event(lost.body, name).encode()
                    return
                if tried == TRIES:
                    raise lost from error
            finally:
                parts.cancel()


# not assigned to `Front`: pickle finds that class by its name
INGRESS: Any = serve.ingress(front)(Front)


async def _body(parts: AsyncIterator[ResponseStart | bytes]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(parts):  # type: ignore[type-var]
        async for part in parts:
            if isinstance(part, bytes):
                yield part


def application(args: dict[str, Any]) -> Any:
    """The application for a Ray Serve config file: `args["config"]` is a settings file, other
    `args` override it.
    """
    values = dict(args)
    return build(ServeConfig.gather(values.pop("config", None), flags=values))


def build(config: ServeConfig) -> Any:
    """The application. Raises `ConfigError` without a Redis server: any replica may get a
    conversation's next question.

    Conversations are shared, whatever `session.shared` says.
    """
    cluster = config.cluster
    config.check_servable()
    if config.engine.store.redis is None:
        raise ConfigError(
            "Replicas share conversations and entries over a Redis server: set store.redis.url (or "
            "RAGKV_STORE__REDIS__URL) to one that all of them reach, such as "
            "redis://127.0.0.1:6379 on one machine."
        )
    config = replace(
        config, engine=replace(config.engine, session=replace(config.engine.session, shared=True))
    )
    replicas = serve.deployment(
        name="replica",
        # beyond its own limit a replica answers that it is full
        max_ongoing_requests=2 * config.queue.limit,
        autoscaling_config=AutoscalingConfig(
            min_replicas=cluster.replicas,
            initial_replicas=cluster.replicas,
            max_replicas=cluster.most_replicas or cluster.replicas,
            target_ongoing_requests=cluster.requests,
        ),
        ray_actor_options={"num_cpus": cluster.cpus, "num_gpus": cluster.gpus},
        request_router_config=RequestRouterConfig(request_router_class=ROUTERS[cluster.router]),  # type: ignore[arg-type]  # an import path is accepted too
        graceful_shutdown_timeout_s=config.graceful_s + 30.0,  # and time to write the stored KV
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=5.0,
    )(Replica)
    ingress = serve.deployment(
        name="front", max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0}
    )(INGRESS)
    return ingress.bind(config, replicas.bind(config))


def run(config: ServeConfig) -> None:
    """Serve until SIGTERM or SIGINT, on the cluster of RAY_ADDRESS or else on this machine."""
    cluster = config.cluster
    is_local = not ray.is_initialized() and not os.environ.get("RAY_ADDRESS")

    def close_on_sigterm() -> None:  # during the start: what was started is closed
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))

    close_on_sigterm()
    with contextlib.ExitStack() as stack:
        app = build(config)
        if is_local:
            # enough for all replicas
            cpus = ceil((cluster.most_replicas or cluster.replicas) * cluster.cpus) + 1
            ray.init(
                "local",
                num_cpus=max(os.cpu_count() or 1, cpus),
                include_dashboard=False,
                log_to_driver=True,
            )
            stack.callback(ray.shutdown)
            close_on_sigterm()  # Ray has put a handler of its own in its place, which aborts
            stack.callback(serve.shutdown)
        serve.start(http_options=HTTPOptions(host=config.host, port=config.port))
        serve.run(app, name=NAME, route_prefix="/")
        print(_addresses(config, is_local), file=sys.stderr, flush=True)
        ended = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
        ended.wait()
        serve.delete(NAME)


def _addresses(config: ServeConfig, is_local: bool) -> str:
    """Where the service listens, and where Ray does."""
    served = f"ragkv serves {config.model} at http://{config.host}:{config.port}; Ctrl-C ends it."
    node: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    reach = (
        "this machine only"
        if is_loopback(node)
        else "every interface: let only the cluster's machines reach them"
    )
    return (
        f"{served}\nRay's own ports are open to {reach} ({node}; see docs/scale.md)."
        if is_local
        else served
    )
