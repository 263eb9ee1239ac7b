"""Answers every failure in OpenAI's JSON shape, with the right status and nothing private.

The service raises `ApiError`. All else is mapped to it; unexpected errors are logged and answered
with a bare 500.
"""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from ragkv import errors
from ragkv.runtime.body_errors import describe_errors

from .errors import CLIENT_GONE, ApiError
from .full_disk import is_disk_full

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1  # after a 503, where there is no better estimate

DISK_FULL = (
    "The disk of this server is full, and there is no stored KV left that could give way. Nothing "
    "was changed. Delete documents or conversations, or ask the operator to free space under `home`."
)

# Status and code of each error; subclasses stand before their base class.
_MAPPED: dict[type[Exception], tuple[int, str | None]] = {
    errors.PromptTooLongError: (400, "context_length_exceeded"),
    errors.UnsupportedError: (400, "unsupported_value"),
    errors.SchemaError: (400, "unsupported_schema"),
    errors.InputError: (400, None),
    errors.ConfigError: (400, None),
    errors.DocumentError: (400, None),
    errors.MissingExtraError: (400, None),
    errors.QueueFullError: (503, "queue_full"),
    errors.DeadlineError: (504, "deadline_exceeded"),
    errors.CancelledError: (CLIENT_GONE, None),
    errors.AnswerServerError: (503, "vllm_unavailable"),
    errors.SessionConflictError: (409, "session_conflict"),
    errors.SessionUnavailableError: (503, "session_unavailable"),
    errors.StoreLockedError: (503, "store_locked"),
}


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str = Field(description="What happened, the values, and what to do.")
    type: str = Field(description="The kind of error; one for each status.")
    param: str | None = Field(
        description="The request field that is wrong, if the error is about one field."
    )
    code: str | None = Field(description="A finer distinction for programs, where there is one.")


class ErrorBody(BaseModel):
    """Every error's body."""

    error: ErrorDetail


# What FastAPI's OpenAPI document says of every route: one shape for all errors. With "4XX" it adds
# no 422 of its own.
RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is refused."},
    "5XX": {"model": ErrorBody, "description": "The server failed, is full, or is not ready."},
}


def as_api_error(error: BaseException) -> ApiError:
    """`error` as the client sees it. An unexpected error is logged and becomes a bare 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        message, param = describe_errors(error.errors())
        return ApiError(400, message, param=param)
    if isinstance(error, HTTPException):
        return ApiError(
            error.status_code, f"{str(error.detail).rstrip('.')}.", headers=error.headers
        )
    if isinstance(error, ClientDisconnect):
        return ApiError(CLIENT_GONE, "The client closed the connection.")
    if is_disk_full(error):
        log.error("disk_full: %s", error)
        return ApiError(507, DISK_FULL, "disk_full")
    for kind, (status, code) in _MAPPED.items():
        if isinstance(error, kind):
            param = error.param if isinstance(error, errors.SchemaError) else None
            return ApiError(
                status, str(error), code, param, RETRY_AFTER_S if status == 503 else None
            )
    log.error("request_failed", exc_info=error)
    return ApiError(500, "The server failed to answer; its log says why, under this request's id.")


def response_to(error: BaseException, path: str) -> JSONResponse:
    """The response to a request of `path` that failed: a client of Ollama's API reads nothing but a
    text.
    """
    shown = as_api_error(error)
    headers = dict(shown.headers or {})
    if shown.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, round(shown.retry_after_s)))
    body = {"error": shown.message} if path.startswith("/api/") else shown.body
    return JSONResponse(body, shown.status, headers)


def install(app: FastAPI) -> None:
    """Make `app` answer every failure in this shape."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        response = response_to(error, request.url.path)
        # the framework names the methods of one of the path's routes alone
        if response.status_code == 405:
            full = [
                method
                for method in ("DELETE", "GET", "POST", "PUT")
                for route in app.routes
                if route.matches({**request.scope, "method": method})[0] is Match.FULL
            ]
            response.headers["Allow"] = ", ".join(full) or "GET, HEAD"  # of a folder
        return response

    for kind in (ApiError, errors.RagKVError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)
