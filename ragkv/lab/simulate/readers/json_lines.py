"""JSON lines, plain or gzipped."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ragkv.errors import InputError


def json_lines(path: Path, *needed: str) -> Iterator[dict[str, Any]]:
    """The objects of a file, each with the `needed` fields; raises `InputError` naming file and line."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _object(path, number, line, needed)
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise InputError(f"The trace {path} cannot be read: {error}.") from error


def _object(path: Path, number: int, line: str, needed: tuple[str, ...]) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {number}: no JSON ({error}).") from error
    missing = [name for name in needed if not isinstance(value, dict) or name not in value]
    if missing:
        raise InputError(f"{path}, line {number}: lacks {', '.join(missing)}.")
    assert isinstance(value, dict)
    return value
