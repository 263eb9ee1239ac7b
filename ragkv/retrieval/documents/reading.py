"""Helpers of all loaders: limits, the text in a file's bytes, documents named after their file,
errors for broken files.

A loader names each part of a file that it could not read in the document's metadata, under `LOST`.
The outcome of the file and the answers of the API show these names.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

import webencodings

from ragkv.errors import DocumentError, DocumentLimitError, MissingExtraError

from ..ingested import Document
from .escapes import unescaped, with_letters, without_controls

# `AUTO` in place of an encoding has it guessed for text that is not UTF-8.
AUTO = "auto"
# The guess is made from the first `GUESS_BYTES` of a file.
GUESS_BYTES = 256 * 1024
# The encoding of most text that is not Unicode.
WESTERN = "cp1252"
# The name in a document's metadata of what could not be read, a list of sentences.
LOST = "lost"
# `NAMED_LOSSES` lost parts of a file are named, the others are counted.
NAMED_LOSSES = 5
# A file becomes at most `CHARS_PER_BYTE` characters for each of its bytes, unpacked. A table whose
# long column names stand in each row has up to 60. Text shrinks to a tenth when it is packed, so
# more than `CHARS_PER_PACKED_BYTE` are no text. Small files may become `LEAST_CHARS`.
CHARS_PER_BYTE = 64
CHARS_PER_PACKED_BYTE = 16 * CHARS_PER_BYTE
LEAST_CHARS = 200_000
# Python's own encodings, which no file declares. Punycode takes quadratic time.
NO_FILE_ENCODINGS = {"idna", "punycode", "raw_unicode_escape", "undefined", "unicode_escape"}
# Where a word may be broken, and where it was: at the end of a line. And marks within a text, as
# where two files were joined.
_NOT_SEEN = re.compile("\u00ad\n?|\ufeff")
# A byte order mark that stands in a text, as where two programs wrote one each.
MARK = "\ufeff"
# A longer mark comes before the one that it begins with.
BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True, slots=True)
class ParseLimits:
    """How much a file may make a loader do; `None`: any amount. A small file can hold much: PDF
    pages share a stream.

    Time and memory are limited by killing the process that parses.
    """

    document_chars: int | None = None  # characters of one document
    # characters of one document's metadata, as JSON, and of its source
    metadata_chars: int | None = None
    nesting: int | None = None  # depth of JSON values
    # unpacked contents of a file; a stream that PDF pages share counts each time
    inflated_bytes: int | None = None

    def check(self, limit: str, amount: int, what: str) -> None:
        """Raise `DocumentLimitError` if `amount` is above the limit of that name. `what` says whose
        amount it is.
        """
        most: int | None = getattr(self, limit)
        if most is not None and amount > most:
            raise DocumentLimitError(f"{what} is above the limit of {most} ({limit})", limit)

    def check_document(self, name: str, document: Document) -> None:
        """Raise `DocumentLimitError` if the document that is called `name` has too much text or
        metadata.
        """
        self.check("document_chars", len(document.text), f"{name}: the number of characters")
        if self.nesting is not None:
            self.check(
                "nesting",
                _depth(document.metadata, self.nesting + 1),
                f"{name}: the nesting of its metadata",
            )
        if self.metadata_chars is not None:
            chars = len(json.dumps(document.metadata, ensure_ascii=False)) + len(document.source)
            self.check("metadata_chars", chars, f"{name}: the size of its metadata in characters")


UNLIMITED = ParseLimits()


@dataclass(frozen=True, slots=True)
class FileContent:
    """A file as its loader gets it."""

    path: Path
    data: bytes
    # overrules what the file declares; `None`: what it declares, or else UTF-8
    encoding: str | None = None
    limits: ParseLimits = UNLIMITED

    def text(self, declared: str | None = None, *, of_program: bool = False) -> str:
        """The file as its reader sees it, in its own encoding, in `encoding`, or in the one that
        it `declared`.

        Escapes such as `\\u00e9` become letters: all of them in the text `of_program` or for one;
        in text for people, which may be about escapes, only those that are surely meant.
        """
        text = without_controls(decode(str(self.path), self.data, self.encoding, declared))
        return with_letters(unescaped(text, of_program))

    def bounded(self, texts: Iterable[str], size_bytes: int | None = None) -> Iterator[str]:
        """Yield `texts`. Raises `DocumentLimitError` once they are longer than the file allows.

        A small file can name a long text a thousand times. `size_bytes` is the size of the file
        when it is unpacked; `None`: it is not packed.
        """
        most = CHARS_PER_BYTE * len(self.data)
        if size_bytes is not None:
            most = min(CHARS_PER_BYTE * size_bytes, CHARS_PER_PACKED_BYTE * len(self.data))
        most = max(LEAST_CHARS, most)
        if self.limits.document_chars is not None:
            most = min(most, self.limits.document_chars)
        chars = 0
        for text in texts:
            chars += len(text)
            if chars > most:
                raise DocumentLimitError(
                    f"{self.path} holds more than {most} characters of text, which is the most "
                    "for a document of its size (document_chars)",
                    "document_chars",
                )
            yield text

    def document(
        self, text: str | Sequence[str], metadata: Mapping[str, Any], lost: Sequence[str] = ()
    ) -> Document:
        """The only document of the file, of a text or of the texts of its pages; its id is the
        absolute path.

        Raises `DocumentError` if there is no text.
        """
        pages = [text] if isinstance(text, str) else list(text)
        starts: tuple[int, ...] = ()
        if isinstance(text, str):  # it stays as it is, with the white space around it
            cleaned = clean(text)
        else:
            cleaned, starts = _joined(list(map(clean, pages)))
        if not cleaned.strip():
            why = f": {lost[0]}" if lost else ""
            raise DocumentError(
                f"{self.path} holds no text that can be read{why}. Are these pictures? Remove or "
                "skip it."
            )
        path = str(self.path.absolute())
        losses = [*lost]
        if halves := cleaned.count("\ufffd") - sum(page.count("\ufffd") for page in pages):
            losses.append(f"{halves} characters are no text and stand as \ufffd")
        if len(losses) > NAMED_LOSSES:
            losses[NAMED_LOSSES:] = [f"and {len(losses) - NAMED_LOSSES} more parts"]
        told = {LOST: [clean(loss) for loss in losses]} if losses else {}
        named = {
            name: clean(value) if isinstance(value, str) else value
            for name, value in metadata.items()
            if value
        }
        return Document(path, cleaned, path, {**named, **told}, starts)

    @contextmanager
    def parsing(self, kind: str) -> Iterator[None]:
        """Turns whatever a parser raises on a broken file into one `DocumentError`; parsers raise
        many kinds.
        """
        try:
            yield
        except (DocumentError, DocumentLimitError, MissingExtraError, MemoryError):
            raise
        except Exception as error:
            message = (
                f"Cannot read {self.path} as {kind}: {_why(error)}. Is it complete, and "
                "not encrypted?"
            )
            raise DocumentError(message) from error

    def need(self, module: str, package: str, extra: str) -> Any:
        """An optional library. Raises `MissingExtraError`."""
        try:
            return import_module(module)
        except ImportError as error:
            raise MissingExtraError(package, extra, f"Reading {self.path}") from error


@dataclass(slots=True)
class Once:
    """Reads each part of a file once, also if the file names it again and again. Programs do not
    write such files, and a small one would take the time of a large one.
    """

    lost: list[str]
    _read: dict[str, str] = field(default_factory=dict)  # a part of the file -> its name

    def was_read(self, key: str, name: str) -> bool:
        """Whether the part was read before, which is noted in `lost`."""
        first = self._read.get(key)
        if first is None:
            self._read[key] = name
            return False
        self.lost.append(f"{name}, which is {first} once more")
        return True


# what a loader could read, and why it could not read the rest
Loaded = Iterator[Document | DocumentError]
Loader = Callable[[FileContent], Loaded]


@contextmanager
def part(lost: list[str], name: str) -> Iterator[None]:
    """Whatever is wrong with the part `name` of a file costs this part: it is noted in `lost`."""
    try:
        yield
    except (DocumentLimitError, MemoryError):
        raise
    except Exception as error:
        lost.append(f"{name}: {_why(error)}")


def _joined(pages: list[str]) -> tuple[str, tuple[int, ...]]:
    """The texts of pages as one, and where each begins. Pages without text at the end are
    left out.
    """
    while pages and not pages[-1].strip():
        pages.pop()
    texts = [f"{page.strip()}\n\n" for page in pages]
    starts = tuple(accumulate(map(len, texts[:-1]), initial=0))
    return "".join(texts).rstrip(), starts if texts else ()


def clean(text: str) -> str:
    """`text` without control characters, soft hyphens and marks of byte order, with letters for the
    escapes of JSON, and with U+FFFD for each half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return _NOT_SEEN.sub("", unescaped(without_controls(text), of_program=False))


def codec_of(label: str) -> str | None:
    """Python's codec for an encoding's name on the web, or for its own name; `None` if both know
    none.

    On the web old names mean larger encodings, such as "iso-8859-1" for windows-1252.
    """
    label = label.strip().strip("\"'")
    known = webencodings.lookup(label)
    try:
        found = codecs.lookup(label) if known is None else known.codec_info
        " ".encode(found.name)  # raises for codecs that are not for text, such as "hex"
    except (LookupError, ValueError):
        return None
    if found.name.replace("-", "_") in NO_FILE_ENCODINGS:
        return None
    return {"gbk": "gb18030"}.get(found.name, found.name)


def marked_encoding(data: bytes) -> str | None:
    """The encoding that a byte order mark names, or `None`."""
    return next((encoding for mark, encoding in BYTE_ORDER_MARKS if data.startswith(mark)), None)


def decode(name: str, data: bytes, encoding: str | None, declared: str | None = None) -> str:
    """The text of `data`, its line ends as "\\n". A byte order mark overrules `encoding`, that
    overrules `declared`.
    """
    given = encoding if encoding != AUTO else None
    codec = marked_encoding(data) or codec_of(given or declared or "")
    if codec is None and given:
        raise DocumentError(
            f"{name}: unknown encoding {given!r}. Name another with --encoding, or let {AUTO} "
            "guess it."
        )
    if codec is None:  # nothing is declared that is known
        codec = _guess(name, data) if encoding == AUTO else "utf-8"
    if b"\0" in data and "16" not in codec and "32" not in codec:
        raise DocumentError(
            f"{name} looks binary: zero byte at offset {data.index(0)}. Convert it to text, or "
            "skip it."
        )
    try:
        text = data.decode(codec)
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"{name} is not {codec}: byte {data[error.start]:#04x} at offset {error.start}. "
            f"Name its encoding (latin-1, or {AUTO} to guess it; --encoding on the command "
            "line), or make it UTF-8."
        ) from error
    return text.lstrip(MARK).replace("\r\n", "\n").replace("\r", "\n")


def _guess(name: str, data: bytes) -> str:
    """UTF-8 if the bytes are valid, else the best guess of charset-normalizer; the most common one
    of equal guesses.
    """
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        import charset_normalizer

        guesses = charset_normalizer.from_bytes(data[:GUESS_BYTES])
        best = guesses.best()
        if best is None:
            message = (
                f"{name}: no encoding fits its first bytes. Is it text? Name its encoding: "
                "--encoding latin-1."
            )
            raise DocumentError(message) from None
        equal = [
            guess
            for guess in guesses
            if (guess.chaos, guess.coherence) == (best.chaos, best.coherence)
        ]
        names = {name for guess in equal for name in (guess.encoding, *guess.could_be_from_charset)}
        return WESTERN if WESTERN in names else best.encoding
    return "utf-8"


def _why(error: Exception) -> str:
    return " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__


def _depth(value: Any, most: int) -> int:
    """How many objects and lists lie inside each other; counts no further than `most`."""
    inner = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple)
        else None
    )
    return (
        0
        if inner is None or not most
        else 1 + max((_depth(one, most - 1) for one in inner), default=0)
    )
