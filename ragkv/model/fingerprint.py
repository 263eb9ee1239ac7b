"""The model's part of an entry's identity: digests of its weights, architecture, RoPE and
tokenizer.

A change that affects keys or values must change one of these digests. Any other change should not.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

import torch
import xxhash

from ragkv.errors import UnsupportedModelError

from .adapter import Adapter

# Settings that do not affect keys and values.
_IRRELEVANT = (
    *(
        "_name_or_path",
        "architectures",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "problem_type",
    ),
    *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id"),
    *("use_cache", "output_hidden_states", "output_attentions", "return_dict"),
    *("attention_dropout", "initializer_range"),
    *("rope_parameters", "max_position_embeddings"),  # `rope_parameters_digest` has these
)


# The address of an object in memory is another one in every process.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def weights_digest(model: torch.nn.Module) -> str:
    """Digest of the name, shape, dtype and bytes of every parameter and persistent buffer.

    Quantised weights and the adapters of PEFT count with their settings. Raises
    `UnsupportedModelError` for weights that cannot be read.
    """
    try:
        return _digest_of(model)
    except (TypeError, RuntimeError, AttributeError) as error:
        raise UnsupportedModelError(
            f"The weights of this {type(model).__name__} cannot be read ({str(error)[:200]}), so "
            "its stored KV could "
            "not be told from another model's. Load the model unquantised; docs/models.md lists "
            "the kinds that work."
        ) from error


def _digest_of(model: torch.nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(model.state_dict().items()):
        # a setting that a quantised layer saves with its weights
        if not isinstance(value, torch.Tensor):
            digest.update(f"{name}:{value!r}:".encode())
            continue
        for part, tensor in _plain_parts(name, value):
            # one at a time: all would need the model's memory again
            flat = tensor.detach().cpu().contiguous().view(-1)
            digest.update(f"{part}:{tuple(tensor.shape)}:{flat.dtype}:".encode())
            if flat.numel():
                digest.update(xxhash.xxh3_128_digest(flat.view(torch.uint8).numpy().data))
    for name, module in model.named_modules():
        if (state := adapter_state(module)) is not None:
            digest.update(f"{name}:{state}".encode())
    return digest.hexdigest()


def _plain_parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """`tensor` with its name, or the tensors that a quantised one is made of."""
    if not flattens(tensor):
        yield name, tensor
        return
    parts, settings = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    # says how activations are quantised, too
    kind = f"{type(tensor).__name__}{_ADDRESS.sub('', str(settings))}"
    for part in sorted(parts):
        yield from _plain_parts(f"{name}.{kind}.{part}", getattr(tensor, part))


def flattens(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor of several tensors, such as torchao's: integers and their scales."""
    return hasattr(tensor, "__tensor_flatten__")


def adapter_state(module: Any) -> str | None:
    """What of a PEFT layer changes its results and is no tensor: active adapters and their scales;
    `None` elsewhere.
    """
    if not hasattr(module, "active_adapters") or not hasattr(module, "scaling"):
        return None
    scales = {
        name: float(value)
        for name, value in sorted(module.scaling.items())
        if name in module.active_adapters
    }
    disabled = getattr(module, "disable_adapters", False)
    merged = getattr(module, "merged_adapters", [])
    return f"{module.active_adapters}:{scales}:{disabled}:{merged}"


def architecture_digest(adapter: Adapter) -> str:
    """Digest of the config's settings that affect the computation, without RoPE."""
    settings = {
        name: value for name, value in adapter.config.to_dict().items() if name not in _IRRELEVANT
    }
    return _digest({"adapter": type(adapter).__name__, **settings})


def rope_parameters_digest(adapter: Adapter) -> str:
    """Digest of the RoPE parameters, including nested ones."""
    config = adapter.config
    lengths = (
        getattr(config, "max_position_embeddings", None) if adapter.rope.depends_on_length else None
    )
    return _digest({"rope": getattr(config, "rope_parameters", None), "original_length": lengths})


def tokenizer_digest(tokenizer: Any | None) -> str:
    """Digest of a tokenizer's vocabulary and rules; "" without a tokenizer."""
    if tokenizer is None:
        return ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return _digest(tokenizer.get_vocab())
    rules = json.loads(backend.to_str())
    # these two are state of the last call
    return _digest({**rules, "truncation": None, "padding": None})


def _digest(values: dict[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
