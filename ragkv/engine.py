"""The engine: answers questions over chunks from stored KV. The main path is `stream`, top to bottom.

Lay out the prompt -> look every chunk up -> plan -> load and fuse, layer by layer -> decode -> save what is new, in
the background. The engine holds no request's state; any number of threads may call it; passes take turns.
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from .config import EngineConfig, ReuseMode
from .encoding import EncodingClaim
from .errors import InputError, RagKVError
from .fusion import Selector
from .history import Discard
from .inference import ChunkLike, EngineParts, How, Past, Prefill, Prompt, SharedModel
from .model.decoding import generation_config
from .model.loading import READER, load
from .model.stopping import TextStream
from .runtime import Closing, openmp
from .scheduling import QueueStats, Ticket
from .sessions import Session, SessionInfo, Sessions, open_sessions
from .store import StoreStats
from .types import UNSET, Answer, Chunk, TokenEvent, Unset


@dataclass(frozen=True, slots=True)
class WarmReport:
    """What `warm` did."""

    encoded: int  # chunks computed and stored now
    present: int  # chunks that were stored already
    failed: int  # chunks that could not be stored: see the log


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine is and holds."""

    architecture: str
    layers: int
    kv_bytes_per_token: int
    store: StoreStats
    queue: QueueStats


class Engine(Closing):
    """One model, its store, and the path from question to answer."""

    def __init__(self, model: Any, tokenizer: Any | None = None, config: EngineConfig | None = None) -> None:
        """Build on a loaded transformers causal LM, on its device and in its dtype; it is put in eval mode.

        `with_config` passes a `SharedModel` instead. Raises `UnsupportedModelError` for a model whose KV cannot be
        fused exactly.
        """
        self.config = config = config or EngineConfig()
        shared = model if isinstance(model, SharedModel) else SharedModel.of(model, tokenizer, config)
        self.tokenizer = shared.tokenizer
        self.parts = EngineParts.build(shared, config)
        self._sessions = open_sessions(self.parts, config)
        # Also runs when the engine is garbage-collected or the process ends: no thread may be inside the model then.
        self._shut = weakref.finalize(self, _shut, self.parts, self._sessions)
        openmp.release_threads()  # this thread loaded and packed weights; another one may compute next

    def with_config(self, config: EngineConfig) -> Self:
        """A second engine on the same loaded model: both compute one after another and decode together.

        It has its own store and sessions and is closed by itself: give it another directory or none. `device`, `dtype`,
        `packed_bytes` and `scheduler.batch_rows` stay those of the first engine, whatever `config` says.
        """
        self._check_open()
        return type(self)(self.parts.shared.for_another_engine(), config=config)

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str], config: EngineConfig | None = None) -> Self:
        """Build on a model folder, a hub id, or `"reader"`, the bundled one, on the config's device and dtype."""
        config = config or EngineConfig()
        model, tokenizer = load(name, config.device, config.dtype)
        return cls(model, tokenizer, config)

    def chunk(self, content: str | Sequence[int], metadata: Mapping[str, Any] | None = None) -> Chunk:
        """A chunk of text or token ids; its ids are fixed here. Text gets the config's `chunk_end` appended."""
        return self.parts.intake.chunk(content, metadata)

    def count_tokens(self, text: str) -> int:
        """How many tokens `text` has, without special tokens."""
        return len(self.parts.intake.encode(text))

    @property
    def context_tokens(self) -> int | None:
        """The most tokens of a prompt and its answer; `None`: no limit is known."""
        return self.parts.adapter.context_length

    @property
    def is_reader(self) -> bool:
        """Whether the model is the bundled one, by whatever name it was loaded."""
        return str(getattr(self.tokenizer, "name_or_path", "")) == str(READER)

    @property
    def tokenizer_id(self) -> str:
        """Digest of the tokenizer: text splits the same under the same id."""
        return self.parts.encoder.identity.tokenizer

    def session(self, session_id: str, *, ttl_s: float | None = None, discard: str | Discard | None = None) -> Session:
        """The conversation of that id, new or as it stands, also after a restart if the store has a directory.

        Idle for longer than `ttl_s` it is deleted; `discard` says which tokens go when it outgrows the context (see
        `truncation.py`). What is left out is as it was, or the config's.
        """
        self._check_open()
        return self._sessions.session(session_id, ttl_s, discard)

    def sessions(self) -> tuple[SessionInfo, ...]:
        """The conversations that have turns, the last used first."""
        return self._sessions.list()

    def session_ids(self) -> tuple[str, ...]:
        """The ids of the conversations that have turns, without looking anything up: quick."""
        return self._sessions.ids()

    def delete_session(self, session_id: str) -> None:
        """Delete a conversation: its manifest, and its blocks in every tier where no other session has them."""
        self.session(session_id).delete()

    def append(
        self,
        session: Session,
        question: str | Sequence[int],
        answer: str | Sequence[int],
        chunks: Sequence[ChunkLike] = (),
        *,
        ratio: float | Unset | None = UNSET,
        selector: str | Selector | None = None,
        reuse: ReuseMode = "fused",
        deadline_s: float | None = None,
        cancel: threading.Event | None = None,
    ) -> Prefill:
        """Add a turn whose answer is given: it is computed and stored like one that was decoded, in one pass.

        Raises what `prefill` raises.
        """
        began = time.perf_counter()
        how, asked = self.parts.intake.how(ratio, selector, reuse), self.parts.intake.chunks(chunks)
        ticket = self.parts.admission.ticket(deadline_s, cancel)
        with self.parts.activity.request(), self._sessions.turn(session, ticket) as turn:
            prompt = self.parts.intake.prompt(question, asked, turn.past, 0, answer)
            prefill = self._prefill(prompt, how, 0, began, session, ticket, keep=True)
            turn.prefilled(prompt, prefill)
            turn.end()
        return prefill

    def prefill(
        self,
        question: str | Sequence[int],
        chunks: Sequence[ChunkLike] = (),
        session: Session | None = None,
        *,
        ratio: float | Unset | None = UNSET,
        selector: str | Selector | None = None,
        reuse: ReuseMode = "fused",
        deadline_s: float | None = None,
        cancel: threading.Event | None = None,
    ) -> Prefill:
        """The prompt's KV and last logits (CacheBlend section 5.2). See `Prefill` for shapes.

        `ratio` and `selector` left out are the config's; a ratio of `None` is the loading
        controller's. `reuse`: "fused", "prefix" (what is exact alone) or "none"
        (full recompute). Raises `InputError`, `PromptTooLongError`, `ConfigError`.
        """
        began = time.perf_counter()
        how, asked = self.parts.intake.how(ratio, selector, reuse), self.parts.intake.chunks(chunks)
        ticket = self.parts.admission.ticket(deadline_s, cancel)
        with self.parts.activity.request():
            prompt = self.parts.intake.prompt(question, asked, session.past if session else Past(), room=0)
            return self._prefill(prompt, how, 0, began, session, ticket)

    def answer(
        self,
        question: str | Sequence[int],
        chunks: Sequence[ChunkLike] = (),
        session: Session | None = None,
        **how: Any,
    ) -> Answer:
        """The answer to `question` over `chunks`. Takes what `stream` takes."""
        *_, answer = self.stream(question, chunks, session, **how)
        assert isinstance(answer, Answer)
        return answer

    def stream(
        self,
        question: str | Sequence[int],
        chunks: Sequence[ChunkLike] = (),
        session: Session | None = None,
        *,
        max_new_tokens: int = 64,
        stop: Sequence[str] = (),
        seed: int | None = None,
        ratio: float | Unset | None = UNSET,
        selector: str | Selector | None = None,
        reuse: ReuseMode = "fused",
        deadline_s: float | None = None,
        cancel: threading.Event | None = None,
        on_prefill: Callable[[Prefill], None] | None = None,
        **generation: Any,
    ) -> Iterator[TokenEvent | Answer]:
        """Token events, then the `Answer`. Greedy unless `do_sample=True`; `generation` is transformers' settings.

        `on_prefill` is shown the prompt once it is there, before the first event.

        Requests are admitted in the order they come, a session's in the order of its lock. `deadline_s` counts from the
        first event asked for; `cancel` calls the request off once it is set. Raises `QueueFullError`, `DeadlineError`
        and `CancelledError`; then everything it held is released and its session is as it was.
        """
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {max_new_tokens}; it must be at least 1.")
        began = time.perf_counter()
        settings, text = generation_config(generation), TextStream(self.tokenizer, stop)
        how, asked = self.parts.intake.how(ratio, selector, reuse), self.parts.intake.chunks(chunks)
        ticket = self.parts.admission.ticket(deadline_s, cancel)
        with self.parts.activity.request(), self._sessions.turn(session, ticket) as turn:
            prompt = self.parts.intake.prompt(question, asked, turn.past, max_new_tokens)
            prefill = self._prefill(prompt, how, max_new_tokens, began, session, ticket, turn.keeps)
            turn.prefilled(prompt, prefill)
            if on_prefill is not None:
                on_prefill(prefill)
            record = prefill.made.record if prefill.made else None
            for event in self.parts.generator.stream(
                prefill, asked, settings, seed, text, max_new_tokens, began, record
            ):
                if isinstance(event, TokenEvent):  # an answer that is complete is not taken back
                    ticket.check()
                turn.follow(event)
                yield event

    def warm(self, chunks: Sequence[ChunkLike], on_progress: Callable[[int, int], None] | None = None) -> WarmReport:
        """ComputeLock and store the entries of `chunks` that are not stored; returns when they are durable.

        `on_progress(done, total)` is called after each chunk.
        """
        store = self.parts.store
        asked = self.parts.intake.chunks(chunks)
        self.parts.intake.check_encodable(asked)
        unique = list(dict.fromkeys(chunk.token_ids for chunk in asked))
        waiting, left_for_later = deque(unique), set[tuple[int, ...]]()
        identity, flights = self.parts.encoder.identity, self.parts.background.single_flight
        encoded = present = failed = 0
        while waiting:
            token_ids = waiting.popleft()
            key, tokens = identity.key(token_ids), len(token_ids)
            if store.ensure_durable(identity, token_ids):
                present += 1
            else:
                flight = flights.claim(key, tokens, partial(store.ensure_durable, identity, token_ids))
                if flight is None and token_ids not in left_for_later:  # another replica encodes it: the others first
                    left_for_later.add(token_ids)
                    waiting.append(token_ids)
                    continue
                if flight is None and flights.arrived(key, tokens) and store.ensure_durable(identity, token_ids):
                    present += 1
                else:
                    stored = self._encoded(token_ids, unique, flight)
                    encoded, failed = encoded + stored, failed + (not stored)
            if on_progress:
                on_progress(len(unique) - len(waiting), len(unique))
        openmp.release_threads()  # made where entries are encoded for the store
        store.flush()  # what was present may still have been waiting to be written
        return WarmReport(encoded, present, failed)

    def delete(self, chunks: Sequence[ChunkLike]) -> int:
        """Drop the entries of `chunks` from every tier; how many of them were stored anywhere."""
        self._check_open()
        deleted, asked = 0, self.parts.intake.chunks(chunks)
        for chunk in asked:
            self.parts.background.forget(chunk.token_ids)
            deleted += bool(self.parts.store.delete(self.parts.encoder.identity, chunk.token_ids))
        self._announce([self.parts.encoder.identity.key(chunk.token_ids) for chunk in asked])
        return deleted

    def retain(self, chunks: Sequence[ChunkLike]) -> int:
        """Drop the entries of this model and application that are not of `chunks`; how many."""
        self.flush()
        mine = self.parts.encoder.identity
        kept = {mine.key(chunk.token_ids) for chunk in self.parts.intake.chunks(chunks)}
        stale = [info.key for info in self.parts.store.infos() if info.identity == mine and info.key not in kept]
        gone = sum(self.parts.store.delete_key(key) for key in stale)
        self._announce(stale)
        return gone

    def gc(self) -> int:
        """Drop the entries of other models, dtypes, adapters and tokenizers, of any tenant; the bytes freed."""
        mine = self.parts.encoder.identity
        return self.parts.store.gc(lambda other: replace(other, context=mine.context, tenant=mine.tenant) == mine)

    def stats(self) -> EngineStats:
        """What the engine is and what its store holds."""
        adapter = self.parts.adapter
        queue, store = self.parts.admission.stats(), self.parts.store.stats()
        return EngineStats(adapter.config.model_type, adapter.layer_count, adapter.kv_bytes_per_token, store, queue)

    def flush(self) -> None:
        """Return when missed chunks are encoded and everything waiting is written."""
        self.parts.background.flush()
        self._sessions.flush()
        self.parts.store.flush()

    def close(self) -> None:
        """Flush what is computed, release the store. Twice is harmless."""
        self._shut()

    def _encoded(
        self, token_ids: tuple[int, ...], among: Sequence[tuple[int, ...]], flight: EncodingClaim | None
    ) -> bool:
        """Compute the entry of a chunk, one of `among`, and store it durably; whether that succeeded."""
        stored = False
        try:
            with self.parts.activity.acquire_compute_lock():
                self.parts.encoder.register(among)
                entry = self.parts.encoder.chunk(token_ids)
            stored = self.parts.store.put_durably(entry)
        finally:
            if flight is not None:
                self.parts.background.single_flight.finish(flight, stored)
        return stored

    def _prefill(
        self,
        prompt: Prompt,
        how: How,
        room: int,
        began: float,
        session: Session | None,
        ticket: Ticket,
        keep: bool = False,
    ) -> Prefill:
        """Wait for admission and prefill; the store sees what is waited for."""
        demand = self.parts.planner.prefetch_hint(prompt, how.reuse, session.session_id if session else "")
        with self.parts.admission.admitted(demand, ticket):
            return self.parts.prefiller.prefill(prompt, how, room, began, keep, ticket.check)

    def _announce(self, deleted_keys: Sequence[str]) -> None:
        """Tell the replicas that share conversations with this engine which entries were deleted."""
        if self._sessions.shared_manifests is not None and deleted_keys:
            self._sessions.shared_manifests.announce(deleted_keys)

    def _check_open(self) -> None:
        if not self._shut.alive:
            raise RagKVError("The engine is closed; build a new one.")


def _shut(parts: EngineParts, sessions: Sessions) -> None:
    if parts.background.close():
        parts.activity.close()  # after the pass under way
        sessions.close()
        parts.store.close()
        parts.readers.close()
