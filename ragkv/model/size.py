"""KV bytes, read off a model's config alone: no weights are loaded."""

import os
from typing import NamedTuple

from ragkv.errors import ModelNotFoundError

from .loading import locate
from .probe import refuse_unsupported
from .shapes import SHAPES, shape_config


class KVSides(NamedTuple):
    """What the KV of a token is."""

    layers: int  # L
    kv_heads: int  # G
    head_dim: int  # D


def kv_sides(model: str | os.PathLike[str]) -> KVSides:
    """L, G and D of a model. Raises `ModelNotFoundError`, `UnsupportedModelError`."""
    from transformers import AutoConfig

    try:
        config = shape_config(str(model)) if model in SHAPES else AutoConfig.from_pretrained(locate(model))
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFoundError(f"Cannot read a config from {str(model)!r}: {str(error).splitlines()[0]}") from error
    refuse_unsupported(config)
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KVSides(int(config.num_hidden_layers), int(kv_heads), int(head_dim))
