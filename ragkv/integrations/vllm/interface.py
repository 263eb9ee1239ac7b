"""All of vLLM's interface that the connector uses, in one list, compared at start with the vLLM that is installed.

An upgrade of vLLM: try `make test-vllm VLLM=...`; what this list says is missing is where to look.
"""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from ragkv.errors import ConfigError

TESTED = ("0.32.0",)  # `TESTED` are the versions with which the tests passed.
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base"
# By module and name: what of it is used. Attributes that its `__init__` sets count.
USED: Mapping[tuple[str, str], tuple[str, ...]] = {
    (_CONNECTOR, "KVConnectorBase_V1"): (
        "on_new_request",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
        "request_finished",
        "register_kv_caches",
        "start_load_kv",
        "wait_for_layer_load",
        "save_kv_layer",
        "wait_for_save",
        "shutdown",
        "_get_connector_metadata",
        "_vllm_config",
        "_kv_cache_config",
    ),
    (_CONNECTOR, "KVConnectorMetadata"): (),
    (_CONNECTOR, "KVConnectorRole"): ("SCHEDULER",),
    ("vllm.v1.request", "Request"): (
        "request_id",
        "prompt_token_ids",
        "kv_transfer_params",
        "cache_salt",
        "block_hashes",
        "update_block_hashes",
        "skip_reading_prefix_cache",
        "lora_request",
        "mm_features",
        "pooling_params",
    ),
    ("vllm.v1.core.sched.output", "SchedulerOutput"): ("total_num_scheduled_tokens",),
    ("vllm.v1.core.kv_cache_manager", "KVCacheBlocks"): ("get_block_ids",),
    ("vllm.v1.kv_cache_interface", "KVCacheConfig"): ("kv_cache_groups",),
    ("vllm.v1.kv_cache_interface", "KVCacheGroupSpec"): ("kv_cache_spec",),
    ("vllm.v1.attention.backend", "CommonAttentionMetadata"): (
        "query_start_loc",
        "query_start_loc_cpu",
        "seq_lens",
        "num_reqs",
        "num_actual_tokens",
        "max_query_len",
        "max_seq_len",
        "block_table_tensor",
        "slot_mapping",
        "seq_lens_cpu_upper_bound",
    ),
    ("vllm.config", "VllmConfig"): (
        "kv_transfer_config",
        "model_config",
        "parallel_config",
        "cache_config",
        "device_config",
        "compilation_config",
        "speculative_config",
    ),
    ("vllm.config", "KVTransferConfig"): ("engine_id", "kv_connector_extra_config"),
    ("vllm.config", "ModelConfig"): ("model", "dtype", "quantization", "hf_config"),
    ("vllm.config", "CacheConfig"): ("enable_prefix_caching", "cache_dtype"),
    ("vllm.config", "ParallelConfig"): (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "decode_context_parallel_size",
    ),
    ("vllm.config", "CompilationConfig"): ("static_forward_context",),
    ("vllm.config", "set_current_vllm_config"): (),
    ("vllm.model_executor.models.utils", "extract_layer_index"): (),
}


def check_interface() -> None:
    """Raise `ConfigError` if the installed vLLM lacks something that is used."""
    missing = tuple(_missing())
    if missing:
        version = getattr(importlib.import_module("vllm"), "__version__", "of an unknown version")
        raise ConfigError(
            f"vLLM {version} has no {', '.join(missing)}, which RagKVConnector uses; it was tested with "
            f"{', '.join(TESTED)} (docs/vllm.md)."
        )


def _missing() -> Iterator[str]:
    for (module, name), parts in USED.items():
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            yield f"{module}.{name}"
            continue
        yield from (f"{name}.{part}" for part in parts if not _has(found, part))


def _has(found: Any, part: str) -> bool:
    """Whether an object has `part`, or its instances do."""
    made = getattr(found.__init__, "__code__", None)
    fields = getattr(found, "__dataclass_fields__", {})
    return hasattr(found, part) or part in fields or (made is not None and part in made.co_names)
