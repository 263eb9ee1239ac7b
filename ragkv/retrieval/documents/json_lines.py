"""JSON lines: one document a line. A bad line is left out, and the others are read."""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ragkv.errors import DocumentError

from ..ingested import Document
from .reading import AUTO, FileContent, Loaded, clean, decode, marked_encoding


def load_jsonl(content: FileContent) -> Loaded:
    """One document per line: `{"id": ..., "text": ..., "metadata": {...}}`; other keys become
    metadata.

    An id counts within its file, so that no file replaces what another one holds: "one" in a.jsonl
    is the document "a.jsonl/one". No other file can have this name.
    """
    # id -> what the first line with it holds, and the number of this line
    seen: dict[str, tuple[str, int]] = {}
    for number, line in enumerate(_lines(content), start=1):
        if not line.strip():
            continue
        try:
            document = _from_json(
                content, decode("it", line, None) if isinstance(line, bytes) else line, number
            )
            found = (document.content_hash(), number)
            first, before = seen.setdefault(document.id, found)
            if first != found[0]:
                name = document.id.removeprefix(f"{content.path.absolute()}/")
                raise DocumentError(f"line {before} has the id {name!r}, too. Give each its own.")
        except DocumentError as error:
            yield DocumentError(f"{content.path}, line {number}: {error}")
        else:
            yield replace(document, text=clean(document.text))


def _lines(content: FileContent) -> Iterable[str | bytes]:
    """The lines as text, or as bytes if not all of them are UTF-8."""
    try:
        return content.text().split("\n")
    except DocumentError:
        if content.encoding not in (None, AUTO) or marked_encoding(content.data):
            raise
        return content.data.split(b"\n")


def _from_json(content: FileContent, line: str, number: int) -> Document:
    try:
        record = json.loads(line, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise _bad(f"not JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        raise _bad(f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise _bad(f"a JSON {type(record).__name__}, not an object")
    text = record.pop("text", None)
    if not isinstance(text, str) or not text.strip():
        raise _bad(f"`text` is {text!r:.80}, not a text")
    given = record.pop("id", None)
    source = record.pop("source", None)
    metadata = record.pop("metadata", None) or {}
    if given is not None and (isinstance(given, bool) or not isinstance(given, str | int)):
        raise _bad(f"`id` is {given!r}, neither a string nor an integer")
    if not isinstance(metadata, dict):
        raise _bad(f"`metadata` is {metadata!r:.80}, not an object")
    path = str(content.path.absolute())
    document_id = f"{path}/line {number}" if given is None else f"{path}/{given}"
    return Document(
        document_id, text, path if source is None else str(source), {**record, **metadata}
    )


def _bad(why: str) -> DocumentError:
    return DocumentError(f'{why}. Each line is {{"id": ..., "text": ..., "metadata": ...}}.')


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number")
