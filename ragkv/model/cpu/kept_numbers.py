"""Measured numbers that outlive a process: small files in the user's cache folder, one for each thing measured.

A file that cannot be read or written is no error: then the thing is measured again.
"""

import hashlib
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ragkv.runtime import make_private_folder, replace_file

log = logging.getLogger(__name__)


def folder() -> Path:
    """Where the files are: `ragkv/speeds` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ragkv" / "speeds"


def read(subject: Mapping[str, Any], count: int) -> tuple[tuple[float, float], ...] | None:
    """The `count` pairs of positive numbers kept for `subject`; `None` if there are none."""
    try:
        values = json.loads(_file(subject).read_text(encoding="utf-8"))
        pairs = tuple((float(one), float(other)) for one, other in values["pairs"])
        same = values["subject"] == dict(subject)
    except (OSError, RuntimeError, ValueError, TypeError, KeyError):
        return None
    usable = len(pairs) == count and all(math.isfinite(n) and n > 0 for pair in pairs for n in pair)
    return pairs if usable and same else None


def keep(subject: Mapping[str, Any], pairs: Sequence[tuple[float, float]]) -> None:
    """Keep `pairs` for `subject`."""
    try:
        file = _file(subject)
        make_private_folder(file.parent)
        replace_file(file, (json.dumps({"subject": dict(subject), "pairs": pairs}, indent=1) + "\n").encode())
    except (OSError, RuntimeError) as error:  # no home folder, a read-only one, a full disk
        log.debug("Measured speeds are not kept: %s.", error)


def _file(subject: Mapping[str, Any]) -> Path:
    name = hashlib.blake2b(json.dumps(dict(subject), sort_keys=True).encode(), digest_size=12).hexdigest()
    return folder() / f"{name}.json"
