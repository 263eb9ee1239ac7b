"""Models of real shapes with random weights: weights do not change time. Say so wherever a number is shown."""

from typing import Any

import torch

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


def make(shape: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A causal LM of that shape with small random weights, in eval mode."""
    import transformers

    name, settings = SHAPES[shape]
    config = getattr(transformers, f"{name}Config")(**settings)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    model = model.to_empty(device="cpu").to(dtype)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.data.fill_(1.0)
    model.tie_weights()
    body = model.model
    body.rotary_emb = type(body.rotary_emb)(config)  # its buffers are not weights
    return model.eval()
