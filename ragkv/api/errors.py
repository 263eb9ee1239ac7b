"""A request that is refused or failed: what the service raises.

The processes that parse uploads import this file, so it loads no web framework.
"""

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException

from ragkv.errors import RagKVError

# The status of a request whose client closed the connection: it appears in logs only.
CLIENT_GONE = 499

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "method_not_allowed",
    409: "conflict_error",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_error",
    CLIENT_GONE: "client_gone",
    503: "overloaded_error",
    504: "timeout_error",
    507: "insufficient_storage",
}


class ApiError(RagKVError, HTTPException):
    """A request that is refused or failed, with its HTTP status. FastAPI lets it pass while it
    reads a body, and the processes that parse uploads send it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`retry_after_s` becomes the Retry-After header; `headers` are added to the response."""
        super().__init__(status, message, headers)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        """OpenAI's name for errors of this status."""
        return _TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body of the error response."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def not_found(kind: str, name: str, param: str | None = None) -> ApiError:
    """404 for a `kind` of resource that the client named."""
    return ApiError(404, f"There is no {kind} {name[:200]!r}.", param=param)


def unknown_model(name: str, available: str, param: str | None = "model") -> ApiError:
    """404 for a model that this server does not serve."""
    message = f"There is no model {name[:80]!r} here; available: {available}."
    return ApiError(404, message, "model_not_found", param)


def invalid_key(message: str) -> ApiError:
    """401 for a request without a valid API key."""
    return ApiError(401, message, "invalid_api_key", headers={"www-authenticate": "Bearer"})
