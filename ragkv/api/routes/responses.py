"""/v1/responses: OpenAI's endpoint whose answers are stored and continued."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response

from ..errors import ApiError, not_found, responses
from ..model_response import ModelResponse
from ..openai_responses import DeletedResponse, ResponseObject, ResponseRequest
from ..response_stream import ResponseStream
from ..service import PrincipalDep, ServiceDep, TenantExecutorDep
from ..sse import EventStream
from ..stored_responses import StoredResponse
from ..tenants import Tenant

router = APIRouter(prefix="/v1/responses", tags=["openai"])

_STREAM = "With `stream`: OpenAI's events from `response.created` to `response.completed` or `response.incomplete`."
_ID = "The response's id."
_EXAMPLE = "resp_0123456789abcdef0123456789abcdef"
ResponseId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,128}$", description=_ID, examples=[_EXAMPLE])]


@router.post(
    "",
    summary="Answer an input, and store the answer",
    response_model=ResponseObject,
    responses={**responses(404), 200: {"description": _STREAM, "content": {"text/event-stream": {}}}},
)
async def create_response(
    body: ResponseRequest, request: Request, service: ServiceDep, principal: PrincipalDep
) -> ResponseObject | Response:
    """OpenAI's endpoint. `previous_response_id` continues a stored response; what was said before is reused."""
    turn = ModelResponse(service, principal, body)
    turn.check()
    if body.stream:
        return EventStream(ResponseStream(turn).texts(await service.answer_pool.stream(request, turn.events)))
    return await service.answer_pool.run_stream(request, turn.events, ResponseObject)


@router.get("/{response_id}", summary="Show a stored response", responses=responses(404))
async def show_response(
    response_id: ResponseId,
    executor: TenantExecutorDep,
    stream: Annotated[bool, Query(description="Not offered.", json_schema_extra={"enum": [False]})] = False,
) -> ResponseObject:
    """The response as it was returned, without its report."""
    if stream:
        message = "stream is not offered for a stored response: leave it out, or give false."
        raise ApiError(400, message, "unsupported_parameter", "stream")
    return await executor.run(lambda tenant: ResponseObject(**_stored(tenant, response_id).response))


@router.delete("/{response_id}", summary="Delete a stored response", responses=responses(404))
async def delete_response(response_id: ResponseId, executor: TenantExecutorDep) -> DeletedResponse:
    """Delete the response, its conversation, and the KV that a next turn would find. Other responses stay."""

    def work(tenant: Tenant) -> None:
        stored = _stored(tenant, response_id)
        tenant.responses.delete(response_id)
        tenant.dialogue.forget_turns(stored.prompt_turns, stored.tools)

    await executor.run(work)
    return DeletedResponse(id=response_id)


def _stored(tenant: Tenant, response_id: str) -> StoredResponse:
    if (stored := tenant.responses.load(response_id)) is None:
        raise not_found("stored response", response_id, "response_id")
    return stored
