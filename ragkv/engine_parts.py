"""What an engine is made of: how it is opened on a model, what it has and says of itself, and how it
is closed. A question meets none of this (`engine.py`).
"""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from .assembly import BackendMaker, assembled
from .config import EngineConfig
from .conversations import Conversations
from .entries import Entries, WarmReport
from .errors import RagKVError
from .model.loading import load
from .prompt import ChunkLike, SharedModel
from .runtime import Check, Closing, limit_kernel_caches, no_check, openmp
from .runtime.arguments import check_kind
from .scheduling import QueueStats
from .store import RemoteStats, Store, StoreStats


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine is and holds."""

    architecture: str
    layers: int
    kv_bytes_per_token: int
    dtype: str  # of weights and KV: "float32", ...
    dtype_why: str  # why that one, in a sentence
    store: StoreStats
    queue: QueueStats
    # the server of shared conversations; None: they are not shared
    sessions: RemoteStats | None = None

    @property
    def remotes(self) -> dict[str, RemoteStats]:
        """The health of everything that replicas share: remote tiers by their kind, and
        "conversations".
        """
        tiers = {
            tier.kind.value: tier.remote for tier in self.store.tiers if tier.remote is not None
        }
        return tiers if self.sessions is None else {**tiers, "conversations": self.sessions}


class EngineParts(Closing):
    """The parts of an engine, opened: the part of an `Engine` that no question needs."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any | None = None,
        config: EngineConfig | None = None,
        backend: BackendMaker | None = None,
        store: Store | None = None,
    ) -> None:
        """Build on a loaded transformers causal LM, on its device and in its dtype; it is put in
        eval mode.

        `with_config` passes a `SharedModel` instead. `backend` makes what computes the answers, if
        the model here does not. `store` is by default the one that the config describes; it is
        closed with the engine. Raises `UnsupportedModelError` for a model whose KV cannot be fused
        exactly.
        """
        check_kind("config", config, EngineConfig, type(None))
        self.config = config = config or EngineConfig()
        is_shared = isinstance(model, SharedModel)
        self.model = model if is_shared else SharedModel.of(model, tokenizer, config)
        parts = assembled(self.model, config, backend, store)
        self.intake = parts.intake
        self.store = parts.store
        self.scheduler = parts.scheduler
        self.background_turns = parts.background_turns
        self.fusor = parts.fusor
        self.controller = parts.controller
        self.profiler = parts.profiler
        self._conversations = parts.conversations
        self._entries = parts.entries
        self._backend = parts.backend
        # Also runs when the engine is garbage-collected or the process ends: no thread may be
        # inside the model then.
        self._shut = weakref.finalize(self, parts.close)
        # this thread loaded and packed weights; another one may compute next
        openmp.release_threads()

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        config: EngineConfig | None = None,
        *,
        brief: bool = False,
    ) -> Self:
        """Build on a model folder, a GGUF file, a hub id or `"smollm2"`, on the config's device and
        dtype, with the config's LoRA adapter and kind of weights.

        On a CPU the dtype "auto" is the one in which this processor computes the model fastest
        (`model/dtype_choice.py`). `brief` is for a process that computes one answer at most: it
        copies no weights where making the copies takes longer than they save in one answer.
        """
        from .model.dtype_choice import choose_dtype, copies_pay_at_once

        check_kind("name", name, str, os.PathLike)
        check_kind("config", config, EngineConfig, type(None))
        config = config or EngineConfig()
        limit_kernel_caches()  # before the first product, by which the dtype is chosen
        store_bytes = config.store.memory_bytes
        weights = config.weights
        choice = choose_dtype(
            name, config.device, config.dtype, store_bytes, config.packed_bytes, weights
        )
        if brief and not copies_pay_at_once(choice.name):
            config = replace(config, packed_bytes=0)
        model, tokenizer = load(
            name, config.device, choice.name, config.adapter, config.weights, config.packed_bytes
        )
        return cls(SharedModel.of(model, tokenizer, config, choice), config=config)

    def with_config(self, config: EngineConfig, backend: BackendMaker | None = None) -> Self:
        """A second engine on the same loaded model: both compute one after another and decode
        together.

        It has its own store and sessions and is closed by itself: give it another directory or
        none. `device`, `dtype`, `weights` and `packed_bytes` stay those of the first engine,
        whatever `config` says.
        """
        self._check_open()
        return type(self)(self.model, config=config, backend=backend)

    @property
    def tokenizer(self) -> Any | None:
        """The model's tokenizer, if it has one."""
        return self.model.tokenizer

    @property
    def entries(self) -> Entries:
        """The stored entries of chunks: encode later, delete. Raises `RagKVError` once
        closed.
        """
        self._check_open()
        return self._entries

    @property
    def conversations(self) -> Conversations:
        """All conversations: list, open, delete. Raises `RagKVError` once closed."""
        self._check_open()
        return self._conversations

    def warm(
        self,
        chunks: Sequence[ChunkLike],
        on_progress: Callable[[int, int], None] | None = None,
        check: Check = no_check,
    ) -> WarmReport:
        """Compute and store the entries of `chunks` that are not stored; returns when they are
        durable.

        `on_progress(done, total)` is called after each chunk, `check` before each, and before each
        batch of chunks that are encoded together. A `QueueError` that it raises ends the work: the
        entries made so far are durable, and the report counts the chunks that are left.
        """
        return self.entries.warm(chunks, on_progress, check)

    def delete(self, chunks: Sequence[ChunkLike]) -> int:
        """Drop the entries of `chunks` from every tier. Returns how many of them were stored
        anywhere.
        """
        return self.entries.delete(chunks)

    def stats(self) -> EngineStats:
        """What the engine is and what its store holds."""
        adapter = self.model.adapter
        choice = self.model.dtype_choice
        return EngineStats(
            architecture=adapter.config.model_type,
            layers=adapter.layer_count,
            kv_bytes_per_token=adapter.kv_bytes_per_token,
            dtype=self.model.identity.dtype,
            dtype_why=choice.why,
            store=self.store.stats(),
            queue=self.scheduler.stats(),
            sessions=self._conversations.server_stats(),
        )

    def away(self) -> tuple[str, ...]:
        """What does not answer: kinds of remote tiers, and "conversations" for the server that has
        their state.
        """
        server = self._conversations.server_stats()
        sessions = () if server is None or server.answers else ("conversations",)
        return (*self.store.away(), *sessions)

    def settle(self, cancel: threading.Event | None = None, timeout_s: float | None = None) -> None:
        """Return when missed chunks are stored, when another request begins, when `cancel` is set,
        or after `timeout_s`.
        """
        self._entries.background.settle(cancel, timeout_s)

    def flush(self) -> None:
        """Return when missed chunks are encoded and everything that waits is written."""
        self._entries.background.flush()
        self._conversations.flush()
        self.store.flush()

    def close(self) -> None:
        """Write what is computed and release the store. Calling it twice is harmless."""
        self._shut()

    def _check_open(self) -> None:
        if not self._shut.alive:
            raise RagKVError("The engine is closed; build a new one.")
