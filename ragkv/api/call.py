"""A request to the service, and how it goes through it.

1. `middleware.py` gives it an id, and refuses an unknown host, key or rate.
2. FastAPI checks its body (`bodies/`), and gives the route (`routes/`) an `ApiCall`.
3. The route asks the call for an answer (`answer`, `stream`), or for work on data: what ingests,
   searches, embeds and lists (`on_thread`, `on_tenant`, `on_collection`).
4. Each kind has a pool (`work.py`), which refuses the request, or accepts it and runs it on a
   thread. Its `Claim` ends at its deadline or when its client leaves.
5. The thread opens the tenant (`tenants.py`). Work on data pauses while answers run, and is
   repeated on a full disk when KV has given way. An answer is an `AnswerJob` (`answers.py`):
   passages are found, and the tenant's engine answers.
6. What the thread returns or yields is the response. An error becomes one JSON shape
   (`failures.py`).
"""

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Depends, Request

from ragkv.rag import Rag
from ragkv.runtime import Check, Claim
from ragkv.types import Reuse, Timing

from .errors import unknown_model
from .full_disk import making_room
from .keys import Principal
from .service import Service
from .settings import LimitsConfig
from .tenants import Tenant, Tenants
from .work import WorkItems, pausing_check

T = TypeVar("T")


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

    @property
    def tenants(self) -> Tenants:
        """The tenants of the server."""
        tenants = self.service.tenants
        assert tenants is not None  # the middleware lets no request in before the model is loaded
        return tenants

    def collection_of(self, model: str) -> str | None:
        """The collection in a model's name, as in `smollm2:handbook`; `None`: it is the model
        alone.

        Raises `ApiError` 404 for another model.
        """
        own = self.service.model_id
        if model == own:
            return None
        if not model.startswith(f"{own}:"):
            known = f"{own!r}, alone or with a collection, as in {own}:default"
            raise unknown_model(model, known)
        return model.removeprefix(f"{own}:")

    async def stream(self, work: Callable[[Claim], Generator[T, None, None]]) -> WorkItems[T]:
        """The items of an answer as they come; returns when the first is there."""
        return await self.service.answer_pool.stream(self.request, work)

    async def answer(
        self, work: Callable[[Claim], Generator[object, None, None]], kind: type[T]
    ) -> T:
        """The first item of the stream `work` that is a `kind`: with it the answer is complete."""

        def of_kind(claim: Claim) -> T:
            with contextlib.closing(work(claim)) as items:
                return next(item for item in items if isinstance(item, kind))

        return await self.service.answer_pool.run(self.request, of_kind)

    async def on_thread(self, work: Callable[[Check], T]) -> T:
        """Return what `work` on data returns. It calls what it is given before each batch."""
        pool = self.service.data_pool

        def pausing_for_answers(claim: Claim) -> T:
            wait_idle = self.tenants.idle_time.wait_idle
            return work(pausing_check(claim, wait_idle, lambda: len(pool.computing)))

        return await pool.run(self.request, pausing_for_answers)

    async def on_tenant(self, work: Callable[[Tenant, Check], T], deletes: bool = False) -> T:
        """Do `work` on a thread, as `on_thread` does. The sender's tenant stays open meanwhile.

        On a full disk stored KV is given up and the work is done again. For work that `deletes` the
        home's reserve is given up, too.
        """

        def with_room(check: Check) -> T:
            tenants = self.tenants
            with tenants.use(self.principal, check) as tenant:
                made = making_room(
                    lambda: work(tenant, check), lambda: tenants.free_disk(tenant, check, deletes)
                )
            if deletes:
                tenants.reserve.keep()
            return made

        return await self.on_thread(with_room)

    async def on_collection(self, name: str, work: Callable[[Rag, Check], T]) -> T:
        """Do `work` on a collection of the tenant, as `on_tenant` does. Raises `ApiError` 404 if
        there is none.
        """

        def in_collection(tenant: Tenant, check: Check) -> T:
            with tenant.collections.use(name, check=check) as collection:
                return work(collection, check)

        return await self.on_tenant(in_collection)

    def record_answer(self, timing: Timing, reuse: Reuse, answer_tokens: int) -> None:
        """Add a finished answer to the access log, the metrics and the key's tokens per minute.
        Call it once per answer.
        """
        stats = self.request.state.stats
        tokens = {
            "prompt_tokens": reuse.tokens,
            "reused_tokens": reuse.exact + reuse.fused,
            "answer_tokens": answer_tokens,
        }
        stats.update(tokens)  # it counts
        stats.setdefault("ttft_s", round(timing.first_token_s, 4))
        self.service.metrics.record_answer(timing, reuse, answer_tokens)
        self.service.limiter.charge_tokens(self.principal, reuse.tokens + answer_tokens)

    def record_embedding(self, tokens: int) -> None:
        """Add embedded texts to the access log, the metrics and the key's tokens per minute."""
        self.request.state.stats["prompt_tokens"] += tokens
        self.service.metrics.embedding_tokens.inc(tokens)
        self.service.limiter.charge_tokens(self.principal, tokens)


async def _api_call(request: Request) -> ApiCall:
    principal = request.state.principal
    assert isinstance(principal, Principal)  # the middleware sets it before any route runs
    return ApiCall(request, request.app.state.service, principal)


# FastAPI would call what is no coroutine on another thread
ApiCallDep = Annotated[ApiCall, Depends(_api_call)]
