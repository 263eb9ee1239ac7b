"""/v1/stats: the caller's store."""

import dataclasses

from fastapi import APIRouter
from pydantic import BaseModel

from ragkv.scheduling import QueueStats

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


class StatsResponse(BaseModel):
    """The model, and the caller's store."""

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
        return StatsResponse(
            model=executor.service.model_id,
            kv_bytes_per_token=found.kv_bytes_per_token,
            context_tokens=engine.context_tokens,
            tiers=[TierInfo(tier=tier.kind.value, **dataclasses.asdict(tier)) for tier in found.store.tiers],
            queue=found.queue,
            ratio=engine.config.fusion.ratio,
            selector=engine.config.fusion.selector,
        )

    return await executor.run(work)
