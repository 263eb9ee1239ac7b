"""Every failure as the client sees it: OpenAI's shape, a status that says whose turn it is, and nothing private.

`ApiError` is what this room raises by itself. Everything else is mapped here: the tree of `ragkv.errors`, what
validation finds, what the framework raises, and what nobody foresaw, which is logged and not shown.
"""

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from ragkv import errors

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1  # where nothing better is known
CLIENT_GONE = 499  # nobody reads it; it stands in logs

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "method_not_allowed",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_error",
    CLIENT_GONE: "client_gone",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorDetail(BaseModel):
    """What went wrong."""

    model_config = ConfigDict(title="ErrorDetail")

    message: str = Field(description="What happened, the values, and what to do.")
    type: str = Field(description="The kind of error; one for each status.")
    param: str | None = Field(description="The field of the request that it is about, if it is about one.")
    code: str | None = Field(description="A finer distinction for programs, where there is one.")


class ErrorBody(BaseModel):
    """Every error's body."""

    error: ErrorDetail


class ApiError(Exception):
    """A request that is refused or failed, with its status."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str | None = None,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`type` left out is the status's; `headers` are sent along."""
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.type = type or type_of(status)
        self.retry_after_s, self.headers = retry_after_s, headers

    @property
    def body(self) -> dict[str, Any]:
        """The body that says so."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        """The response that says so."""
        headers = dict(self.headers or {})
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, round(self.retry_after_s)))
        return JSONResponse(self.body, self.status, headers)


def type_of(status: int) -> str:
    """The type of an error of that status."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def not_found(what: str, name: str, param: str | None = None, code: str | None = None) -> ApiError:
    """404 for something the caller named."""
    return ApiError(404, f"There is no {what} {name[:200]!r}.", code=code, param=param)


def as_api_error(error: BaseException) -> ApiError:
    """`error` as the client is told of it; what is nobody's but ours is logged and becomes a bare 500."""
    if isinstance(error, ApiError):
        return error
    text = str(error)
    match error:
        case errors.PromptTooLongError():
            return ApiError(400, text, code="context_length_exceeded")
        case errors.UnsupportedError():
            return ApiError(400, text, code="unsupported_value")
        case errors.InputError() | errors.ConfigError() | errors.DocumentError() | errors.MissingExtraError():
            return ApiError(400, text)
        case errors.QueueFullError():
            return ApiError(503, text, code="queue_full", retry_after_s=RETRY_AFTER_S)
        case errors.DeadlineError():
            return ApiError(504, text, code="deadline_exceeded")
        case errors.CancelledError():
            return ApiError(CLIENT_GONE, text)
        case errors.SessionConflictError():
            return ApiError(409, text, code="session_conflict")
        case errors.SessionUnavailableError():
            return ApiError(503, text, code="session_unavailable", retry_after_s=RETRY_AFTER_S)
        case errors.StoreLockedError():
            return ApiError(503, text, code="store_locked", retry_after_s=RETRY_AFTER_S)
        case RequestValidationError():
            return _invalid(error)
        case HTTPException():
            detail = error.detail if isinstance(error.detail, str) else _phrase(error.status_code)
            return ApiError(error.status_code, _sentence(detail), headers=error.headers)
    log.error("request_failed", exc_info=error)
    return ApiError(500, "The server failed to answer; its log says why, under this request's id.")


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What OpenAPI is told of the errors an endpoint may answer with; those every endpoint may are included."""
    common = {400, 401, 403, 408, 413, 415, 429, 500, 503, 504}
    return {status: {"model": ErrorBody, "description": _phrase(status)} for status in sorted({*common, *statuses})}


def install(app: FastAPI) -> None:
    """Have `app` answer every failure in this shape."""

    async def handle(_: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response

    for kind in (ApiError, errors.RagKVError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)


def _invalid(error: RequestValidationError) -> ApiError:
    """400 that names the first field that is wrong, and how many more are."""
    found = error.errors()
    first = found[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not JSON: {first.get('ctx', {}).get('error', 'it does not parse')}.")
    place = [str(step) for step in first["loc"] if _is_field(step)]
    param = ".".join(place) or None
    what = (
        "Unknown field; leave it out"
        if first["type"] == "extra_forbidden"
        else str(first["msg"]).removeprefix("Value error, ")
    )
    more = f" ({len(found) - 1} more)" if len(found) > 1 else ""
    return ApiError(400, f"{param or 'The body'}: {what}.{more}", param=param)


def _is_field(step: str | int) -> bool:
    """Whether a step of a validation error's place is the request's own, not a name of one of several types."""
    of_types = ("body", "query", "path", "header", "constrained-str", "str", "int", "float", "bool")
    return isinstance(step, int) or (step not in of_types and "[" not in step)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


__all__ = ["CLIENT_GONE", "ApiError", "ErrorBody", "as_api_error", "install", "not_found", "responses", "type_of"]
