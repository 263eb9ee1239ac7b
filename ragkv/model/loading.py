"""Loading a model and its tokenizer: a local folder, a hub id, or `"reader"`, the one that ships with the package."""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ragkv.errors import ConfigError, ModelNotFoundError

from .probe import refuse_unsupported
from .promptkv import KVShape
from .shapes import SHAPES, shape_config

READER = Path(__file__).parent / "reader"
READER_UNKNOWN = "unknown"  # its answer where it finds none
READER_NOTE = (
    "the bundled reader found no answer; it reads invented worlds such as examples/corpus and no other documents: give "
    "the folder or hub id of a language model"
)


def load(name: str | os.PathLike[str], device: str, dtype: str) -> tuple[Any, Any | None]:
    """A causal LM in eval mode and its tokenizer, or `None` if the folder has none.

    Raises `ModelNotFoundError`, `UnsupportedModelError` (before any weight is read) or `ConfigError`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    path, kind = locate(name), "auto" if dtype == "auto" else float_dtype(dtype)
    auto: Any = AutoModelForCausalLM
    try:
        refuse_unsupported(AutoConfig.from_pretrained(path))
        model, found = auto.from_pretrained(path, dtype=kind, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelNotFoundError(f"Cannot load a causal LM from {str(name)!r}: {_first_line(error)}") from error
    if missing := sorted(found["missing_keys"]):  # transformers would initialize them at random
        raise ModelNotFoundError(
            f"The weights in {str(name)!r} are incomplete: {len(missing)} missing, {missing[0]} first."
        )
    try:
        model = model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"Cannot put the model on device {device!r}: {_first_line(error)}") from error
    return model.eval(), _tokenizer(path)


def locate(name: str | os.PathLike[str]) -> str:
    """The folder or hub id to load from; raises `ModelNotFoundError` for a local path that does not exist."""
    if name == "reader":
        if not (READER / "config.json").is_file():
            raise ModelNotFoundError("The bundled reader is not part of this installation; give a model's path.")
        return str(READER)
    path = Path(name).expanduser()
    looks_local = path.is_absolute() or str(name).startswith((".", "~")) or str(name).count("/") != 1
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(f"{path} has no config.json; a transformers model folder is needed.")
        return str(path)
    if looks_local:
        raise ModelNotFoundError(f"No model folder at {path}. Give a folder, a hub id such as org/name, or 'reader'.")
    return str(name)


def _tokenizer(path: str) -> Any | None:
    from transformers import AutoTokenizer

    folder = Path(path)
    if folder.is_dir() and not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFoundError(
            f"The tokenizer of the model at {path} cannot be loaded: {_first_line(error)}"
        ) from error


def kv_shape(model: str | os.PathLike[str]) -> KVShape:
    """The KV shape of a model, read from its config alone: no weights are loaded.

    `model` is a name of `SHAPES`, a folder or a hub id. Raises `ModelNotFoundError`, `UnsupportedModelError`.
    """
    from transformers import AutoConfig

    try:
        config = shape_config(str(model)) if model in SHAPES else AutoConfig.from_pretrained(locate(model))
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFoundError(f"Cannot read a config from {str(model)!r}: {_first_line(error)}") from error
    refuse_unsupported(config)
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KVShape(int(config.num_hidden_layers), int(kv_heads), int(head_dim))


def float_dtype(name: str) -> torch.dtype:
    """The floating-point torch dtype of that name; raises `ConfigError`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"dtype is {name!r}; give 'float32', 'bfloat16' or 'float16' (or 'auto' to load a model).")
    return dtype


def quiet_transformers() -> None:
    """Turn off transformers' warnings and progress bars in this process."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
