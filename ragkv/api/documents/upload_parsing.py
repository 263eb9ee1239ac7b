"""From the bytes of a request's body to documents: a JSON body, or a form with files.

Large bodies and all files are parsed in a killable process (`parser.py`), which has this module
loaded, and neither torch nor a web framework. A file name is a name, never a path, and no file is
written.
"""

import contextlib
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from io import BytesIO
from pathlib import Path, PurePosixPath

from pydantic import ValidationError
from python_multipart import FormParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, parse_options_header

from ragkv.errors import DocumentError, DocumentLimitError
from ragkv.retrieval import Document, ParseLimits, Passage, Splitter, load_bytes
from ragkv.retrieval.documents.files import has_loader
from ragkv.retrieval.documents.formats import KNOWN
from ragkv.runtime.body_errors import describe_errors

from ..bodies.documents import DocumentIn, DocumentsIn, GivenDocument
from ..errors import ApiError
from ..limits import check_at_most
from ..settings import LimitsConfig

with contextlib.suppress(ImportError):
    import pypdf  # noqa: F401 - an extra, loaded before the first upload so that it counts against no limit

MAX_NAME = 255
FORM = "multipart/form-data"
LIMIT_CODE = "document_limit"
_NOT_A_FORM = "A form must have files, and nothing else"
# The form's parser writes larger files to a disk: here none is.
_IN_MEMORY = {"MAX_MEMORY_FILE_SIZE": math.inf}


@dataclass(frozen=True, slots=True)
class Upload:
    """What is known of a body before it is parsed."""

    content_type: str
    limits: LimitsConfig
    # splits the documents in the process; None: they are split when they are stored
    splitter: Splitter | None = None


@dataclass(frozen=True, slots=True)
class Parsed:
    """The documents of an upload."""

    documents: list[Document]
    # by the documents' ids, if they are split
    passages: dict[str, list[Passage]] = field(default_factory=dict)
    split_by: str = ""  # the splitter's fingerprint


def parse_and_split(upload: Upload, body: bytes) -> Parsed:
    """The documents of one upload and their passages. Raises `ApiError`."""
    documents = parse_upload(upload, body)
    if (splitter := upload.splitter) is None:
        return Parsed(documents)
    passages = {document.id: splitter.split(document) for document in documents}
    return Parsed(documents, passages, splitter.fingerprint)


def parse_upload(upload: Upload, body: bytes) -> list[Document]:
    """The documents of a body. Raises `ApiError`, `DocumentError` and `MissingExtraError`."""
    documents: list[Document] = []
    chars = 0
    try:
        for document in _documents(upload, body):
            documents.append(document)
            chars += len(document.text)
            _check_number(len(documents), upload.limits)
            unit = "characters in all documents together (limits.upload_chars)"
            check_at_most(chars, upload.limits.upload_chars, "documents", unit, LIMIT_CODE)
            if not document.text.strip():
                message = f"Document {document.id[:80]!r} has no text."
                raise ApiError(400, message, param="documents")
    except DocumentLimitError as error:
        message = f"{error.problem}. Split it, or raise the server's setting limits.{error.limit}."
        raise ApiError(400, message, LIMIT_CODE, "documents") from error
    except ValidationError as error:
        message, param = describe_errors(error.errors(include_url=False, include_input=False))
        raise ApiError(400, message, param=param) from error
    return documents


def _documents(upload: Upload, body: bytes) -> Iterator[Document]:
    """The documents one by one, each within the limits of one document."""
    limits = ParseLimits(
        **{one.name: getattr(upload.limits, one.name) for one in fields(ParseLimits)}
    )
    kind, options = parse_options_header(upload.content_type)
    if kind.decode("latin-1").lower() == FORM:
        for name, data in _form_files(body, options.get(b"boundary", b""), upload.limits):
            yield from _file_documents(_checked_name(name), data, limits)
    else:
        for one in DocumentsIn.model_validate_json(body or b"null").documents:
            document = document_of(one)
            limits.check_document(f"document {document.id[:80]!r}", document)
            yield document


def document_of(given: DocumentIn) -> Document:
    """A document from JSON. Its default id is a digest of its text, so sending it again changes
    nothing.
    """
    digest = hashlib.blake2b(
        f"{given.title or ''}\0{given.text}".encode(), digest_size=12
    ).hexdigest()
    title = {} if given.title is None else {"title": given.title}
    return Document(
        given.id or f"doc-{digest}",
        given.text,
        given.title or "",
        {**(given.metadata or {}), **title},
    )


def _file_documents(name: str, data: bytes, limits: ParseLimits) -> Iterator[Document]:
    """The documents of a file. Their ids are the file's name; a JSON line may have its own."""
    if not data:
        raise ApiError(400, f"File {name[:80]!r} is empty.", param="files")
    folder = f"{Path.cwd()}/"  # loaders name documents by absolute paths
    for found in load_bytes(Path(name), data, limits=limits):
        if isinstance(found, DocumentError):
            raise found
        id = found.id.removeprefix(folder)
        GivenDocument.model_validate({"id": id, "text": found.text})  # as of a document in JSON
        yield replace(found, id=id, source=found.source.removeprefix(folder))


def _checked_name(given: str) -> str:
    """The last part of a file's name, without any path before it."""
    name = PurePosixPath(given.replace("\\", "/")).name.strip()
    if name in ("", ".", "..") or len(name) > MAX_NAME or not name.isprintable():
        raise ApiError(
            400, f"{given[:80]!r} is not a file name: 1 to {MAX_NAME} printable characters."
        )
    if not has_loader(Path(name)):
        message = (
            f"Files of type {Path(name).suffix[:20]!r} are not accepted: {name[:80]!r}. "
            f"Accepted: {KNOWN}."
        )
        raise ApiError(415, message, param="files")
    return name


def _check_number(documents: int, limits: LimitsConfig) -> None:
    check_at_most(
        documents, limits.documents, "documents", "documents (limits.documents)", LIMIT_CODE
    )


def _form_files(body: bytes, boundary: bytes, limits: LimitsConfig) -> list[tuple[str, bytes]]:
    """The names and contents of a form's files. Raises `ApiError` if it is no form, or holds
    anything else.
    """
    files: list[tuple[str, bytes]] = []
    ends: list[None] = []

    def refuse(_: Field) -> None:
        raise ApiError(400, f"{_NOT_A_FORM}.", param="files")

    def keep(file: File) -> None:
        _check_number(len(files) + 1, limits)
        assert isinstance(file.file_object, BytesIO)
        try:
            name = (file.file_name or b"").decode()
        except UnicodeDecodeError:
            raise ApiError(400, "The name of a file is not UTF-8.", param="files") from None
        files.append((name, file.file_object.getvalue()))

    try:
        parser = FormParser(
            FORM, refuse, keep, lambda: ends.append(None), boundary or None, config=_IN_MEMORY
        )
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise ApiError(400, f"{_NOT_A_FORM}: it cannot be parsed.", param="files") from error
    if not files or not ends:
        raise ApiError(400, f"{_NOT_A_FORM}.", param="files")
    return files
