"""What all loaders use: the text in a file's bytes, documents named after their file, one error for broken files."""

import codecs
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ragkv.errors import DocumentError, DocumentLimitError, MissingExtraError

from ..values import Document
from .limits import ParseLimits

AUTO = "auto"  # the encoding is guessed for text that is not UTF-8
GUESS_BYTES = 256 * 1024  # the guess is made from the start of a file
WESTERN = "cp1252"  # the encoding of most text that is not Unicode
# A longer mark comes before the one that it begins with.
BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

Loaded = Iterator[Document | DocumentError]  # what a loader could read, and why it could not read the rest
Loader = Callable[[Path, bytes, str, ParseLimits], Loaded]  # file, its bytes, the encoding to assume, limits


def document_of(file: Path, text: str, metadata: dict[str, Any], page_starts: tuple[int, ...] = ()) -> Document:
    """The only document of a file. Its id is the file's absolute path."""
    path = str(file.absolute())
    return Document(id=path, text=text, source=path, metadata=metadata, page_starts=page_starts)


def marked_encoding(data: bytes) -> str | None:
    """The encoding that a byte order mark names, or `None`."""
    return next((encoding for mark, encoding in BYTE_ORDER_MARKS if data.startswith(mark)), None)


def decode(file: Path, data: bytes, encoding: str) -> str:
    """The text of `data` with line ends as "\\n"; a byte order mark overrides `encoding`."""
    encoding = marked_encoding(data) or (_guess(file, data) if encoding == AUTO else encoding)
    if b"\0" in data and "16" not in encoding and "32" not in encoding:
        position = data.index(0)
        raise DocumentError(f"{file} looks binary: zero byte at offset {position}. Convert it to text, or skip it.")
    try:
        text = data.decode(encoding)
    except LookupError as error:
        message = f"{file}: unknown encoding {encoding!r}. Name one Python knows, such as latin-1, or {AUTO}."
        raise DocumentError(message) from error
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"{file} is not {encoding}: byte {data[error.start]:#04x} at offset {error.start}. "
            f"Name its encoding (latin-1, or {AUTO} to guess it; --encoding on the command line), or make it UTF-8."
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _guess(file: Path, data: bytes) -> str:
    """UTF-8 if the bytes are valid, else the best guess of charset-normalizer; the most common one of equal guesses."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        import charset_normalizer

        guesses = charset_normalizer.from_bytes(data[:GUESS_BYTES])
        best = guesses.best()
        if best is None:
            message = f"{file}: no encoding fits its first bytes. Is it text? Name its encoding: --encoding latin-1."
            raise DocumentError(message) from None
        equal = [guess for guess in guesses if (guess.chaos, guess.coherence) == (best.chaos, best.coherence)]
        names = {name for guess in equal for name in (guess.encoding, *guess.could_be_from_charset)}
        return WESTERN if WESTERN in names else best.encoding
    return "utf-8"


@contextmanager
def parsing(file: Path, kind: str) -> Iterator[None]:
    """Turns whatever a parser raises on a broken file into one `DocumentError`; parsers raise many kinds."""
    try:
        yield
    except (DocumentError, DocumentLimitError, MissingExtraError, MemoryError):
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise DocumentError(f"Cannot read {file} as {kind}: {why}. Is it complete, and not encrypted?") from error
