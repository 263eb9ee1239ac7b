"""Random tiny models of every supported family and RoPE variant, in float32.

Weights have a wide spread (`initializer_range` of 0.2 or more), so a wrong rotation, mask or window
changes the logits visibly. Windows are shorter than the test prompts, and length-dependent RoPE
changes within their length.
"""

import functools
from typing import Any

import torch
import transformers

VOCABULARY = 199
WINDOW = 24
ORIGINAL_LENGTH = 48  # of dynamic and longrope: prompts are longer, chunks shorter

BASE: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.25,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


def _rope(kind: str, **extra: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10_000.0, **extra}


def llama3(original_length: int) -> dict[str, Any]:
    """The settings of llama3's rope."""
    bands = dict(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
    return dict(
        rope_parameters=_rope("llama3", **bands, original_max_position_embeddings=original_length)
    )


_SLIDE = ["sliding_attention", "full_attention"] * 2

_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", dict(rope_parameters=_rope("default"))),
    "llama-linear": ("Llama", dict(rope_parameters=_rope("linear", factor=2.0))),
    "llama-dynamic": (
        "Llama",
        dict(rope_parameters=_rope("dynamic", factor=4.0), max_position_embeddings=ORIGINAL_LENGTH),
    ),
    "llama-llama3": ("Llama", llama3(ORIGINAL_LENGTH)),
    "llama-yarn": (
        "Llama",
        dict(
            rope_parameters=_rope(
                "yarn", factor=4.0, original_max_position_embeddings=ORIGINAL_LENGTH
            )
        ),
    ),
    "mistral": ("Mistral", dict(sliding_window=WINDOW)),
    "qwen2": (
        "Qwen2",
        dict(
            use_sliding_window=True, sliding_window=WINDOW, max_window_layers=0, layer_types=_SLIDE
        ),
    ),
    "qwen3": ("Qwen3", dict(head_dim=24)),
    "qwen3_moe": (
        "Qwen3Moe",
        dict(
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            norm_topk_prob=True,
        ),
    ),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "phi3": (
        "Phi3",
        dict(
            rope_parameters=_rope(
                "longrope",
                short_factor=[1.0, 1.1, 1.3, 1.6],
                long_factor=[2.0, 2.5, 3.0, 4.0],
                original_max_position_embeddings=ORIGINAL_LENGTH,
                factor=4.0,
                partial_rotary_factor=0.5,
            ),
            original_max_position_embeddings=ORIGINAL_LENGTH,
            sliding_window=None,
        ),
    ),
    "gemma2": (
        "Gemma2",
        dict(head_dim=16, sliding_window=WINDOW, layer_types=_SLIDE, query_pre_attn_scalar=16),
    ),
    "gemma3_text": (
        "Gemma3",
        dict(
            head_dim=16,
            sliding_window=WINDOW,
            layer_types=_SLIDE,
            query_pre_attn_scalar=16,
            rope_parameters={
                "sliding_attention": _rope("default"),
                "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
            },
        ),
    ),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        dict(
            embedding_multiplier=3.0,
            attention_multiplier=0.2,
            residual_multiplier=0.5,
            logits_scaling=2.0,
        ),
    ),
    "cohere2": ("Cohere2", dict(sliding_window=WINDOW, layer_types=_SLIDE, logit_scale=0.5)),
    "smollm3": (
        "SmolLM3",
        dict(
            no_rope_layers=[1, 0, 1, 0],
            use_sliding_window=True,
            sliding_window=WINDOW,
            layer_types=_SLIDE,
        ),
    ),
    "glm4": (
        "Glm4",
        dict(head_dim=16, rope_parameters=_rope("default", partial_rotary_factor=0.5)),
    ),
    "gpt_neox": ("GPTNeoX", dict(rope_parameters=_rope("default", partial_rotary_factor=0.5))),
    "stablelm": (
        "StableLm",
        dict(
            rope_parameters=_rope("default", partial_rotary_factor=0.5),
            qk_layernorm=True,
            use_parallel_residual=True,
        ),
    ),
    "starcoder2": ("Starcoder2", dict(sliding_window=WINDOW)),
}

FAMILIES = tuple(_CONFIGS)
LENGTH_DEPENDENT = ("llama-dynamic", "phi3")


def config(family: str, **changes: Any) -> Any:
    """A fresh tiny config of `family`."""
    name, settings = _CONFIGS[family]
    merged = {**BASE, **settings, **changes}
    config_class = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    made = getattr(transformers, config_class)(**merged)
    made._attn_implementation = "eager" if name.startswith("Gemma") else "sdpa"
    return made


@functools.cache
def weights(family: str) -> dict[str, torch.Tensor]:
    """The random weights of a family, equal in every call."""
    torch.manual_seed(sum(map(ord, family)))
    return dict(_fresh(family).state_dict())


def model(family: str) -> Any:
    """A new model of `family` with its fixed random weights, in eval mode."""
    fresh = _fresh(family)
    fresh.load_state_dict(weights(family))
    return fresh


def _fresh(family: str) -> Any:
    name, _ = _CONFIGS[family]
    return getattr(transformers, f"{name}ForCausalLM")(config(family)).eval()


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random ordinary token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()
