"""The Ray Serve application: a front, replicas, and the router between them. The one file that imports Ray.

A replica that is lost costs a retry: the front asks another one as long as nothing of the answer has been handed on.
Later it says so, in the stream's own way, and the client asks again; the conversation is as it was, because a turn is
part of it only once its answer is complete. Replicas that are replaced finish what they answer and write what they
hold.
"""

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from starlette.responses import Response

from ragkv.api import ApiError, ServeConfig, format_event
from ragkv.errors import ConfigError, MissingExtraError
from ragkv.scheduling.replica_routing import ReplicaLoad, RouterSettings, RoutingRequest, make_router

from .asks import Asks
from .passing import Passed, Start, answered
from .place import Place

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

TRIES = 3  # replicas that a request is given to, should they be lost
HINT_S = 0.1  # what looking for a request's chunks may delay it
NAME = "ragkv"
METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]
WARM_UP_S = 600.0  # to load a model


class ContentRouter(RequestRouter):
    """Ray's request router that ranks by a router of `ragkv.scheduling.replica_routing`. Runs in the front."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._router = make_router(kwargs.pop("router"), RouterSettings(**kwargs))
        self._running: Counter[str] = Counter()  # requests under way; all come through here

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        passed = _passed(pending_request)
        ask = RoutingRequest() if passed is None else passed.ask
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ranked = self._router.rank(ask, [ReplicaLoad(name, self._running[name]) for name in sorted(by_name)])
        return [[by_name[name]] for name in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._running[replica_id.unique_id] += 1
        passed = _passed(pending_request)
        if passed is not None:
            self._router.sent(passed.ask, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        name = replica_id.unique_id
        if name in self._running:
            self._running[name] = max(0, self._running[name] - 1)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        left = {replica_id.unique_id for replica_id in self._replicas} - {r.replica_id.unique_id for r in replicas}
        super().update_replicas(replicas)
        for name in left:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._router.removed(name)
        self._running.pop(name, None)


def _passed(pending: PendingRequest | None) -> Passed | None:
    first = pending.args[0] if pending is not None and pending.args else None
    return first if isinstance(first, Passed) else None


class Replica:
    """The whole service, over an engine of its own."""

    async def __init__(self, config: ServeConfig) -> None:  # type: ignore[misc]  # Ray awaits it
        import torch

        from ragkv.api import configure_logging, create_app

        cluster = config.cluster
        torch.set_num_threads(cluster.threads or max(1, int(cluster.cpus)))
        configure_logging(config.log)
        self._place = Place(Path(config.home if config.kv_home is None else config.kv_home) / "replicas")
        self._app = create_app(replace(config, kv_home=str(self._place.path)))
        self._life = contextlib.AsyncExitStack()
        await self._life.enter_async_context(self._app.router.lifespan_context(self._app))
        gate = self._app.state.server.readiness
        while (why := gate.unavailable_reason) is not None:
            if "could not be loaded" in why:
                raise ConfigError(why)
            await asyncio.sleep(0.05)

    async def answer(self, passed: Passed) -> AsyncGenerator[Start | bytes, None]:
        """The answer to a request, as it comes; first of all which process gives it."""
        async with contextlib.aclosing(answered(self._app, passed)) as parts:
            async for part in parts:
                if isinstance(part, Start):
                    name = serve.get_replica_context().replica_id.unique_id
                    part = replace(part, headers=(*part.headers, (b"x-replica", name.encode())))
                yield part

    def check_health(self) -> None:
        """Raise unless requests are taken."""
        if (why := self._app.state.server.readiness.unavailable_reason) is not None:
            raise ConfigError(why)

    async def process(self) -> tuple[str, int]:
        """Its name, as `x-replica` has it, and its process."""
        return serve.get_replica_context().replica_id.unique_id, os.getpid()

    async def __del__(self) -> None:
        """Ray calls it when everything under way is done: write what is held."""
        life, place = getattr(self, "_life", None), getattr(self, "_place", None)
        if life is not None:
            self._app.state.server.readiness.start_draining()
            await life.aclose()
        if place is not None:
            place.close()


front = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)


class Front:
    """Takes requests, gives each to a replica, hands on its answer."""

    def __init__(self, config: ServeConfig, replicas: "DeploymentHandle[Any]") -> None:
        self._config, self._asks = config, Asks(config)
        self._replicas = replicas.options(method_name="answer", stream=True)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ragkv-hints")

    @front.api_route("/{path:path}", methods=METHODS, include_in_schema=False)
    async def pass_on(self, path: str, request: Request) -> Response:
        """Any request."""
        try:
            passed = await self._taken(request)
            parts = self._answer(passed)
            start = await anext(parts)
        except ApiError as error:
            return error.response
        assert isinstance(start, Start)
        response = StreamingResponse(_bodies(parts), status_code=start.status)
        response.raw_headers = [header for header in start.headers if header[0] != b"x-request-id"]  # Ray adds it
        return response

    async def _taken(self, request: Request) -> Passed:
        """The request, whole. Raises `ApiError` for one that is too large."""
        body, limit = bytearray(), self._config.limits.body_bytes
        async with asyncio.timeout(self._config.limits.body_s):
            async for piece in request.stream():
                body += piece
                if len(body) > limit:
                    raise ApiError(413, f"The body is larger than {limit} bytes. Send less.", code="body_too_large")
        scope = request.scope
        client = tuple(scope["client"]) if scope.get("client") else None
        passed = Passed(
            scope["method"],
            scope["path"],
            scope.get("raw_path") or scope["path"].encode(),
            scope["query_string"],
            tuple((bytes(name), bytes(value)) for name, value in scope["headers"]),
            bytes(body),
            client,
            scope["scheme"],
        )
        with contextlib.suppress(TimeoutError):
            loop = asyncio.get_running_loop()
            asking = loop.run_in_executor(self._thread, self._asks.of, passed.path, request.headers, passed.body)
            return replace(passed, ask=await asyncio.wait_for(asyncio.shield(asking), HINT_S))
        return passed

    async def _answer(self, passed: Passed) -> AsyncIterator[Start | bytes]:
        """A replica's answer; another's if that one is lost before anything was handed on. Raises `ApiError`."""
        for tried in range(1, TRIES + 1):
            handed_on, kind, start = False, b"", None
            parts: Any = self._replicas.remote(passed)
            try:
                async for part in parts:
                    if isinstance(part, Start):
                        start, kind = part, dict(part.headers).get(b"content-type", b"")
                        continue  # until there is something behind it
                    if start is not None:
                        yield start
                        handed_on, start = True, None
                    yield part
                if start is not None:
                    yield start  # an answer without a body
                return
            except RayActorError as error:
                log.warning("A replica was lost while it answered %s %s.", passed.method, passed.path)
                why = "The replica that answered was lost. Ask again."
                lost = ApiError(503, why, code="replica_lost", retry_after_s=1)
                if handed_on:
                    if not kind.startswith(b"text/event-stream"):
                        raise  # the connection is cut, so that it shows
                    yield format_event(lost.body, None if passed.path == "/v1/chat/completions" else "error").encode()
                    return
                if tried == TRIES:
                    raise lost from error
            finally:
                parts.cancel()


INGRESS: Any = serve.ingress(front)(Front)  # under a name of its own: `Front` is found by name where it is unpickled


async def _bodies(parts: AsyncIterator[Start | bytes]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(parts):  # type: ignore[type-var]
        async for part in parts:
            if isinstance(part, bytes):
                yield part


def application(args: dict[str, Any]) -> Any:
    """The application of a settings file, `args["config"]`, with any setting of it over that; for `serve` files."""
    values = dict(args)
    return build(ServeConfig.gather(values.pop("config", None), flags=values))


def build(config: ServeConfig) -> Any:
    """The application. Raises `ConfigError` where replicas could not go on with each other's conversations."""
    cluster, store = config.cluster, config.engine.store
    if store.redis is None or not config.engine.session.shared:
        raise ConfigError(
            "Replicas need engine.store.redis, a Redis server, and engine.session.shared = true: a conversation goes "
            "on wherever its next question lands."
        )
    router = {"router": cluster.router, "wait_share": 1.0 if cluster.wait_share is None else cluster.wait_share}
    make_router(cluster.router)  # refuses an unknown name now
    most = cluster.replicas if cluster.most_replicas is None else cluster.most_replicas
    replicas = serve.deployment(
        name="replica",
        max_ongoing_requests=2 * config.queue.limit,  # beyond its own limit a replica says itself that it is full
        autoscaling_config=AutoscalingConfig(
            min_replicas=cluster.replicas,
            initial_replicas=cluster.replicas,
            max_replicas=most,
            target_ongoing_requests=cluster.requests,
        ),
        ray_actor_options={"num_cpus": cluster.cpus, "num_gpus": cluster.gpus},
        request_router_config=RequestRouterConfig(
            request_router_class="ragkv.cluster.ray_app.ContentRouter",  # type: ignore[arg-type]  # a name will do
            request_router_kwargs=router,
        ),
        graceful_shutdown_timeout_s=config.graceful_s + 30.0,  # and to write what is held
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=5.0,
    )(Replica)
    ahead = serve.deployment(
        name="front", num_replicas=1, max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0}
    )(INGRESS)
    return ahead.bind(config, replicas.bind(config))


def run(config: ServeConfig) -> None:
    """Serve until SIGTERM or SIGINT, on the cluster of RAY_ADDRESS or on this machine alone."""
    cluster = config.cluster
    app = build(config)
    ours = not ray.is_initialized() and not os.environ.get("RAY_ADDRESS")
    if ours:
        most = max(cluster.replicas, cluster.most_replicas or 0)
        cpus = max(os.cpu_count() or 1, ceil(most * cluster.cpus) + 1)
        ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=True)
    try:
        serve.start(http_options=HTTPOptions(host=config.host, port=config.port))
        serve.run(app, name=NAME, route_prefix="/")
        ended = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
        ended.wait()
        serve.delete(NAME)
    finally:
        if ours:
            serve.shutdown()  # type: ignore[no-untyped-call]
            ray.shutdown()


__all__ = ["ContentRouter", "Front", "Replica", "application", "build", "run"]
