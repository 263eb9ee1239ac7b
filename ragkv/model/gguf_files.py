"""Unpacks GGUF files once. transformers needs half a minute to load a GGUF file, and a second to
load the folder that is made here.

The unpacked model is a folder in the user's cache folder as transformers writes it: config,
tokenizer, weights. The grids of four-bit weights are next to them. The folder is made whole or not
at all, by one process while others wait. Its bytes are checked at each load.
"""

import glob
import hashlib
import importlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import xxhash
from filelock import FileLock

from ragkv.errors import MissingExtraError
from ragkv.runtime import (
    cache_folder,
    make_private_folder,
    only_owner_writes,
    replace_file,
)

# What an unpacked model says of itself: the file it was made of, and the digests of its own files.
MANIFEST = "unpacked.json"
# The grids of weights in four bits, if there are any. vLLM takes every `*.safetensors` of a model's
# folder for weights, so this safetensors file has another ending.
GRIDS = "four-bit.grids"
UNPACKER = "ragkv.model.gguf_unpacking"
FORM = 3  # A folder that was written in another form is made again.

log = logging.getLogger(__name__)
# Folders whose bytes this process has checked: a load asks for config, tokenizer and weights one
# after another.
_checked: set[tuple[Path, str]] = set()


def unpacked(file: Path) -> Path:
    """The folder with the model of a GGUF file, made now if it is not there or no longer what was
    written.

    Weights of fewer than 16 bits become bfloat16, which rounds them by less than an eighth of what
    eight bits did; float32 and 16-bit weights keep their dtype. Raises `MissingExtraError`, what
    transformers raises for a file that it cannot read, and `OSError`.
    """
    stat = file.stat()
    made_of = {
        "file": str(file.resolve()),
        "bytes": stat.st_size,
        "changed_ns": stat.st_mtime_ns,
        "form": FORM,
    }
    folder = (
        cache_folder("models")
        / f"{file.stem}-{xxhash.xxh3_64_hexdigest(str(file.resolve()).encode())}"
    )
    if _is_whole(folder, made_of):
        return folder
    make_private_folder(folder.parent)
    with FileLock(f"{folder}.lock"):
        if not _is_whole(folder, made_of):  # another process may have made it meanwhile
            _unpack(file, folder, made_of)
    return folder


def _is_whole(folder: Path, made_of: dict[str, Any]) -> bool:
    try:
        if not only_owner_writes(folder.parent, folder, *folder.iterdir()):
            log.warning(
                "Others may write to %s or what is in it: it is not used, and unpacked again.",
                folder,
            )
            return False
        text = (folder / MANIFEST).read_text()
        manifest = json.loads(text)
        if manifest["made_of"] != made_of or not all(
            (folder / name).is_file() for name in manifest["digests"]
        ):
            return False
        if (folder, text) not in _checked and manifest["digests"] != _digests(
            folder, manifest["digests"]
        ):
            return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    _checked.add((folder, text))
    return True


def _digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        with (folder / name).open("rb") as opened:
            found[name] = hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()
    return found


def _unpack(file: Path, folder: Path, made_of: dict[str, Any]) -> None:
    try:
        importlib.import_module("gguf")
    except ImportError as error:
        raise MissingExtraError("gguf", "gguf", f"Loading {file.name}") from error
    for left in folder.parent.glob(f"{glob.escape(folder.name)}.*/"):
        shutil.rmtree(left, ignore_errors=True)  # of a process that was killed meanwhile
    start = time.monotonic()
    log.warning("Unpacking %s (%.0f MB) once to %s ...", file.name, made_of["bytes"] / 1e6, folder)
    with TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as draft:
        made = Path(draft) / "model"
        _run(file, made, Path(draft) / "reason")
        manifest = {
            "made_of": made_of,
            "digests": _digests(made, sorted(each.name for each in made.iterdir())),
        }
        replace_file(made / MANIFEST, json.dumps(manifest, indent=1).encode())
        for each in made.iterdir():
            each.chmod(0o600)
        made.chmod(0o700)
        if folder.is_symlink():
            folder.unlink()
        shutil.rmtree(folder, ignore_errors=True)
        made.replace(folder)
    log.warning("Unpacked %s in %.0f s.", file.name, time.monotonic() - start)


def _run(file: Path, made: Path, reason: Path) -> None:
    """Let a process of its own unpack `file` to the folder `made`. Raises `ValueError` if it cannot
    be read.
    """
    command = (sys.executable, "-m", UNPACKER, str(file), str(made), str(reason))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # it warns of nothing that a user could mend
    ended = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if ended.returncode:
        if reason.is_file():
            raise ValueError(reason.read_text(encoding="utf-8"))
        last = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ValueError(
            f"the process that unpacked it ended with status {ended.returncode}; {last}"
            if last
            else f"the process that unpacked it ended with status {ended.returncode}, as for want "
            "of memory"
        )
