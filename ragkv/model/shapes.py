"""Models with real shapes and random weights, for timing. State this wherever a number from them is shown."""

from typing import Any

import torch

from ragkv.errors import ConfigError

_COLUMNS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)
SHAPES: dict[
    str, tuple[str, tuple[int, ...], dict[str, Any]]
] = {  # A shape is a family, a size per column, and other settings.
    "qwen2.5-0.5b": ("Qwen2", (896, 4864, 24, 14, 2, 151936, 32768), {"tie_word_embeddings": True}),
    "llama-3.2-1b": ("Llama", (2048, 8192, 16, 32, 8, 128256, 131072), {"head_dim": 64, "tie_word_embeddings": True}),
    "llama-2-7b": ("Llama", (4096, 11008, 32, 32, 32, 32000, 32768), {}),  # 4096 positions in the real model
    "llama-3-8b": ("Llama", (4096, 14336, 32, 32, 8, 128256, 8192), {}),
    "tiny": ("Llama", (128, 256, 4, 4, 2, 512, 32768), {}),
}


def shape_config(shape: str, layers: int | None = None) -> Any:
    """The transformers config of a shape, optionally with other `layers`; raises `ConfigError` with the known names."""
    import transformers

    if shape not in SHAPES:
        raise ConfigError(f"Unknown shape {shape!r}. Known: {', '.join(sorted(SHAPES))}.")
    name, sizes, others = SHAPES[shape]
    settings = {**dict(zip(_COLUMNS, sizes, strict=True)), **others}
    if layers is not None:
        settings["num_hidden_layers"] = layers
    return getattr(transformers, f"{name}Config")(**settings)


def random_model(
    shape: str, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", layers: int | None = None
) -> Any:
    """A causal LM of that shape with small random weights, in eval mode, optionally with other `layers`.

    In float32 its weights are numbers that bfloat16 holds, as those of a bfloat16 checkpoint that was widened.
    """
    import transformers

    config = shape_config(shape, layers)
    with torch.device("meta"):
        model = getattr(transformers, f"{SHAPES[shape][0]}ForCausalLM")(config)
    model = model.to(dtype).to_empty(device=device)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.data.fill_(1.0)
        if dtype is torch.float32:
            parameter.data.copy_(parameter.data.bfloat16())
    model.tie_weights()
    body = model.model
    body.rotary_emb = type(body.rotary_emb)(config).to(device)  # its buffers are not weights
    return model.eval()
