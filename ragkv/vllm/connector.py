"""`RagKVConnector`: the KV connector that vLLM loads, once for its scheduler and once for its
worker.

The worker's half writes fused KV into the paged cache before vLLM computes the rest of a prompt.
"""

import logging
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from ragkv.config import EngineConfig
from ragkv.engine import Engine
from ragkv.errors import ConfigError, UnsupportedModelError
from ragkv.model.loading import config_of, load_tokenizer

from .interface import check_interface
from .paged_cache import PagedCache
from .scheduler import PagedLoad, PromptScheduler
from .settings import ConnectorSettings, check_config
from .shared_weights import served_model, shared_model

log = logging.getLogger(__name__)

# the caches of this process, by engine id
_CACHES: "WeakValueDictionary[str, PagedCache]" = WeakValueDictionary()


def cache_of(engine_id: str) -> PagedCache:
    """The paged cache of an engine. Raises `ConfigError` if vLLM's worker runs in another
    process.
    """
    cache = _CACHES.get(engine_id)
    if cache is None:
        raise ConfigError(
            "vLLM's worker runs in another process than its scheduler; RagKVConnector needs both "
            "in one: start vLLM "
            "with --distributed-executor-backend uni, and on a CPU with "
            "VLLM_ENABLE_V1_MULTIPROCESSING=0."
        )
    return cache


@dataclass
class RagKVMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler tells the worker in one step."""

    loads: tuple[PagedLoad, ...] = ()


class RagKVConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Gives vLLM the fused KV of prompts that contain stored chunks. See docs/vllm.md."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises `ConfigError` or `UnsupportedModelError` for what fused KV is not right for."""
        super().__init__(vllm_config, role, kv_cache_config)
        check_interface()
        check_config(vllm_config)
        self._engine_id = vllm_config.kv_transfer_config.engine_id
        self._cache: PagedCache | None = None
        self._prompts: PromptScheduler | None = None
        # vLLM registers the paged cache before its scheduler starts
        if role is KVConnectorRole.SCHEDULER:
            self._prompts = _open(vllm_config, cache_of(self._engine_id))

    # The scheduler's half

    def on_new_request(self, request: Any) -> None:
        """Give a new request a salt of its own kind, before vLLM looks for its prefix."""
        assert self._prompts is not None
        self._prompts.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens ragkv has fused of a waiting request; `None` while it fuses."""
        assert self._prompts is not None
        return self._prompts.promised(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks into which the promised tokens go."""
        assert self._prompts is not None
        self._prompts.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> RagKVMetadata:
        """What the worker writes in this step."""
        assert self._prompts is not None
        return RagKVMetadata(
            self._prompts.take_loads(idle=scheduler_output.total_num_scheduled_tokens == 0)
        )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The report of a request; its blocks may be freed at once."""
        assert self._prompts is not None
        return False, self._prompts.finished(request)

    # The worker's half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take over the tensors of the paged cache. Raises `UnsupportedModelError`."""
        self._cache = _CACHES[self._engine_id] = PagedCache(
            self._vllm_config, self._kv_cache_config, kv_caches
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Write fused KV before vLLM computes what follows it."""
        assert self._cache is not None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, RagKVMetadata)
        for load in metadata.loads:
            self._cache.write(load.kv, load.start, load.stop, load.block_ids)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: `start_load_kv` has written every layer."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: KV that saw a whole prompt is never stored for a chunk."""

    def wait_for_save(self) -> None:
        """Do nothing: nothing is saved."""

    def shutdown(self) -> None:
        """Close the engine and the store."""
        if self._prompts is not None:
            self._prompts.close()


def _open(vllm_config: Any, cache: PagedCache) -> PromptScheduler:
    """Build the engine on the model that vLLM serves, and check that vLLM reads what is written."""
    model = vllm_config.model_config
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    dtype = str(model.dtype).removeprefix("torch.")
    device = vllm_config.device_config.device.type
    settings, config = ConnectorSettings.read(extra, dtype, device, model.model)
    engine, weights = _engine(model.model, config, cache)
    try:
        if engine.model.adapter.rope.depends_on_length:
            raise UnsupportedModelError(
                "The RoPE frequencies depend on the prompt's length; RagKVConnector needs fixed "
                "ones."
            )
        cache.check(engine.model.adapter)
        prompts = PromptScheduler(engine, settings, vllm_config.cache_config.enable_prefix_caching)
    except BaseException:
        engine.close()
        raise
    log.warning("%s", weights)
    where = config.store.directory or "memory; requests must name chunks that lie in Redis or S3"
    log.warning("ragkv knows %d stored chunks in %s.", prompts.known_chunks, where)
    return prompts


def _engine(name: str, config: EngineConfig, cache: PagedCache) -> tuple[Engine, str]:
    """The engine on vLLM's own weights where they can be shared, and a sentence that says so."""
    try:
        if config.weights != "plain" or config.adapter:
            raise UnsupportedModelError("the settings weights and adapter of ragkv change them")
        served = served_model(*cache.first_layer)
        if served is None:
            raise UnsupportedModelError("its model is not found in this process")
        engine = Engine(shared_model(served, config_of(name)), load_tokenizer(name), config)
        said = "computes with vLLM's own weights and keeps no copy"
    except UnsupportedModelError as error:
        engine = Engine.from_pretrained(name, config)
        said = f"keeps a second copy of vLLM's weights, because they are not shared: {error}"
    size = sum(p.numel() * p.element_size() for p in engine.model.adapter.model.parameters())
    return engine, f"ragkv {said} ({size / 1e9:.2f} GB)."
