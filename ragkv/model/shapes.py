"""Models with real shapes and random weights, for timing. State this wherever a number from them is shown."""

from typing import Any

import torch

from ragkv.errors import ConfigError

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-0.5b": (
        "Qwen2",
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
    ),
    "llama-3.2-1b": (
        "Llama",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
    ),
    "llama-2-7b": (
        "Llama",
        {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32000,
            "max_position_embeddings": 32768,  # the real model has 4096, which does not affect time
        },
    ),
    "llama-3-8b": (
        "Llama",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
        },
    ),
    "tiny": (
        "Llama",
        {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 512,
            "max_position_embeddings": 32768,
        },
    ),
}


def shape_config(shape: str, layers: int | None = None) -> Any:
    """The transformers config of a shape, optionally with other `layers`; raises `ConfigError` with the known names."""
    import transformers

    if shape not in SHAPES:
        raise ConfigError(f"Unknown shape {shape!r}. Known: {', '.join(sorted(SHAPES))}.")
    name, settings = SHAPES[shape]
    if layers is not None:
        settings = {**settings, "num_hidden_layers": layers}
    return getattr(transformers, f"{name}Config")(**settings)


def random_model(
    shape: str, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", layers: int | None = None
) -> Any:
    """A causal LM of that shape with small random weights, in eval mode, optionally with other `layers`."""
    import transformers

    config = shape_config(shape, layers)
    with torch.device("meta"):
        model = getattr(transformers, f"{SHAPES[shape][0]}ForCausalLM")(config)
    model = model.to(dtype).to_empty(device=device)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.data.fill_(1.0)
    model.tie_weights()
    body = model.model
    body.rotary_emb = type(body.rotary_emb)(config).to(device)  # its buffers are not weights
    return model.eval()
