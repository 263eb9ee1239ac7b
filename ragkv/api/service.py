"""What the routes work with: the model, the tenants on it, and the threads that work is done on."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request

from ragkv.config import EngineConfig
from ragkv.engine import Engine, EngineStats
from ragkv.rag import DOCUMENT_END
from ragkv.retrieval import Embedder, resolve_embedder
from ragkv.runtime import Closing

from .errors import ApiError
from .keys import Principal
from .settings import ServeConfig
from .tenants import Tenant, Tenants
from .work import Desk

log = logging.getLogger(__name__)

HOUSE_THREADS = 4  # for what is no answer: ingesting, listing, searching


class Loaded(Closing):
    """The model, loaded, and everything over it."""

    def __init__(self, config: ServeConfig, model: Engine, embedder: Embedder | None) -> None:
        """`model` is closed with this."""
        self.model, self.embedder = model, embedder
        prompt = config.engine.prompt
        if not model.is_reader and not prompt.chunk_end:
            prompt = replace(prompt, chunk_end=DOCUMENT_END)
        self.tenants = Tenants(replace(config, engine=replace(config.engine, prompt=prompt)), model, embedder)

    def close(self) -> None:
        """Flush and close every tenant, then the model. Twice is harmless."""
        self.tenants.close()
        self.model.close()


class Service(Closing):
    """One server's. Routes find it by `Here`."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.began = int(time.time())
        self.answers = Desk("answer", config.queue.limit, config.queue.deadline_s)
        self.house = Desk("house", config.queue.limit, None, HOUSE_THREADS)
        self._loaded: Loaded | None = None
        self._lock = threading.Lock()

    @property
    def model_id(self) -> str:
        """What the model is called."""
        return Path(self.config.model).name if Path(self.config.model).is_absolute() else self.config.model

    @property
    def loaded(self) -> Loaded:
        """The model and the tenants; raises `ApiError` 503 before they are there."""
        if self._loaded is None:
            raise ApiError(503, "The model is being loaded. Ask again.", code="not_ready", retry_after_s=2)
        return self._loaded

    def load(self, model: Engine | None = None, embedder: Embedder | None = None) -> None:
        """Load the model and the embedder, or take those given. Blocks. Raises what loading raises."""
        Path(self.config.home).mkdir(parents=True, exist_ok=True, mode=0o700)
        if model is None:
            _quiet_transformers()
            asked = self.config.engine
            settings = EngineConfig(device=asked.device, dtype=asked.dtype, scheduler=asked.scheduler)
            settings = replace(settings, packed_bytes=asked.packed_bytes)
            settings = replace(settings, store=replace(settings.store, memory_bytes=0))
            model = Engine.from_pretrained(self.config.model, settings)
            embedder = embedder or resolve_embedder(device=settings.device)
        with self._lock:
            self._loaded = Loaded(self.config, model, embedder)

    @contextmanager
    def tenant(self, principal: Principal) -> Iterator[Tenant]:
        """The principal's tenant, held open. Blocks: for worker threads."""
        with self.loaded.tenants.lease(principal) as tenant:
            yield tenant

    def stats(self) -> Sequence[tuple[str, EngineStats, int]]:
        """What the open tenants hold: name, engine, conversations. Opens none, and is quick."""
        return [] if self._loaded is None else self._loaded.tenants.stats()

    def directories(self) -> Sequence[Path]:
        """Where the open tenants keep their KV; before any is open, the data directory."""
        opened = [] if self._loaded is None else self._loaded.tenants.directories()
        return opened or [Path(self.config.home)]

    def close(self) -> None:
        """End what is under way, then flush and close everything. Blocks. Twice is harmless."""
        self.answers.close()
        self.house.close()
        if self._loaded is not None:
            self._loaded.close()


def _quiet_transformers() -> None:
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _principal(request: Request) -> Principal:
    principal: Any = request.state.principal
    assert isinstance(principal, Principal), "a route stands behind the Doorkeeper"
    return principal


Here = Annotated[Service, Depends(_service)]
Who = Annotated[Principal, Depends(_principal)]

__all__ = ["Here", "Loaded", "Service", "Who"]
