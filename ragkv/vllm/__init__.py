"""ragkv inside vLLM: a KV connector that gives vLLM the fused KV of prompts (docs/vllm.md).

    vllm serve MODEL --kv-transfer-config '{
        "kv_connector": "RagKVConnector", "kv_connector_module_path": "ragkv.vllm",
        "kv_role": "kv_both", "kv_connector_extra_config": {"home": "corpus"}}'

vLLM schedules, decodes and serves. This package finds stored chunks in a prompt, fuses their KV
with the engine of ragkv, and writes it into vLLM's paged cache; vLLM computes what follows the last
chunk. Only `connector.py` and `paged_cache.py` import vLLM, and no code of vLLM is changed.
"""

from typing import TYPE_CHECKING, Any

from ragkv.errors import MissingExtraError

if TYPE_CHECKING:
    from .connector import RagKVConnector


def __getattr__(name: str) -> Any:
    """`RagKVConnector`, loaded when vLLM asks for it: the rest of the package works
    without vLLM.
    """
    if name != "RagKVConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import vllm  # noqa: F401 - an optional dependency
    except ImportError as error:
        raise MissingExtraError("vllm", "vllm", "ragkv.vllm") from error
    from .connector import RagKVConnector

    return RagKVConnector


__all__ = ["RagKVConnector"]
