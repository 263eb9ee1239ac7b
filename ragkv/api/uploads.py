"""Documents in a request's body: JSON, or files in a form. A file name is a name, never a path; no file is written."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.datastructures import UploadFile

from ragkv.errors import DocumentError
from ragkv.retrieval import LOADERS, Document

from .errors import ApiError, check_at_most
from .schemas import DocumentIn, DocumentPut, DocumentsIn
from .settings import LimitsConfig

MAX_NAME = 255


async def documents_in(request: Request, limits: LimitsConfig) -> list[Document]:
    """The documents of a request's body, JSON or a form with files; raises `ApiError` and validation errors."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        files = await _files(request, limits)
        documents = [document for name, data in files for document in _load(name, data)]
    else:
        documents = [document_of(given) for given in _parse(await request.body()).documents]
    check_at_most(len(documents), limits.documents, "documents", "documents")
    for document in documents:
        check_document(document, limits)
    return documents


def document_of(given: DocumentIn | DocumentPut, document_id: str | None = None) -> Document:
    """A document from JSON. Its default id is a digest of its text, so sending it again changes nothing."""
    found = document_id or getattr(given, "id", None)
    digest = hashlib.blake2b(f"{given.title or ''}\0{given.text}".encode(), digest_size=12).hexdigest()
    title = {} if given.title is None else {"title": given.title}
    return Document(found or f"doc-{digest}", given.text, given.title or "", {**(given.metadata or {}), **title})


def check_document(document: Document, limits: LimitsConfig) -> None:
    """Raise `ApiError` for a document that is too long, has no text, or has an unusable id."""
    shown = document.id[:80]
    check_at_most(len(document.text), limits.document_chars, "documents", f"characters in document {shown!r}")
    if not document.text.strip():
        raise ApiError(400, f"Document {shown!r} has no text.", param="documents")
    if not document.id or len(document.id) > MAX_NAME + 32 or any(ord(c) < 32 or ord(c) == 127 for c in document.id):
        raise ApiError(400, f"{shown!r} is not a document's id: up to 256 printable characters.", param="id")


async def _files(request: Request, limits: LimitsConfig) -> list[tuple[str, bytes]]:
    async with request.form(max_files=limits.documents, max_fields=limits.documents) as form:
        files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        if not files or len(files) != len(form.multi_items()):
            raise ApiError(400, "A form must have files, and nothing else.", param="files")
        return [(_checked_name(file.filename, limits), await file.read()) for file in files]


def _checked_name(given: str | None, limits: LimitsConfig) -> str:
    """The last part of a file's name, without any path before it."""
    name = PurePosixPath((given or "").replace("\\", "/")).name.strip()
    if name in ("", ".", "..") or len(name) > MAX_NAME or not name.isprintable():
        raise ApiError(400, f"{(given or '')[:80]!r} is not a file name: 1 to {MAX_NAME} printable characters.")
    suffix = Path(name).suffix.lower()
    if suffix not in limits.upload_types or suffix not in LOADERS:
        accepted = " ".join(kind for kind in limits.upload_types if kind in LOADERS)
        message = f"Files of type {suffix[:20]!r} are not accepted: {name[:80]!r}. Accepted: {accepted}."
        raise ApiError(415, message, param="files")
    return name


def _load(name: str, data: bytes) -> Iterator[Document]:
    """The documents of a file. Their ids are the file's name; a JSON line may have its own."""
    root = "/"
    for found in LOADERS[Path(name).suffix.lower()](Path(root + name), data, "utf-8"):
        if isinstance(found, DocumentError):
            raise found
        yield replace(found, id=found.id.removeprefix(root), source=found.source.removeprefix(root))


def _parse(body: bytes) -> DocumentsIn:
    try:
        return DocumentsIn.model_validate_json(body or b"null")
    except ValidationError as error:
        found: Sequence[Any] = error.errors(include_url=False, include_context=True)
        raise RequestValidationError(found) from error
