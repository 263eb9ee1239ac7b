"""The worker's half: writes fused KV into the paged cache before vLLM computes the rest of a prompt."""

import time
from typing import Any
from weakref import WeakValueDictionary

import torch

from ragkv.errors import ConfigError

from .counts import Counts
from .paged_cache import PagedCache
from .scheduler import Load

_WORKERS: "WeakValueDictionary[str, Worker]" = WeakValueDictionary()  # of this process, by the id of their vLLM engine


class Worker:
    """The paged cache of one vLLM engine, and what is written to it."""

    def __init__(self, engine_id: str) -> None:
        self.counts = Counts()
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

    def write(self, loads: tuple[Load, ...]) -> None:
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


__all__ = ["Worker", "worker_of"]
