"""/v1/stats: the caller's store."""

import dataclasses

from fastapi import APIRouter
from pydantic import BaseModel, Field

from ragkv.scheduling import QueueStats

from ..degraded import described
from ..errors import responses
from ..service import TenantExecutorDep
from ..tenants import Tenant

router = APIRouter(prefix="/v1", tags=["stats"])


class TierInfo(BaseModel):
    """A tier of the caller's store."""

    tier: str
    entries: int
    used_bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    evictions: int
    damaged: int


class RemoteInfo(BaseModel):
    """The health of storage that replicas share, as this replica sees it."""

    remote: str = Field(description="redis, s3, or conversations: the server that has their state.")
    state: str = Field(description="closed: it is called; open, half-open: it is not, until a probe is answered.")
    answers: bool = Field(description="Whether the last call was answered in time.")
    away_s: float = Field(description="Seconds since the start in which it did not answer.")
    failures: int
    timeouts: int
    skipped: int = Field(description="Calls that were not made because it did not answer before.")
    lost_s: float = Field(description="Seconds that calls without an answer took.")
    pending_deletions: int = Field(description="Deletions that it has not confirmed yet.")


class StatsResponse(BaseModel):
    """The model, and the caller's store."""

    replica: str = Field(description="The process that answered, as in the header x-replica and in its log.")
    degraded: list[str] = Field(description="What does not answer, and what that means.")
    remotes: list[RemoteInfo]
    model: str
    kv_bytes_per_token: int
    context_tokens: int | None
    tiers: list[TierInfo]
    queue: QueueStats
    ratio: float | None
    selector: str


@router.get("/stats", summary="Show the caller's store", responses=responses())
async def stats(executor: TenantExecutorDep) -> StatsResponse:
    """Tiers, queue and settings of the caller; nothing about other tenants."""

    def work(tenant: Tenant) -> StatsResponse:
        found, engine = tenant.engine.stats(), tenant.engine
        remotes = found.remotes.items()
        return StatsResponse(
            replica=executor.service.replica,
            degraded=described(name for name, remote in remotes if not remote.answers),
            remotes=[RemoteInfo(remote=name, **dataclasses.asdict(remote)) for name, remote in remotes],
            model=executor.service.model_id,
            kv_bytes_per_token=found.kv_bytes_per_token,
            context_tokens=engine.context_tokens,
            tiers=[TierInfo(tier=tier.kind.value, **dataclasses.asdict(tier)) for tier in found.store.tiers],
            queue=found.queue,
            ratio=engine.config.fusion.ratio,
            selector=engine.config.fusion.selector,
        )

    return await executor.run(work)
