"""/v1/stats: what the caller's store holds."""

from fastapi import APIRouter, Request

from ..errors import responses
from ..reports import queue_of, tiers_of
from ..schemas import StatsResponse
from ..service import Here, Who

router = APIRouter(prefix="/v1", tags=["stats"])


@router.get("/stats", summary="What the caller's store holds", responses=responses())
async def stats(request: Request, service: Here, who: Who) -> StatsResponse:
    """Tiers, queue and settings in force; nothing of other tenants."""

    def work() -> StatsResponse:
        with service.tenant(who) as tenant:
            found = tenant.engine.stats()
            return StatsResponse(
                model=service.model_id,
                kv_bytes_per_token=found.kv_bytes_per_token,
                context_tokens=tenant.engine.context_tokens,
                tiers=tiers_of(found),
                queue=queue_of(found),
                ratio=tenant.engine.config.fusion.ratio,
                selector=tenant.engine.config.fusion.selector,
            )

    return await service.house.run(request, lambda _: work())


__all__ = ["router"]
