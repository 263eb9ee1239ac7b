"""The state that all requests of one app share: keys, rates, metrics, the tenants on the loaded
model, and the pools that do their work. It is `app.state.service`.
"""

import logging
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ragkv.config import EngineConfig, StoreConfig
from ragkv.engine import Engine
from ragkv.home import kept_at
from ragkv.model.loading import quiet_transformers
from ragkv.retrieval import Embedder, resolve_embedder
from ragkv.runtime import Closing, make_private_folder, server_file
from ragkv.vllm.front import VllmServer

from .documents.parser import DocumentParser
from .keys import ANONYMOUS, KeyRing
from .limits import RateLimiter
from .metrics import Metrics, TenantStats
from .settings import ServeConfig
from .tenants import Tenants
from .work import RequestPool

log = logging.getLogger(__name__)

VLLM_KEY_VARIABLE = "VLLM_API_KEY"  # This variable has the key of the vLLM server, if it has one.


class Service(Closing):
    """The state behind the routes of one server."""

    def __init__(self, config: ServeConfig, replica: str | None = None) -> None:
        """`replica` names this process in logs, headers and stats; `None`: a random word."""
        self.config = config
        self.replica = replica or secrets.token_hex(4)
        self.created = int(time.time())
        path = Path(config.model)
        # the model's name: its hub id, or its folder's name
        self.model_id = path.name if path.is_absolute() else config.model
        queue = config.queue
        self.answer_pool = RequestPool(queue, queue.limit, queue.tenant_limit, queue.deadline_s)
        # Ingesting, searching, embedding, listing:
        self.data_pool = RequestPool(
            queue, queue.data_requests, queue.tenant_data_requests, queue.data_deadline_s
        )
        self.parser = DocumentParser(config.parsing)
        self.tenants: Tenants | None = None  # on the loaded model; None: it is being loaded
        self.vllm: VllmServer | None = None  # computes the answers; None: this process does
        if config.in_front_of_vllm:
            key = os.environ.get(VLLM_KEY_VARIABLE, "")
            self.vllm = VllmServer(config.vllm.url, key, timeout_s=config.vllm.timeout_s)
        # Why requests are refused; None: they are accepted.
        self.unavailable_reason: str | None = server_file.LOADING
        self.keys = KeyRing(config.keys_path)
        self.limiter = RateLimiter()
        self.metrics = Metrics(self.tenant_stats, self.replica, self.vllm)

    def load(self, engine: Engine | None = None, embedder: Embedder | None = None) -> None:
        """Load the model and the embedder, unless they are given. Blocks. Raises what loading
        raises.
        """
        make_private_folder(Path(self.config.home))
        config = self.config.engine
        if engine is None:
            quiet_transformers()
            settings = EngineConfig(
                device=config.device,
                dtype=config.dtype,
                adapter=config.adapter,
                weights=config.weights,
                scheduler=config.scheduler,
                packed_bytes=config.packed_bytes,
                # the tenants' stores take it, not this one
                store=StoreConfig(memory_bytes=config.store.memory_bytes),
            )
            engine = Engine.from_pretrained(self.config.model, settings)
            engine.model.grammars.load()
            embedder = embedder or resolve_embedder(
                kept_at(self.config.home).get("embedder"), device=settings.device
            )
        if embedder is not None:
            # or the first question would wait for it, on a server that said it was ready
            embedder.load()
        if self.vllm is not None:
            self.vllm.identity = engine.model.identity
            # Prompts wait in vLLM's queue and not in this one.
            workers = max(config.scheduler.workers, self.config.queue.limit)
            config = replace(config, scheduler=replace(config.scheduler, workers=workers))
        tenants = Tenants(replace(self.config, engine=config), engine, embedder, self.vllm)
        if self.vllm is not None:
            # its directory exists from now on: vLLM's connector reads it
            with tenants.use(ANONYMOUS):
                pass
        self.tenants = tenants

    def tenant_stats(self) -> Sequence[TenantStats]:
        """The stats of the open tenants. Opens no tenant, and is fast."""
        return [] if self.tenants is None else self.tenants.stats()

    def away(self) -> Sequence[str]:
        """What the open tenants share with other replicas and does not answer, as in
        `EngineStats.away`.
        """
        opened = {} if self.tenants is None else self.tenants.opened()
        return sorted({name for tenant in opened.values() for name in tenant.engine.stats().away})

    def cancel_all(self) -> None:
        """Accept no more work, and cancel what is running: it ends at its next check."""
        self.answer_pool.cancel_all()
        self.data_pool.cancel_all()

    def close(self) -> None:
        """Cancel running work, then flush and close everything. Blocks; work that does not end is
        left behind.
        """
        self.cancel_all()
        ends = time.monotonic() + self.config.close_s / 4
        ended = [
            pool.close(max(0.0, ends - time.monotonic()))
            for pool in (self.answer_pool, self.data_pool)
        ]
        if not all(ended):
            log.error("work_left_running")  # nothing of it was acknowledged
        if self.tenants is not None:
            self.tenants.close()
        if self.vllm is not None:
            self.vllm.close()
