"""Encoding: computes a chunk's KV once, behind nothing but the application's prefix, and makes a position-free entry.

The prefix gives a chunk the attention sinks it will have in a prompt; the prefix's KV is not part of the entry. A chunk
that a request missed is encoded here later, in the background: KV that saw a particular context is never stored under
the chunk's key. (CacheBlend sections 5.1 and 6, "Managing KV cache", stores what the request computed.)
"""

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from ragkv.fusion import Fusor, Plan, ResidentLease, Scorer, Span, SpanKind, SpanState, make_selector
from ragkv.model import Adapter
from ragkv.store import Entry, EntryInfo, Identity, ids_digest

KEPT_PREFIXES = 4  # prefix entries kept in memory, one for each of the last sets of RoPE frequencies


class Encoder:
    """Makes the entries of chunks, and of the prefix, which it keeps in memory."""

    def __init__(
        self,
        adapter: Adapter,
        fusor: Fusor,
        prefix_ids: tuple[int, ...],
        identity: Identity,
        scorer: Scorer | None = None,
        between: Callable[[], None] = lambda: None,
        *,
        makes_scores: bool = True,
    ) -> None:
        """With a `scorer` chunks are scored, from the start if `makes_scores`, else once `make_scores` was called.

        `between` is called between layers: other requests may decode a step, and other tenants may compute.
        """
        self._adapter, self._fusor, self.prefix_ids, self._between = adapter, fusor, prefix_ids, between
        self.scorer, self._makes_scores = scorer, makes_scores
        network = scorer.network_digest if scorer else ""  # scores of different networks must not be compared
        self.identity = dataclasses.replace(identity, context=ids_digest(prefix_ids), scorer=network)  # of chunks
        self._prefixes: OrderedDict[str, Entry] = OrderedDict()  # by frequencies
        self._lock = threading.Lock()

    @property
    def makes_scores(self) -> bool:
        """Whether chunks are scored, which takes twice as long as encoding them."""
        return self.scorer is not None and self._makes_scores

    def make_scores(self) -> None:
        """Score chunks from now on, because a selector is used that needs scores."""
        self._makes_scores = True

    def prefix(
        self, length: int, compute_lock: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> ResidentLease | None:
        """The prefix's KV with the RoPE frequencies of a prompt of `length` tokens; `None` if there is no prefix.

        `compute_lock` acquires the lock if the prefix must be encoded; by default the caller holds it.
        """
        if not self.prefix_ids:
            return None
        frequencies = self._adapter.rope.frequencies(length)
        with self._lock:
            entry = self._prefixes.get(frequencies)
        if entry is None:
            if self._adapter.rope.frequencies(len(self.prefix_ids)) != frequencies:
                return None  # only a prompt of that length has these frequencies, so the prompt computes the prefix
            with compute_lock():
                entry = self._encode(self.prefix_ids, behind=())
            with self._lock:
                self._prefixes[frequencies] = entry
                if len(self._prefixes) > KEPT_PREFIXES:
                    self._prefixes.popitem(last=False)
        return ResidentLease(entry)

    def chunk(self, token_ids: tuple[int, ...]) -> Entry:
        """The entry of a chunk, with scores if it `makes_scores`. The caller holds the compute lock."""
        entry = self._encode(token_ids, behind=self.prefix_ids)
        if self.scorer is None or not self.makes_scores:
            return entry
        return dataclasses.replace(entry, sensitivity=self.scorer.scores(token_ids, entry.kv))

    def training_sample(self, token_ids: tuple[int, ...]) -> tuple[Entry, list[torch.Tensor]]:
        """A chunk's entry without scores, and its KV behind the scorer's texts, to train scores on."""
        assert self.scorer is not None, "this encoder has no scorer"
        return self._encode(token_ids, behind=self.prefix_ids), self.scorer.kv_behind_texts(token_ids)

    def register(self, chunks: Sequence[tuple[int, ...]]) -> None:
        """Announce chunks to be encoded, so that the scorer may use them. The caller holds the compute lock."""
        if self.scorer is not None and self.makes_scores:
            self.scorer.register(chunks)

    def _encode(self, token_ids: tuple[int, ...], behind: tuple[int, ...]) -> Entry:
        start, stop = len(behind), len(behind) + len(token_ids)
        spans = []
        if behind:
            lease = self.prefix(stop)
            state = SpanState.COMPUTED if lease is None else SpanState.EXACT
            spans.append(Span(SpanKind.PREFIX, 0, start, state, lease))
        spans.append(Span(SpanKind.CHUNK, start, stop, SpanState.COMPUTED))
        record = self._adapter.new_recording(start, stop)
        plan = Plan.of(torch.tensor(behind + token_ids), spans)
        with self._fusor.open(plan, make_selector("none"), 0.0) as fusing:
            fusing.run(record=record, between=self._between)
        identity = dataclasses.replace(self.identity, context=ids_digest(behind))
        info = EntryInfo(
            key=identity.key(token_ids),
            identity=identity,
            token_ids=token_ids,
            frequencies=self._adapter.rope.frequencies(stop),
            layers=self._adapter.layer_count,
            kv_heads=self._adapter.kv_heads,
            head_dim=self._adapter.head_dim,
        )
        return Entry(info, record.kv.cpu())


__all__ = ["Encoder"]
