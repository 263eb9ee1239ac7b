"""`RagKVConnector`: the KV connector that vLLM loads, once for its scheduler and once for its worker.

The worker's half writes fused KV into the paged cache before vLLM computes the rest of a prompt. Both halves count, and
vLLM reports the counts in its log and as Prometheus metrics of its server.
"""

import logging
import time
from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from ragkv.config import EngineConfig
from ragkv.engine import Engine
from ragkv.errors import ConfigError, UnsupportedModelError
from ragkv.model.loading import config_of, load_tokenizer

from .paged_cache import PagedCache
from .scheduler import COUNTERS, ConnectorCounts, PagedLoad, PromptScheduler
from .settings import ConnectorSettings, check_config
from .shared_weights import served_model, shared_model

log = logging.getLogger(__name__)

_WORKERS: "WeakValueDictionary[str, Worker]" = (
    WeakValueDictionary()
)  # Those of this process, by the id of their engine.


class Worker:
    """The paged cache of one vLLM engine, and what is written to it."""

    def __init__(self, engine_id: str) -> None:
        self.counts = ConnectorCounts()
        self._cache: PagedCache | None = None
        _WORKERS[engine_id] = self

    @property
    def cache(self) -> PagedCache:
        """The paged cache. vLLM registers it before its scheduler starts."""
        assert self._cache is not None, "vLLM has not registered its KV cache"
        return self._cache

    def register(self, vllm_config: Any, kv_cache_config: Any, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take over the tensors of the paged cache. Raises `UnsupportedModelError`."""
        self._cache = PagedCache(vllm_config, kv_cache_config, kv_caches)

    def write(self, loads: tuple[PagedLoad, ...]) -> None:
        """Write the KV of `loads`; vLLM's pass over what follows comes after it."""
        began = time.perf_counter()
        for load in loads:
            self.cache.write(load.kv, load.tokens, load.block_ids)
        if loads:
            self.counts.add(writing_seconds=time.perf_counter() - began)


def worker_of(engine_id: str) -> Worker:
    """The worker of this process that belongs to the engine. Raises `ConfigError` if it runs in another process."""
    worker = _WORKERS.get(engine_id)
    if worker is None:
        raise ConfigError(
            "vLLM's worker runs in another process than its scheduler; RagKVConnector needs both in one: start vLLM "
            "with --distributed-executor-backend uni, and on a CPU with VLLM_ENABLE_V1_MULTIPROCESSING=0."
        )
    return worker


@dataclass
class RagKVStats(KVConnectorStats):  # type: ignore[misc]
    """The counts of one report, by the names of `COUNTERS`."""

    def reset(self) -> None:
        """Begin again at 0."""
        self.data: dict[str, float] = {}

    def aggregate(self, other: Any) -> Self:
        """Add the counts of `other`."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """The counts for a line of vLLM's log."""
        return {name: round(count, 3) for name, count in self.data.items()}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class RagKVMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counts as Prometheus counters: `vllm:ragkv_prompts_fused` and so on."""

    def __init__(self, *arguments: Any) -> None:
        """Takes what vLLM gives: its config, classes of metrics, and the names and values of their labels."""
        super().__init__(*arguments)
        self._counters = {
            name: self._counter_cls(name=f"vllm:ragkv_{name}", documentation=text, labelnames=self._labelnames)
            for name, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of one report of an engine."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            self._counters[name].labels(*labels).inc(count)


@dataclass
class RagKVMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler tells the worker in one step."""

    loads: tuple[PagedLoad, ...] = ()


class RagKVConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Gives vLLM the fused KV of prompts that contain stored chunks. See docs/vllm.md."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises `ConfigError` or `UnsupportedModelError` for what fused KV is not right for."""
        super().__init__(vllm_config, role, kv_cache_config)
        check_config(vllm_config)
        engine_id = vllm_config.kv_transfer_config.engine_id
        self._worker: Worker | None = None
        self._prompts: PromptScheduler | None = None
        if role is KVConnectorRole.WORKER:
            self._worker = Worker(engine_id)
        else:
            self._prompts = _open(vllm_config, worker_of(engine_id))

    # The scheduler's half

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
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
        return RagKVMetadata(self._prompts.take_loads(idle=scheduler_output.total_num_scheduled_tokens == 0))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The report of a request; its blocks may be freed at once."""
        assert self._prompts is not None
        return False, self._prompts.finished(request)

    # The worker's half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take over the paged cache."""
        assert self._worker is not None
        self._worker.register(self._vllm_config, self._kv_cache_config, kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Write fused KV before vLLM computes what follows it."""
        assert self._worker is not None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, RagKVMetadata)
        self._worker.write(metadata.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: `start_load_kv` has written every layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: KV that saw a whole prompt is never stored for a chunk."""

    def wait_for_save(self) -> None:
        """Do nothing: nothing is saved."""

    # Both halves

    def get_kv_connector_stats(self) -> RagKVStats | None:
        """What this half counted since the last call."""
        half = self._worker or self._prompts
        assert half is not None
        counts = half.counts.take()
        return RagKVStats(data=counts) if counts else None

    def shutdown(self) -> None:
        """Close the engine and the store."""
        if self._prompts is not None:
            self._prompts.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> RagKVStats:
        """Counts from what `get_kv_connector_stats` sent to another process."""
        return RagKVStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> RagKVMetrics:
        """The Prometheus counters of vLLM's server."""
        return RagKVMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _open(vllm_config: Any, worker: Worker) -> PromptScheduler:
    """Build the engine on the model that vLLM serves, and check that vLLM reads what is written."""
    model, extra = vllm_config.model_config, vllm_config.kv_transfer_config.kv_connector_extra_config
    dtype, device = str(model.dtype).removeprefix("torch."), vllm_config.device_config.device.type
    settings, config = ConnectorSettings.read(extra, dtype, device)
    engine, weights = _engine(model.model, config, worker)
    try:
        if engine.model.adapter.rope.depends_on_length:
            raise UnsupportedModelError(
                "The RoPE frequencies depend on the prompt's length; RagKVConnector needs fixed ones."
            )
        worker.cache.check(engine.model.adapter)
        prompts = PromptScheduler(engine, settings)
    except BaseException:
        engine.close()
        raise
    log.warning("%s", weights)
    where = config.store.directory or "memory; requests must name chunks that lie in Redis or S3"
    log.warning("ragkv knows %d stored chunks in %s.", prompts.known_chunks, where)
    return prompts


def _engine(name: str, config: EngineConfig, worker: Worker) -> tuple[Engine, str]:
    """The engine on vLLM's own weights where they can be shared, and a sentence that says so."""
    try:
        if config.weights != "plain" or config.adapter:
            raise UnsupportedModelError("the settings weights and adapter of ragkv change them")
        served = served_model(*worker.cache.first_layer)
        if served is None:
            raise UnsupportedModelError("its model is not found in this process")
        model = shared_model(served, config_of(name))
        engine, shared = Engine(model, load_tokenizer(name), config), ""
    except UnsupportedModelError as error:
        engine, shared = Engine.from_pretrained(name, config), str(error)
    size = sum(p.numel() * p.element_size() for p in engine.model.adapter.model.parameters()) / 1e9
    if shared:
        return (
            engine,
            f"ragkv keeps a second copy of the weights, {size:.2f} GB, because vLLM's are not shared: {shared}.",
        )
    return engine, f"ragkv computes with vLLM's own weights ({size:.2f} GB); it keeps no copy of them."


__all__ = ["RagKVConnector"]
