"""Measurements in one JSON file: an object with one value per key. A write replaces the whole file."""

import json
import logging
from pathlib import Path
from typing import Any

from ragkv.runtime import make_private_folder, replace_file

log = logging.getLogger(__name__)


def read(path: Path) -> dict[str, Any]:
    """The values in `path`, none if there is no such file; raises `ValueError` if it is not a JSON object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a JSON object")  # noqa: TRY004 - the file is wrong, not a type in the program
    return values


def save(path: Path, key: str, value: Any) -> Path:
    """Set `key` in `path` to `value`; an unreadable file is replaced with a warning."""
    make_private_folder(path.parent)
    try:
        values = read(path)
    except ValueError as error:
        log.warning("%s: it is replaced.", error)
        values = {}
    replace_file(path, (json.dumps({**values, key: value}, indent=1) + "\n").encode())
    return path
