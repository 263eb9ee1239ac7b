"""KV bytes a token takes, read off a model's config alone: no weights are loaded."""

import os

import torch

from ragkv.errors import ConfigError, ModelNotFoundError

from .loading import locate
from .probe import refuse_unsupported
from .shapes import SHAPES, shape_config


def kv_size(model: str | os.PathLike[str], dtype: str) -> int:
    """Bytes of keys and values of one token, over all layers. Raises `ModelNotFoundError`, `UnsupportedModelError`."""
    from transformers import AutoConfig

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ConfigError(f"dtype is {dtype!r}; give 'float32', 'bfloat16' or 'float16'.")
    try:
        config = shape_config(str(model)) if model in SHAPES else AutoConfig.from_pretrained(locate(model))
    except (OSError, ValueError, KeyError) as error:
        raise ModelNotFoundError(f"Cannot read a config from {str(model)!r}: {str(error).splitlines()[0]}") from error
    refuse_unsupported(config)
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers * 2 * kv_heads * head_dim * kind.itemsize)
