"""Documents in a request's body, JSON or files in a form: received within limits, parsed outside this process."""

import asyncio

from fastapi import Request

from ragkv.retrieval import Document, ParseLimits

from ..errors import ApiError
from ..keys import Principal
from ..settings import LimitsConfig
from ..work import consume_exception, unless_disconnected
from .parser import DocumentParser
from .upload_parsing import FORM, Upload, UploadError, parse_upload

SMALL_BYTES = 1 << 16  # a JSON body up to this size is parsed here, faster than its way to a process and back


async def documents_in(
    request: Request,
    parser: DocumentParser,
    limits: LimitsConfig,
    principal: Principal,
    document_id: str | None = None,
) -> list[Document]:
    """The documents of a request's body; with `document_id`, the one document that it is. Raises `ApiError`."""
    upload = _upload(request, limits, document_id)
    try:
        if _is_small_json(request):
            return parse_upload(upload, await _body(request))
        async with parser.place(principal.tenant):
            parsing = asyncio.ensure_future(parser.parse(upload, await _body(request)))
            parsing.add_done_callback(consume_exception)
            try:
                return await unless_disconnected(request, parsing)
            finally:
                parsing.cancel()
                await asyncio.wait({parsing})
    except UploadError as error:
        raise ApiError(error.status, error.message, error.code, error.param) from error


def _upload(request: Request, limits: LimitsConfig, document_id: str | None) -> Upload:
    one = ParseLimits(
        document_chars=limits.document_chars,
        metadata_chars=limits.metadata_chars,
        lines=limits.lines,
        nesting=limits.nesting,
        pages=limits.pages,
        inflated_bytes=limits.inflated_bytes,
    )
    kind = request.headers.get("content-type", "")
    return Upload(kind, document_id, limits.upload_types, limits.documents, limits.upload_chars, one)


async def _body(request: Request) -> bytes:
    """The body. `request.body()` would keep it until the documents are stored."""
    return b"".join([piece async for piece in request.stream()])


def _is_small_json(request: Request) -> bool:
    size = request.headers.get("content-length", "")
    is_form = request.headers.get("content-type", "").lower().startswith(FORM)
    return not is_form and size.isdigit() and int(size[:20]) <= SMALL_BYTES
