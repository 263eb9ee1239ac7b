"""Loading a model and its tokenizer from where `home.py` says that they are."""

import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ragkv.errors import ConfigError, MissingExtraError, ModelNotFoundError
from ragkv.home import locate

from .cpu import int4, int8
from .gguf_files import GRIDS, unpacked
from .probe import DEVICES, refuse_unsupported


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """The dtype to load a model in, and why, in a sentence."""

    name: str  # "float32", ...; "auto" if the checkpoint does not say which one it has
    why: str
    # whether the processor was measured, or the memory decided: then the user should read why
    measured: bool = False


def load(
    name: str | os.PathLike[str],
    device: str,
    dtype: str,
    lora: str = "",
    weights: str = "plain",
    packed_bytes: int | None = None,
) -> tuple[Any, Any | None]:
    """A causal LM in eval mode and its tokenizer, or `None` if the folder has none.

    `lora` is the folder or hub id of a LoRA adapter, which is merged into the weights. With the
    `weights` "int8" the linear layers are then rounded, with copies for few rows up to
    `packed_bytes`. Raises `ModelNotFoundError`, `UnsupportedModelError` (before any weight is
    read), `MissingExtraError` or `ConfigError`.
    """
    from transformers import AutoModelForCausalLM

    kind = "auto" if dtype == "auto" else float_dtype(dtype)
    target = device_of(device)
    refuse_unsupported(config_of(name))
    path = folder_of(name)
    auto: Any = AutoModelForCausalLM
    try:
        with without_bars():
            model, found = auto.from_pretrained(path, dtype=kind, output_loading_info=True)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise _not_loaded(name, error) from error
    if missing := sorted(found["missing_keys"]):  # transformers would initialize them at random
        raise ModelNotFoundError(
            f"The weights in {str(name)!r} are incomplete: {len(missing)} missing, {missing[0]} "
            "first."
        )
    if (grids := Path(path) / GRIDS).is_file():
        int4.attach(grids, model)
    if lora:
        model = _with_lora(model, lora)
    try:
        model = model.to(target)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"Cannot put the model on device {device!r}: {_first_line(error)}"
        ) from error
    if weights == "int8":
        int8.round_weights(model, packed_bytes)
    return model.eval(), _tokenizer(path)


def load_tokenizer(name: str | os.PathLike[str]) -> Any | None:
    """The tokenizer of a model, or `None` if its folder has none. Raises `ModelNotFoundError`."""
    return _tokenizer(folder_of(name))


def _with_lora(model: Any, lora: str) -> Any:
    """`model` with a LoRA adapter merged into its weights."""
    try:
        peft: Any = importlib.import_module("peft")
    except ImportError as error:
        raise MissingExtraError("peft", "lora", "A LoRA adapter") from error
    try:
        return peft.PeftModel.from_pretrained(model, lora).merge_and_unload(safe_merge=True)
    except (
        OSError,
        ValueError,
        KeyError,
        RuntimeError,
        AttributeError,
        TypeError,
        SafetensorError,
    ) as error:
        raise ModelNotFoundError(
            f"Cannot load a LoRA adapter of this model from {lora!r}: {_first_line(error)}"
        ) from error


def folder_of(name: str | os.PathLike[str]) -> str:
    """Where transformers loads a model from: a folder or hub id; a GGUF file is unpacked to a
    folder first.
    """
    located = locate(name)
    if not Path(located).is_file():
        return located
    try:
        return str(unpacked(Path(located)))
    except MissingExtraError:
        raise
    except Exception as error:  # a damaged file makes readers of it fail in any way
        raise _not_loaded(name, error) from error


def _not_loaded(name: object, error: BaseException) -> ModelNotFoundError:
    path = Path(str(name))
    if path.suffix.lower() == ".gguf":
        hint = (
            f"The file has {path.stat().st_size} bytes: compare that with its source, and download "
            "it again if it is shorter."
        )
    elif path.exists():
        hint = "Is a file of it missing or cut? Compare the folder with its source."
    else:
        hint = (
            "No folder or file here has that name, so it was looked for on the hub. Check the name "
            "and the network, or give a model's folder or GGUF file."
        )
    why = _pointer(path) or f"{_first_line(error).rstrip('.')}. {hint}"
    return ModelNotFoundError(f"Cannot load a causal LM from {str(name)!r}: {why}")


def _pointer(path: Path) -> str | None:
    """What to do if Git left a pointer in place of a large file; `None` if it did not."""
    for file in filter(Path.is_file, [path] if path.is_file() else sorted(path.glob("*"))):
        with file.open("rb") as stream:
            if stream.read(23) == b"version https://git-lfs":
                return (
                    f"{file.name} is a Git LFS pointer, not the file itself. Run git lfs "
                    "pull, or download the file."
                )
    return None


def config_of(name: str | os.PathLike[str]) -> Any:
    """The transformers config of a model; raises `ModelNotFoundError`."""
    from transformers import AutoConfig

    path = folder_of(name)
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise _not_loaded(name, error) from error


def device_of(name: str) -> torch.device:
    """The torch device of that name; raises `ConfigError` for an unknown one, and for kinds that
    were never tested.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"Cannot put the model on device {name!r}: {_first_line(error)}"
        ) from error
    if device.type not in DEVICES:
        raise ConfigError(
            f"Cannot put the model on device {name!r}: fusing is tested on "
            f"{' and '.join(DEVICES)} only. "
            "Set device = cpu, which computes on any machine."
        )
    return device


def _tokenizer(path: str) -> Any | None:
    from transformers import AutoTokenizer

    folder = Path(path)
    names = ("tokenizer.json", "tokenizer_config.json")
    if folder.is_dir() and not any((folder / name).exists() for name in names):
        return None
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # the tokenizers library raises no narrower one
        why = _pointer(folder) or _first_line(error)
        raise ModelNotFoundError(
            f"The tokenizer of the model at {path} cannot be loaded: {why}"
        ) from error


def float_dtype(name: str) -> torch.dtype:
    """The floating-point torch dtype of that name; raises `ConfigError`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(
            f"dtype is {name!r}; give 'float32', 'bfloat16' or 'float16' (or 'auto' to load a "
            "model)."
        )
    return dtype


def quiet_transformers() -> None:
    """Turn off transformers' warnings and progress bars in this process."""
    from transformers.utils import logging

    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def without_bars() -> Iterator[None]:
    """Load without transformers' progress bars: who calls the library did not ask for output."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
