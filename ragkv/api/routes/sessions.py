"""/v1/sessions: the conversations a caller named. Their KV stays, so that the next turn costs its new tokens."""

import uuid
from typing import Annotated

from fastapi import APIRouter, Path, Request

from ragkv.errors import InputError
from ragkv.sessions import Session
from ragkv.sessions import SessionInfo as Info

from .. import schemas
from ..errors import ApiError, not_found, responses
from ..schemas import SESSION_PATTERN
from ..service import Here, Who
from ..tenants import Tenant

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])

SessionName = Annotated[str, Path(pattern=SESSION_PATTERN, description="The conversation's id.")]


@router.get("", summary="List conversations", responses=responses())
async def list_sessions(request: Request, service: Here, who: Who) -> schemas.SessionList:
    """The caller's conversations, the last used first."""

    def work() -> list[schemas.SessionInfo]:
        with service.tenant(who) as tenant:
            return [_info(info) for info in tenant.sessions()]

    return schemas.SessionList(data=await service.house.run(request, lambda _: work()))


@router.get("/{session_id}", summary="Show a conversation", responses=responses(404))
async def show_session(session_id: SessionName, request: Request, service: Here, who: Who) -> schemas.SessionInfo:
    """How long it is."""

    def work() -> schemas.SessionInfo:
        with service.tenant(who) as tenant:
            _there(tenant, session_id)
            return _shown(tenant, session_id)

    return await service.house.run(request, lambda _: work())


@router.delete("/{session_id}", summary="Delete a conversation", responses=responses(404))
async def delete_session(session_id: SessionName, request: Request, service: Here, who: Who) -> schemas.Deleted:
    """Its history is gone, and its KV where no other conversation has it."""

    def work() -> None:
        with service.tenant(who) as tenant:
            _there(tenant, session_id).delete()

    await service.house.run(request, lambda _: work())
    return schemas.Deleted(id=session_id)


@router.post("/{session_id}/truncate", summary="Shorten a conversation", responses=responses(404))
async def truncate_session(
    session_id: SessionName,
    body: schemas.KeepTokens | schemas.Discard,
    request: Request,
    service: Here,
    who: Who,
) -> schemas.Truncated:
    """Drop tokens from its history now; what is left keeps its KV."""

    def work() -> schemas.Truncated:
        with service.tenant(who) as tenant:
            session = _there(tenant, session_id)
            if isinstance(body, schemas.Discard):
                dropped = session.discard(body.discard)
            else:
                excess = len(session.token_ids) - body.keep_tokens
                dropped = session.discard([(0, excess)]) if excess > 0 else 0
            return schemas.Truncated(id=session_id, dropped=dropped, tokens=len(session.token_ids))

    return await service.house.run(request, lambda _: work())


@router.post("/{session_id}/fork", status_code=201, summary="Copy a conversation", responses=responses(404, 409))
async def fork_session(
    session_id: SessionName, body: schemas.ForkRequest, request: Request, service: Here, who: Who
) -> schemas.SessionInfo:
    """A new conversation with the same past, which both share; they go on apart."""
    to = body.to or f"fork-{uuid.uuid4().hex}"

    def work() -> schemas.SessionInfo:
        with service.tenant(who) as tenant:
            session = _there(tenant, session_id)
            with tenant.quotas.session(who, to, tenant.session_ids):
                try:
                    tenant.fork(session, to)
                except InputError as error:
                    raise ApiError(409, f"There is a conversation {to!r} already.", param="to") from error
            return _shown(tenant, to)

    return await service.house.run(request, lambda _: work())


def _there(tenant: Tenant, session_id: str) -> Session:
    if session_id not in tenant.session_ids():
        raise not_found("conversation", session_id, "session_id")
    return tenant.session(session_id)


def _shown(tenant: Tenant, session_id: str) -> schemas.SessionInfo:
    for info in tenant.sessions():
        if info.session_id == session_id:
            return _info(info)
    raise not_found("conversation", session_id, "session_id")


def _info(info: Info) -> schemas.SessionInfo:
    return schemas.SessionInfo(
        id=info.session_id,
        turns=info.turns,
        tokens=info.tokens,
        stored_bytes=info.stored_bytes,
        used_at=info.used_at,
    )


__all__ = ["router"]
