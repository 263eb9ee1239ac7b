"""GGUF files, unpacked once: transformers needs half a minute for each load of one, a second for
what is made here.

The unpacked model is a folder in the user's cache folder as transformers writes it: config,
tokenizer, weights. It is made whole or not at all, by one process while others wait, and its bytes
are checked at each load.
"""

import functools
import hashlib
import importlib
import json
import logging
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
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
# a word behind a space, as SentencePiece and byte-level BPE write it
WORD = re.compile("[\u2581\u0120][A-Za-z]{4,12}")
# WORDS of a vocabulary are looked up when a file is unpacked, which takes milliseconds.
WORDS = 200

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
        "form": 1,
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
    start = time.monotonic()
    log.warning("Unpacking %s (%.0f MB) once to %s ...", file.name, made_of["bytes"] / 1e6, folder)
    auto: Any = transformers.AutoModelForCausalLM
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with (
        _read_once(file) as kinds,
        TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as draft,
    ):
        narrow = torch.float16 if kinds <= {"F32", "F16"} else torch.bfloat16
        dtype = torch.float32 if kinds <= {"F32"} else narrow
        model, found = auto.from_pretrained(**source, dtype=dtype, output_loading_info=True)
        if missing := sorted(found["missing_keys"]):
            raise ValueError(f"{len(missing)} weights are missing, {missing[0]} first")
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
        _check_words(tokenizer)
        # The weights are plain now, and can be saved:
        model.config.__dict__.pop("quantization_config", None)
        for attribute in ("is_quantized", "hf_quantizer"):
            model.__dict__.pop(attribute, None)
        made = Path(draft) / "model"
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
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


def _check_words(tokenizer: Any) -> None:
    """Raise `ValueError` if the tokenizer splits words that are tokens of its own.

    transformers 5.17 reads Gemma's vocabulary so, without a word of warning: a prompt gets four
    times as many tokens.
    """
    ids = tokenizer.get_vocab()  # in another order on other processors
    tokens = [token for token in sorted(ids, key=ids.__getitem__) if WORD.fullmatch(token)][:WORDS]
    split = [
        token
        for token in tokens
        if len(tokenizer(f"a {token[1:]}", add_special_tokens=False).input_ids) > 2
    ]
    if len(split) > len(tokens) // 2:
        raise ValueError(
            f"transformers {transformers.__version__} reads its tokenizer wrongly: it splits "
            f"{len(split)} of "
            f"{len(tokens)} words that are tokens, such as {split[0][1:]!r}; try a newer version"
        )


@contextmanager
def _read_once(file: Path) -> Iterator[set[str]]:
    """Let transformers, which opens the file for each part anew, use one reader; the kinds of its
    tensors.
    """
    try:
        gguf: Any = importlib.import_module("gguf")
    except ImportError as error:
        raise MissingExtraError("gguf", "gguf", f"Loading {file.name}") from error

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        """Sees the file as a plain array: numpy's memmap is slow at the many small views of a
        vocabulary.
        """

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

    original = gguf.GGUFReader
    names = gguf.get_tensor_name_map
    reader = Reader(file)

    def read(path: Any, *rest: Any) -> Any:
        return reader if Path(path) == file else original(path, *rest)

    # transformers asks for each module
    gguf.GGUFReader, gguf.get_tensor_name_map = read, functools.cache(names)
    try:
        yield {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
    finally:
        gguf.GGUFReader = original
        gguf.get_tensor_name_map = names
