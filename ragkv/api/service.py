"""The state that all requests of one app share: keys, rates, metrics, the tenants on the loaded
model, and the worker pools.

The routes get it by FastAPI's dependencies; it is `app.state.service`.
"""

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

from fastapi import Depends, Request
from starlette.requests import HTTPConnection

from ragkv.config import EngineConfig, StoreConfig
from ragkv.engine import Engine
from ragkv.home import kept_at
from ragkv.model.loading import quiet_transformers
from ragkv.retrieval import Embedder, resolve_embedder
from ragkv.retrieval.rag import Rag
from ragkv.runtime import Check, Closing, make_private_folder, server_file
from ragkv.types import Reuse, Timing
from ragkv.vllm.front import VllmServer

from .documents.parser import DocumentParser
from .errors import ApiError, unknown_model
from .full_disk import making_room
from .keys import ANONYMOUS, KeyRing, Principal
from .limits import RateLimiter
from .metrics import Metrics, TenantStats
from .settings import LimitsConfig, ServeConfig
from .tenants import Tenant, Tenants
from .work import WorkContext, WorkerPool, giving_way

log = logging.getLogger(__name__)

VLLM_KEY_VARIABLE = "VLLM_API_KEY"  # This variable has the key of the vLLM server, if it has one.

T = TypeVar("T")


class Service(Closing):
    """The state behind the routes of one server."""

    def __init__(self, config: ServeConfig, replica: str | None = None) -> None:
        """`replica` names this process in logs, headers and stats; `None`: a random word."""
        self.config = config
        self.replica = replica or secrets.token_hex(4)
        self.created = int(time.time())
        queue = config.queue
        self.answer_pool = WorkerPool(queue, queue.limit, queue.tenant_limit, queue.deadline_s)
        # Ingesting, searching, embedding, listing:
        self.task_pool = WorkerPool(queue, queue.tasks, queue.tenant_tasks, queue.task_deadline_s)
        self.parser = DocumentParser(config.parsing)
        self._tenants: Tenants | None = None
        self.vllm: VllmServer | None = None  # computes the answers; None: this process does
        if config.in_front_of_vllm:
            key = os.environ.get(VLLM_KEY_VARIABLE, "")
            self.vllm = VllmServer(config.vllm.url, key, timeout_s=config.vllm.timeout_s)
        # Why requests are refused; None: they are accepted.
        self.unavailable_reason: str | None = server_file.LOADING
        self.keys = KeyRing(config.keys_path)
        self._is_private = config.is_private
        self.limiter = RateLimiter()
        self.metrics = Metrics(self.tenant_stats, self.replica, self.vllm)

    def check_ready(self) -> None:
        """Raise `ApiError` 503 while requests are refused."""
        if self.unavailable_reason is not None:
            raise ApiError(
                503, f"{self.unavailable_reason} Ask again.", "not_ready", retry_after_s=2
            )

    @property
    def requires_key(self) -> bool:
        """Whether a request needs an API key."""
        return self.config.auth.required and (self.keys.exists or not self._is_private)

    @property
    def model_id(self) -> str:
        """The model's name: its hub id, or its folder's name."""
        path = Path(self.config.model)
        return path.name if path.is_absolute() else self.config.model

    def collection_of(self, model: str) -> str | None:
        """The collection in a model's name, as in `smollm2:handbook`; `None`: it is the model
        alone.

        Raises `ApiError` 404 for another model.
        """
        if model == self.model_id:
            return None
        if not model.startswith(f"{self.model_id}:"):
            example = f"{self.model_id}:default"
            raise unknown_model(
                model, f"{self.model_id!r}, alone or with a collection, as in {example}"
            )
        return model.removeprefix(f"{self.model_id}:")

    @property
    def tenants(self) -> Tenants:
        """The tenants on the loaded model; raises `ApiError` 503 while it is being loaded."""
        self.check_ready()
        assert self._tenants is not None  # a server is ready when it has loaded the model
        return self._tenants

    def load(self, engine: Engine | None = None, embedder: Embedder | None = None) -> None:
        """Load the model and the embedder, unless they are given. Blocks. Raises what loading
        raises.
        """
        make_private_folder(Path(self.config.home))
        config = self.config.engine
        if engine is None:
            quiet_transformers()
            settings = EngineConfig(
                device=config.device,
                dtype=config.dtype,
                adapter=config.adapter,
                weights=config.weights,
                scheduler=config.scheduler,
                packed_bytes=config.packed_bytes,
                # the tenants' stores take it, not this one
                store=StoreConfig(memory_bytes=config.store.memory_bytes),
            )
            engine = Engine.from_pretrained(self.config.model, settings)
            engine.model.grammars.load()
            embedder = embedder or resolve_embedder(
                kept_at(self.config.home).get("embedder"), device=settings.device
            )
        if embedder is not None:
            # or the first question would wait for it, on a server that said it was ready
            embedder.load()
        if self.vllm is not None:
            self.vllm.identity = engine.model.identity
            # Prompts wait in vLLM's queue and not in this one.
            workers = max(config.scheduler.workers, self.config.queue.limit)
            config = replace(config, scheduler=replace(config.scheduler, workers=workers))
        tenants = Tenants(replace(self.config, engine=config), engine, embedder, self.vllm)
        if self.vllm is not None:
            # its directory exists from now on: vLLM's connector reads it
            with tenants.use(ANONYMOUS):
                pass
        self._tenants = tenants

    def tenant_stats(self) -> Sequence[TenantStats]:
        """The stats of the open tenants. Opens no tenant, and is fast."""
        return [] if self._tenants is None else self._tenants.stats()

    def away(self) -> Sequence[str]:
        """What the open tenants share with other replicas and does not answer, as in
        `EngineStats.away`.
        """
        opened = {} if self._tenants is None else self._tenants.opened()
        return sorted({name for tenant in opened.values() for name in tenant.engine.stats().away})

    def cut(self) -> None:
        """Accept no more work, and cancel what is running: it ends at its next check."""
        self.answer_pool.cut()
        self.task_pool.cut()

    def close(self) -> None:
        """Cancel running work, then flush and close everything. Blocks; work that does not end is
        left behind.
        """
        self.cut()
        ends = time.monotonic() + self.config.close_s / 4
        ended = [
            pool.close(max(0.0, ends - time.monotonic()))
            for pool in (self.answer_pool, self.task_pool)
        ]
        if not all(ended):
            log.error("work_left_running")  # nothing of it was acknowledged
        if self._tenants is not None:
            self._tenants.close()
        if self.vllm is not None:
            self.vllm.close()


def record_answer(
    request: HTTPConnection, timing: Timing, reuse: Reuse, answer_tokens: int
) -> None:
    """Add a finished answer to the access log, the metrics and the key's tokens per minute. Call it
    once per answer.
    """
    tokens = {
        "prompt_tokens": reuse.tokens,
        "reused_tokens": reuse.exact + reuse.fused,
        "answer_tokens": answer_tokens,
    }
    request.state.stats.update(tokens)  # it counts
    request.state.stats.setdefault("ttft_s", round(timing.first_token_s, 4))
    service: Service = request.app.state.service
    service.metrics.record_answer(timing, reuse, answer_tokens)
    service.limiter.charge_tokens(request.state.principal, reuse.tokens + answer_tokens)


def record_embedding(request: HTTPConnection, tokens: int) -> None:
    """Add embedded texts to the access log, the metrics and the key's tokens per minute."""
    request.state.stats["prompt_tokens"] += tokens
    service: Service = request.app.state.service
    service.metrics.embedding_tokens.inc(tokens)
    service.limiter.charge_tokens(request.state.principal, tokens)


@dataclass(frozen=True, slots=True)
class ApiCall:
    """A request to the API: its sender, the server, and ways to do its blocking work on threads."""

    request: Request
    service: Service
    principal: Principal

    @property
    def limits(self) -> LimitsConfig:
        """The limits on the request."""
        return self.service.config.limits

    async def answer(
        self, work: Callable[[WorkContext], Generator[object, None, None]], kind: type[T]
    ) -> T:
        """The first item of the stream `work` that is a `kind`: with it the answer is complete."""

        def of_kind(context: WorkContext) -> T:
            with contextlib.closing(work(context)) as items:
                return next(item for item in items if isinstance(item, kind))

        return await self.service.answer_pool.run(self.request, of_kind)

    async def run_task(self, work: Callable[[Check], T]) -> T:
        """Return what `work` returns, which is not an answer. `work` calls what it is given before
        each batch.
        """
        tasks = self.service.task_pool

        def on_thread(context: WorkContext) -> T:
            wait_idle = self.service.tenants.idle_time.wait_idle
            return work(giving_way(context, wait_idle, lambda: len(tasks.computing)))

        return await tasks.run(self.request, on_thread)

    async def run(self, work: Callable[[Tenant, Check], T], deletes: bool = False) -> T:
        """Return what `work` returns of the sender's tenant, which stays open meanwhile. Long work
        calls its second argument before each batch.

        On a full disk stored KV is given up and the work is done again. For work that `deletes` the
        home's reserve is given up, too.
        """

        def on_thread(check: Check) -> T:
            tenants = self.service.tenants
            with tenants.use(self.principal) as tenant:
                made = making_room(
                    lambda: work(tenant, check), lambda: tenants.give_way(tenant, check, deletes)
                )
            if deletes:
                tenants.reserve.keep()
            return made

        return await self.run_task(on_thread)

    async def run_on_collection(self, name: str, work: Callable[[Rag, Check], T]) -> T:
        """The same for a collection of the tenant; raises `ApiError` 404 if there is none."""

        def on_tenant(tenant: Tenant, check: Check) -> T:
            with tenant.collections.use(name) as collection:
                return work(collection, check)

        return await self.run(on_tenant)


async def _api_call(request: Request) -> ApiCall:
    principal = request.state.principal
    assert isinstance(principal, Principal)  # the middleware sets it before any route runs
    return ApiCall(request, request.app.state.service, principal)


# FastAPI would call what is no coroutine on another thread
ApiCallDep = Annotated[ApiCall, Depends(_api_call)]
