"""/v1/stats: the caller's store."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from ragkv.runtime import Check

from ..call import ApiCallDep
from ..health import described
from ..tenants import Tenant

router = APIRouter(prefix="/v1", tags=["stats"])


class TierInfo(BaseModel):
    """A tier of the caller's store."""

    tier: str = Field(description="memory, disk, redis or s3.")
    entries: int | None = Field(
        description="Stored entries; null of redis and s3, which count and bound themselves."
    )
    used_bytes: int | None = Field(description="Bytes that they take.")
    capacity_bytes: int | None = Field(description="Bytes that they may take.")
    hits: int = Field(description="Lookups that found an entry.")
    misses: int = Field(description="Lookups that found none.")
    evictions: int = Field(description="Entries that made space for others.")
    damaged: int = Field(description="Entries dropped because their bytes were wrong.")


class StatsResponse(BaseModel):
    """The model, and the caller's store."""

    replica: str = Field(
        description="The process that answered, as in the header x-replica and in its log."
    )
    degraded: list[str] = Field(description="What does not answer, and what that means.")
    model: str = Field(description="The served model.")
    kv_bytes_per_token: int = Field(description="Bytes of a token's KV, as it is stored.")
    dtype: str = Field(description="The number format of weights and KV, such as bfloat16.")
    context_tokens: int | None = Field(
        description="The most tokens of prompt and answer; null: no limit is known."
    )
    tiers: list[TierInfo] = Field(description="The tiers, fastest first.")
    ratio: float | None = Field(
        description="The ratio of requests that name none; null: as the controller chooses."
    )
    selector: str = Field(description="The selector of requests that name none.")


@router.get("/stats", summary="Show the caller's store")
async def stats(call: ApiCallDep) -> StatsResponse:
    """Tiers and settings of the caller; nothing about other tenants. Operators find more in
    `/metrics`.
    """

    def work(tenant: Tenant, _: Check) -> StatsResponse:
        found = tenant.engine.stats()
        engine = tenant.engine
        remotes = found.remotes.items()
        method = engine.method()
        server = call.service.vllm
        own = {
            "ratio": None if method.controlled else method.ratio,
            "selector": method.selector.name,
        }
        chosen: Mapping[str, Any] = own if server is None else server.connector
        return StatsResponse(
            replica=call.service.replica,
            degraded=described(name for name, remote in remotes if not remote.answers),
            model=call.service.model_id,
            kv_bytes_per_token=engine.entries.encoder.bytes_per_token,
            dtype=found.dtype,
            context_tokens=engine.model.adapter.context_length,
            tiers=[
                TierInfo(tier=tier.kind, **dataclasses.asdict(tier)) for tier in found.store.tiers
            ],
            ratio=chosen["ratio"],
            selector=chosen["selector"],
        )

    return await call.on_tenant(work)
