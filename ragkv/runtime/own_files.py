"""Small JSON files that this program writes for itself. Pure Python.

A file that was damaged is moved aside with a sentence in the log, so that nothing reads it twice
and nothing of it is lost.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ragkv.errors import RagKVError

log = logging.getLogger(__name__)

T = TypeVar("T")

# What reading a damaged file may raise: it is no JSON, is nested too deeply, or has other types.
DAMAGED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RagKVError,
    RecursionError,
    TypeError,
    ValueError,
)


def read_own(path: Path, parse: Callable[[Any], T]) -> T | None:
    """What `parse` makes of the JSON in `path`; `None` without such a file, or if it is damaged.

    `parse` raises one of `DAMAGED` for values that are wrong. Raises `OSError`.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        values = json.loads(data)
        json.dumps(values, ensure_ascii=False).encode()  # half a character is in no file of ours
        return parse(values)
    except DAMAGED as error:
        aside = path.with_name(f"{path.name}.damaged")
        try:
            path.replace(aside)
        except OSError:
            aside = path  # the folder cannot be written
        log.warning("%s is damaged (%.200s). It is not used, and lies at %s.", path, error, aside)
        return None
