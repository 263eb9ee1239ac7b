"""The engine: answers questions over chunks from stored KV. The main path is `stream` and `_prefill`, top to bottom.

Lay out the prompt -> look every chunk up -> plan -> load and fuse, layer by layer -> decode -> save what is new, in
the background. The engine holds no request's state; any number of threads may call it; passes take turns.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, get_args

from .citations import cite
from .config import EngineConfig, ReuseMode
from .encoding import Activity, BackgroundEncoder, Encoder
from .errors import ConfigError, EntryDamagedError, InputError, PromptTooLongError, RagKVError
from .fusion import Fused, Fusor, Plan, Selector, SpanState, make_selector
from .model import adapt
from .model.decoding import Sampler, decode, end_tokens, generation_config
from .model.fingerprint import architecture_digest, rope_digest, tokenizer_digest, weights_digest
from .model.layout import encode, template_runs
from .model.loading import load
from .model.stopping import TextStream
from .prefill import Prefill
from .prompt import Planned, Planner, Prompt
from .session import Session
from .store import Identity, Store, StoreStats, dtype_name
from .types import UNSET, Answer, Chunk, Reuse, Timing, TokenEvent, Unset

ChunkLike = Chunk | str | Sequence[int]


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


class Engine:
    """One model, its store, and the path from question to answer."""

    def __init__(self, model: Any, tokenizer: Any | None = None, config: EngineConfig | None = None) -> None:
        """Build on a loaded transformers causal LM, where it is and in the dtype it has; it is put in eval mode.

        Raises `UnsupportedModelError` for a model whose KV cannot be fused exactly.
        """
        self.config = config or EngineConfig()
        self.tokenizer = tokenizer
        self._adapter = adapt(model)
        self._runs = template_runs(tokenizer, getattr(model.config, "bos_token_id", None), self.config.prompt.system)
        self._end_tokens = end_tokens(model, tokenizer)
        self._check_ids(self._runs.before_documents)
        self._activity = Activity()
        settings, fusion = self.config.store, self.config.fusion
        make_selector(fusion.selector)  # refuses an unknown name now
        identity = self._base_identity()
        self._store = Store.open(settings, pin=self._adapter.device.type == "cuda")  # from here on nothing can fail
        self._pool = ThreadPoolExecutor(settings.reader_threads, thread_name_prefix="ragkv-reader")
        self._fusor = Fusor(self._adapter, self._pool, fusion.read_ahead_layers, fusion.seed)
        self._encoder = Encoder(self._adapter, self._fusor, self._runs.before_documents, identity)
        self._planner = Planner(self._adapter, self._encoder, self._store)
        self._background = BackgroundEncoder(self._encoder, self._store, self._activity)
        self._sessions: dict[str, Session] = {}
        self._closed = False

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str], config: EngineConfig | None = None) -> Self:
        """Build on a model folder, a hub id, or `"reader"`, the bundled one, on the config's device and dtype."""
        config = config or EngineConfig()
        model, tokenizer = load(name, config.device, config.dtype)
        return cls(model, tokenizer, config)

    def chunk(self, content: str | Sequence[int], metadata: Mapping[str, Any] | None = None) -> Chunk:
        """A chunk of text or token ids; its ids are fixed here. Text gets the config's `chunk_end` appended."""
        if isinstance(content, str):
            content += self.config.prompt.chunk_end if content else ""
        token_ids = encode(self.tokenizer, content)
        self._check_chunk(token_ids)
        return Chunk(token_ids, content if isinstance(content, str) else "", dict(metadata or {}))

    def count_tokens(self, text: str) -> int:
        """How many tokens `text` has, without special tokens."""
        return len(encode(self.tokenizer, text))

    @property
    def tokenizer_id(self) -> str:
        """Digest of the tokenizer: text splits the same under the same id."""
        return self._encoder.identity.tokenizer

    def session(self, session_id: str) -> Session:
        """The conversation of that id, new or as it stands."""
        return self._sessions.setdefault(session_id, Session(session_id))

    def prefill(
        self,
        question: str | Sequence[int],
        chunks: Sequence[ChunkLike] = (),
        session: Session | None = None,
        *,
        ratio: float | Unset | None = UNSET,
        selector: str | None = None,
        reuse: ReuseMode = "fused",
    ) -> Prefill:
        """The prompt's KV and last logits (CacheBlend section 5.2). See `Prefill` for shapes.

        `ratio` and `selector` left out are the config's. `reuse`: "fused", "prefix" (what is exact alone) or "none"
        (full recompute). Raises `InputError`, `PromptTooLongError`, `ConfigError`.
        """
        with self._activity.request():
            return self._prefill(question, self._as_chunks(chunks), session, ratio, selector, reuse, room=0)

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
        selector: str | None = None,
        reuse: ReuseMode = "fused",
        **generation: Any,
    ) -> Iterator[TokenEvent | Answer]:
        """Token events, then the `Answer`. Greedy unless `do_sample=True`; `generation` is transformers' settings."""
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {max_new_tokens}; it must be at least 1.")
        began = time.perf_counter()
        settings, text = generation_config(generation), TextStream(self.tokenizer, stop)
        with self._activity.request(), session.lock if session else nullcontext():
            asked = self._as_chunks(chunks)
            prefill = self._prefill(question, asked, session, ratio, selector, reuse, room=max_new_tokens)
            sampler = Sampler(settings, prefill.token_ids.to(self._adapter.device), self._end_tokens, seed)
            kv = prefill.fused.kv
            steps = decode(self._adapter, kv, prefill.logits, sampler, self._end_tokens, max_new_tokens)
            tokens, reason, first_s = [], "length", None
            while (token := self._step(steps)) is not None:
                first_s = first_s or time.perf_counter() - began
                if token in self._end_tokens:
                    reason = "stop"
                    break
                tokens.append(token)
                yield TokenEvent(text.add(token), token)
                if text.stopped:
                    reason = "stop"
                    break
            if rest := text.finish():
                yield TokenEvent(rest, tokens[-1])
            timing = replace(
                prefill.timing, first_token_s=first_s or 0.0, decode_s=time.perf_counter() - began - (first_s or 0.0)
            )
            if session:
                session.append(self._turn_ids(prefill, session, tokens))
            yield Answer(text.text, tuple(tokens), reason, timing, prefill.reuse, cite(text.text, asked))

    def warm(self, chunks: Sequence[ChunkLike], on_progress: Callable[[int, int], None] | None = None) -> WarmReport:
        """Compute and store the entries of `chunks` that are not stored; returns when they are durable.

        `on_progress(done, total)` is called after each chunk.
        """
        unique = list(dict.fromkeys(chunk.token_ids for chunk in self._as_chunks(chunks)))
        for token_ids in unique:
            self._check_length(len(self._runs.before_documents) + len(token_ids), 0)
        encoded = present = failed = 0
        for done, token_ids in enumerate(unique, 1):
            if self._store.contains(self._encoder.identity.key(token_ids)):
                present += 1
            else:
                with self._activity.compute:
                    self._check_open()
                    entry = self._encoder.chunk(token_ids)
                stored = self._store.put_durably(entry)
                encoded, failed = encoded + stored, failed + (not stored)
            if on_progress:
                on_progress(done, len(unique))
        self._store.flush()  # what was present may still have been waiting to be written
        return WarmReport(encoded, present, failed)

    def delete(self, chunks: Sequence[ChunkLike]) -> int:
        """Drop the entries of `chunks` from every tier; how many of them were stored anywhere."""
        self._check_open()
        deleted = 0
        for chunk in self._as_chunks(chunks):
            self._background.forget(chunk.token_ids)
            deleted += bool(self._store.delete(self._encoder.identity, chunk.token_ids))
        return deleted

    def gc(self) -> int:
        """Drop the entries of other models, dtypes, adapters and tokenizers, of any tenant; the bytes freed."""
        mine = self._encoder.identity
        return self._store.gc(lambda other: replace(other, context=mine.context, tenant=mine.tenant) == mine)

    def stats(self) -> EngineStats:
        """What the engine is and what its store holds."""
        adapter = self._adapter
        per_token = adapter.layer_count * 2 * adapter.kv_heads * adapter.head_dim * adapter.dtype.itemsize
        return EngineStats(adapter.config.model_type, adapter.layer_count, per_token, self._store.stats())

    def flush(self) -> None:
        """Return when missed chunks are encoded and everything waiting is written."""
        self._background.flush()
        self._store.flush()

    def close(self) -> None:
        """Flush what is computed, release the store. Twice is harmless."""
        if not self._closed:
            self._closed = True
            self._background.close()
            with self._activity.compute:  # after the pass under way
                self._store.close()
                self._pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prefill(
        self,
        question: str | Sequence[int],
        chunks: Sequence[Chunk],
        session: Session | None,
        ratio: float | Unset | None,
        selector: str | None,
        reuse: ReuseMode,
        room: int,
    ) -> Prefill:
        began = time.perf_counter()
        ratio, chosen = self._ratio(ratio), make_selector(self.config.fusion.selector if selector is None else selector)
        if reuse not in get_args(ReuseMode):
            raise InputError(f"reuse is {reuse!r}; it must be one of {', '.join(map(repr, get_args(ReuseMode)))}.")
        prompt = self._lay_out(question, chunks, session, room)
        damaged: dict[str, str] = {}  # entries that turned out bad while being read: misses of this request
        with self._activity.compute:
            self._check_open()
            queued = time.perf_counter()
            while True:
                with ExitStack() as leases:
                    planned = self._planner.plan(prompt, reuse, damaged, leases)
                    for index in planned.missed:  # now, so that a deletion from here on takes them out again
                        self._background.add(prompt.chunks[index])
                    looked_up = time.perf_counter()
                    try:
                        fused = self._fusor.fuse(planned.plan, chosen, ratio, room)
                        break
                    except EntryDamagedError as error:
                        damaged[error.key] = str(error)
        timing = Timing(
            queue_s=queued - began,
            lookup_s=looked_up - queued,
            load_s=fused.load_s,
            fuse_s=fused.fuse_s,
            prefill_s=fused.prefill_s,
            first_token_s=time.perf_counter() - began,
        )
        report = _report(planned, fused, ratio, chosen, self._adapter.layer_count, tuple(damaged.values()))
        return Prefill(planned.plan.token_ids, fused.selected_by_layer, fused.logits, report, timing, fused)

    def _lay_out(
        self, question: str | Sequence[int], chunks: Sequence[Chunk], session: Session | None, room: int
    ) -> Prompt:
        asked = encode(self.tokenizer, question)
        self._check_ids(asked)
        prompt = Prompt(
            prefix=self._runs.before_documents,
            history=session.token_ids if session else (),
            chunks=tuple(chunk.token_ids for chunk in chunks),
            question=asked + self._runs.after_question,
        )
        length = len(prompt.token_ids)
        if length == 0:
            raise InputError("The prompt is empty: no prefix, chunk or question.")
        self._check_length(length, room)
        return prompt

    def _check_length(self, length: int, room: int) -> None:
        limit = self._adapter.context_length
        if limit is not None and length + room > limit:
            raise PromptTooLongError(
                f"The prompt has {length} tokens and the answer may take {room}; the model's context is {limit}. "
                "Give fewer or shorter chunks, or ask for fewer new tokens."
            )

    def _ratio(self, ratio: float | Unset | None) -> float:
        if ratio is UNSET or isinstance(ratio, Unset):
            return self.config.fusion.ratio
        if ratio is None:
            raise ConfigError("ratio=None asks for the loading controller, which this version does not have: give one.")
        if not isinstance(ratio, int | float) or not 0.0 <= ratio <= 1.0:
            raise InputError(f"ratio is {ratio!r}; it is a share and must lie in [0, 1].")
        return float(ratio)

    def _as_chunks(self, chunks: Sequence[ChunkLike]) -> list[Chunk]:
        if isinstance(chunks, str | Chunk):
            raise InputError("One chunk was given where a sequence of chunks is needed: put it in a list.")
        made = [chunk if isinstance(chunk, Chunk) else self.chunk(chunk) for chunk in chunks]
        for chunk in made:
            self._check_chunk(chunk.token_ids)
        return made

    def _check_chunk(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise InputError("A chunk has no tokens; leave empty chunks out.")
        self._check_ids(token_ids)

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        vocabulary = self._adapter.vocabulary
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocabulary):
            wrong = next(token for token in token_ids if not 0 <= token < vocabulary)
            raise InputError(f"Token id {wrong} is not in the model's vocabulary of {vocabulary}.")

    def _check_open(self) -> None:
        if self._closed:
            raise RagKVError("The engine is closed; build a new one.")

    def _step(self, steps: Iterator[int]) -> int | None:
        with self._activity.compute:
            return next(steps, None)

    def _turn_ids(self, prefill: Prefill, session: Session, answer: Sequence[int]) -> tuple[int, ...]:
        before = len(self._runs.before_documents) + len(session.token_ids)
        asked = tuple(prefill.token_ids[before:].tolist())
        return asked + tuple(answer) + self._runs.after_answer + self._runs.before_next_turn

    def _base_identity(self) -> Identity:
        adapter = self._adapter
        return Identity(
            weights=weights_digest(adapter.model),
            architecture=architecture_digest(adapter),
            rope=rope_digest(adapter),
            dtype=dtype_name(adapter.dtype),
            adapter=self.config.adapter_id,
            tokenizer=tokenizer_digest(self.tokenizer),
            context="",
            tenant=self.config.store.tenant,
        )


def _report(
    planned: Planned, fused: Fused, ratio: float, selector: Selector, layers: int, notes: tuple[str, ...]
) -> Reuse:
    plan: Plan = planned.plan
    forced, recomputed = plan.forced.numel(), fused.selected_by_layer[-1].numel()
    last = plan.token_ids.numel() - 1
    exact = sum(len(span) - (span.stop - 1 == last) for span in plan.spans if span.state is SpanState.EXACT)
    return Reuse(
        exact=exact,
        fused=plan.token_ids.numel() - exact - forced - recomputed,
        recomputed=recomputed,
        computed=forced,
        bytes_by_tier=fused.bytes_by_tier,
        missed_chunks=len(planned.missed),
        ratio=ratio,
        selector=selector.name,
        compute=fused.row_layers / (layers * plan.token_ids.numel()),
        notes=notes,
    )
