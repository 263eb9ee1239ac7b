"""Request bodies: their type, their size, and how many JSON values they have."""

import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Scope

from ..errors import ApiError
from ..settings import LimitsConfig

# Bodies of these paths are JSON or forms, and are parsed in processes of their own.
_UPLOAD_PATHS = re.compile(r"/v1/collections/[^/]+/documents/?")


def count_values(body: bytes) -> int:
    """About how many values a JSON text holds, commas in strings included: a fast bound of the work
    of parsing it.
    """
    return body.count(b",") + body.count(b"[") + body.count(b"{")


def bounded(scope: Scope, receive: Receive, limits: LimitsConfig) -> Receive:
    """`receive` for a body within the limits; both raise `ApiError` for one above them, or of a
    wrong type.

    nginx has the whole body before it arrives here, so no time is bounded. Bytes are counted all
    the same, whatever content length was announced, because on loopback nginx may not be there.
    """
    headers = MutableHeaders(scope=scope)
    holds_documents = _UPLOAD_PATHS.fullmatch(scope["path"]) is not None
    setting = (
        "body_bytes" if holds_documents or limits.body_bytes <= limits.json_bytes else "json_bytes"
    )
    size = 0
    values = 0
    most = getattr(limits, setting)

    def check(size: int) -> None:
        if size > most:
            raise _too_large(f"is larger than {most} bytes (limits.{setting})")
        if values > limits.json_values:
            raise _too_large(
                f"has more than {limits.json_values} commas and opening brackets "
                "(limits.json_values)"
            )

    async def receive_counted() -> Message:
        nonlocal size, values
        message = await receive()
        piece = message.get("body", b"")
        size += len(piece)
        values += 0 if holds_documents else count_values(piece)
        check(size)
        return message

    announced = headers.get("content-length", "0")
    check(int(announced[:20]) if announced.isdigit() else 0)
    if announced != "0" or "transfer-encoding" in headers:
        if _is_curl(scope["path"], headers):
            headers["content-type"] = "application/json"
        _check_type(headers.get("content-type", ""), holds_documents)
    return receive_counted


def _too_large(problem: str) -> ApiError:
    message = f"The body {problem}. Send less at a time."
    # the rest of it is not read
    return ApiError(413, message, "body_too_large", headers={"connection": "close"})


def _is_curl(path: str, headers: Headers) -> bool:
    """Whether this is `curl -d` at Ollama's API, whose documentation leaves the content type out.

    A web page can send a form, too; but a browser says where it comes from.
    """
    kinds = ("", "application/x-www-form-urlencoded")
    of_browser = "origin" in headers or "sec-fetch-site" in headers
    return path.startswith("/api/") and headers.get("content-type", "") in kinds and not of_browser


def _check_type(content_type: str, takes_forms: bool) -> None:
    """Raise `ApiError` 415 unless the body is JSON, or a form where files are uploaded.

    A foreign web page cannot send JSON without the server's consent (CORS), but it can send forms.
    """
    kind, *parameters = (part.strip().lower() for part in content_type.split(";"))
    charsets = [p.partition("=")[2].strip('"') for p in parameters if p.startswith("charset=")]
    is_json = kind == "application/json" and all(
        charset in ("utf-8", "utf8") for charset in charsets
    )
    if not is_json and not (takes_forms and kind == "multipart/form-data"):
        accepted = "application/json (UTF-8)" + (" or multipart/form-data" if takes_forms else "")
        raise ApiError(
            415, f"The content type {content_type[:100]!r} is not accepted here; send {accepted}."
        )
