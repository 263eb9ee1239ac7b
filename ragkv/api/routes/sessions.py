"""/v1/sessions: conversations that a caller named. Their KV is stored, so a turn computes only its
new tokens.
"""

import dataclasses
import uuid
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, Field

from ragkv.errors import InputError
from ragkv.runtime import Check
from ragkv.sessions import Session

from ..answers import SAVE_S
from ..bodies.parts import Strict, optional
from ..bodies.resources import SESSION_PATTERN, Deleted, Listed, SessionId
from ..call import ApiCallDep
from ..errors import ApiError, not_found
from ..tenants import Tenant

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])

SessionPath = Annotated[
    str, Path(pattern=SESSION_PATTERN, description="The conversation's id.", examples=["s1"])
]


class SessionBody(BaseModel):
    """A conversation."""

    id: str = Field(description="The conversation's id.")
    turns: int = Field(description="How many questions were answered.")
    tokens: int = Field(description="Tokens of its history.")
    stored_bytes: int = Field(description="Stored KV of its history.")
    used_at: float = Field(description="Seconds since the epoch.")
    title: str = Field(
        description='The beginning of its first question, as one line; "" if it is not text.'
    )


class ForkRequest(Strict):
    """The copy of a conversation."""

    to: SessionId | None = optional("The copy's id; left out: a new one.", examples=["s2"])


class RewindRequest(Strict):
    """How far a conversation goes back."""

    turns: int = Field(default=1, ge=1, lt=2**31, description="How many turns are taken back.")


@router.get("", summary="List conversations")
async def list_sessions(
    call: ApiCallDep,
    limit: Annotated[int, Query(ge=1, le=10_000, description="The most conversations.")] = 1000,
) -> Listed[SessionBody]:
    """The caller's conversations, the last used first."""
    return await call.on_tenant(
        lambda tenant, _: Listed(data=_infos(tenant, tenant.last_sessions(limit)))
    )


@router.get("/{session_id}", summary="Show a conversation")
async def show_session(session_id: SessionPath, call: ApiCallDep) -> SessionBody:
    """The length of a conversation."""
    return await call.on_tenant(lambda tenant, _: _info(tenant, session_id))


@router.delete("/{session_id}", summary="Delete a conversation")
async def delete_session(session_id: SessionPath, call: ApiCallDep) -> Deleted:
    """Delete its history, and its KV unless another conversation shares it."""
    await call.on_tenant(
        lambda tenant, check: _stored_session(tenant, session_id).delete(check), deletes=True
    )
    return Deleted(id=session_id)


@router.post("/{session_id}/fork", status_code=201, summary="Copy a conversation")
async def fork_session(session_id: SessionPath, body: ForkRequest, call: ApiCallDep) -> SessionBody:
    """A new conversation with the same history. Both share its KV and continue independently."""
    copy_id = body.to or f"fork-{uuid.uuid4().hex}"

    def work(tenant: Tenant, check: Check) -> SessionBody:
        session = _stored_session(tenant, session_id)
        tenant.check_session_quota(call.principal, copy_id)
        try:
            copy = session.fork(tenant.engine_session_id(copy_id), check)
        except InputError as error:
            message = f"There is a conversation {copy_id!r} already."
            raise ApiError(409, message, param="to") from error
        copy.wait_saved(SAVE_S)
        return _info(tenant, copy_id)

    return await call.on_tenant(work)


@router.post("/{session_id}/rewind", summary="Take back turns")
async def rewind_session(
    session_id: SessionPath, body: RewindRequest, call: ApiCallDep
) -> SessionBody:
    """Take back the last turns, to ask again or ask differently in the same conversation.

    With all turns taken back the conversation is empty, and its next question is its first.
    """

    def work(tenant: Tenant, check: Check) -> SessionBody:
        session = _stored_session(tenant, session_id)
        session.rewind(body.turns, check)
        session.wait_saved(SAVE_S)
        state = session.state
        return SessionBody(
            id=session_id,
            turns=session.turns,
            tokens=len(session.token_ids),
            stored_bytes=sum(one.stored_bytes for one in tenant.sessions([session_id])),
            used_at=state.used_at,
            title=session.title,
        )

    return await call.on_tenant(work)


def _stored_session(tenant: Tenant, session_id: str) -> Session:
    if not tenant.has_session(session_id):
        raise not_found("conversation", session_id, "session_id")
    return tenant.session(session_id)


def _infos(tenant: Tenant, session_ids: Sequence[str]) -> list[SessionBody]:
    return [
        SessionBody(id=info.session_id, **dataclasses.asdict(info))
        for info in tenant.sessions(session_ids)
    ]


def _info(tenant: Tenant, session_id: str) -> SessionBody:
    for info in _infos(tenant, [session_id]):
        return info
    raise not_found("conversation", session_id, "session_id")
