"""How vLLM must be configured, so that fused KV is right. All else is refused at start, in one sentence."""

from typing import Any

from ragkv.errors import ConfigError, UnsupportedModelError
from ragkv.model import Adapter

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")  # those whose tokens the tests compare
ROPE_TYPES = ("default", "llama3")


def check_config(vllm_config: Any) -> None:
    """Raise `ConfigError` or `UnsupportedModelError` if vLLM is configured in a way that is not supported."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            raise ConfigError(f"{name} is {size}; RagKVConnector fuses on one device: set it to 1.")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) > 1:
            raise ConfigError(f"{name} is {size}; RagKVConnector needs the whole context on one device: set it to 1.")
    if cache.enable_prefix_caching:
        raise ConfigError(
            "vLLM's prefix caching is on, and would serve fused KV as exact to other prompts: start vLLM with "
            "--no-enable-prefix-caching."
        )
    if cache.cache_dtype not in ("auto", str(vllm_config.model_config.dtype).removeprefix("torch.")):
        raise ConfigError(f"kv_cache_dtype is {cache.cache_dtype!r}; RagKVConnector needs the model's own: set 'auto'.")
    if vllm_config.speculative_config is not None:
        raise ConfigError("Speculative decoding is on; a draft model would have no KV of fused prompts: turn it off.")
    _check_model(vllm_config.model_config)


def _check_model(model_config: Any) -> None:
    if model_config.quantization is not None:
        raise UnsupportedModelError(
            f"The weights are quantised ({model_config.quantization}); RagKVConnector computes with unquantised ones."
        )
    family = model_config.hf_config.model_type
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"RagKVConnector was not tested with the family {family!r}; it supports {', '.join(FAMILIES)}."
        )
    rope = getattr(model_config.hf_config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"RagKVConnector was not tested with RoPE of the type {kind!r}; it supports {', '.join(ROPE_TYPES)}."
        )


def check_layer(layer: int, attention: Any, adapter: Adapter) -> None:
    """Raise `UnsupportedModelError` if vLLM's attention of `layer` has other shapes or another window than ragkv's."""
    found = (attention.num_kv_heads, attention.head_size, attention.sliding_window)
    wanted = (adapter.kv_heads, adapter.head_dim, adapter.window(layer))
    if found != wanted:
        raise UnsupportedModelError(
            f"Layer {layer} has (KV heads, head size, sliding window) {found} in vLLM and {wanted} in ragkv; "
            "RagKVConnector cannot serve this model."
        )


__all__ = ["check_config", "check_layer"]
