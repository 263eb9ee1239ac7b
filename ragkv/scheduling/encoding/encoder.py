"""Encoding: computes chunks' KV once and makes position-free entries.

A chunk has up to two entries. The *expected* one is fused: it is encoded behind the application's
prefix and a neutral text, which is the same for all chunks, because in a prompt a chunk stands
behind other text and not at the beginning (ours; docs/selection.md). The text ships with the
package, so no words of one document are carried into the KV of another; a change of it changes the
identity of expected entries. The one *alone* is encoded behind nothing but the prefix, which gives
a chunk the attention sinks of a prompt. It is exact for a chunk that stands there, so it is made
once a prompt begins with the chunk. Neither the prefix's KV nor the text's is part of an entry.

A chunk that a request missed is encoded here later, in the background: KV that saw a particular
context is never stored under the chunk's key. (CacheBlend sections 5.1 and 6, "Managing KV cache",
stores what the request computed.) Several chunks go through the model together: few rows take
nearly as long as many (`model/token_runs.py`).
"""

import dataclasses
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.resources import files
from typing import Any

import torch

from ragkv.fusion import Scorer
from ragkv.model import PASS_ROWS, Adapter, Context, TokenRun, raw_kv
from ragkv.store import CODECS, Entry, EntryInfo, Identity, MemoryLease, Store, ids_digest

# `KEPT_PREFIXES` is how many prefix entries are kept in memory, one for each of the last sets of
# RoPE frequencies.
KEPT_PREFIXES = 4
# At most the last `NEUTRAL_TOKENS` of the text are used. Longer is a little better, and slower.
NEUTRAL_TOKENS = 1_280
# A text of which a tokenizer knows fewer than all but the share `MOST_UNKNOWN` is not used.
MOST_UNKNOWN = 0.02

log = logging.getLogger(__name__)

# Bytes per token are those of a chunk of `PER_TOKEN` tokens: codecs add some for each chunk.
PER_TOKEN = 512


class Encoder:
    """Makes the entries of chunks, and of the prefix, which it keeps in memory."""

    def __init__(
        self,
        adapter: Adapter,
        prefix_ids: tuple[int, ...],
        identity: Identity,
        scorer: Scorer | None = None,
        between: Callable[[], None] = lambda: None,
        *,
        neutral_ids: tuple[int, ...] = (),
        codec: str = "raw",
        contexts: MutableMapping[tuple[int, ...], Context] | None = None,
        makes_scores: bool = True,
    ) -> None:
        """Chunks that are fused are encoded behind `neutral_ids`, and stored in `codec`; without
        them all are alone.

        `contexts` keeps the KV of prefix and neutral text, for all encoders on one model. The
        caller of what encodes holds its compute lock.

        With a `scorer` chunks are scored, from the start if `makes_scores`, else once `make_scores`
        was called.

        `between` is called between layers: other requests may decode a step, and other tenants may
        compute.
        """
        self._adapter = adapter
        self.prefix_ids = prefix_ids
        self._between = between
        self.scorer = scorer
        self._makes_scores = makes_scores
        # of chunks encoded alone
        self.alone = dataclasses.replace(identity, context=ids_digest(prefix_ids))
        # `identity` is that of the chunks that are fused.
        expected = dataclasses.replace(self.alone, behind=ids_digest(neutral_ids), codec=codec)
        self.identity = expected if neutral_ids else self.alone
        self._neutral_ids = neutral_ids
        self._contexts = {} if contexts is None else contexts
        self._prefixes: OrderedDict[str, Entry] = OrderedDict()  # by frequencies
        self._lock = threading.Lock()
        # so many tokens of chunks are encoded together
        self.batch_tokens = PASS_ROWS[adapter.device.type]

    @property
    def identities(self) -> tuple[Identity, ...]:
        """Of all entries that a chunk may have."""
        return tuple(dict.fromkeys((self.identity, self.alone)))

    def preferred(self, *, is_exact: bool) -> tuple[Identity, ...]:
        """The same, best first, for a chunk whose entry alone would be exact or not. A rounded one
        is exact nowhere.
        """
        return (
            self.identities[::-1]
            if is_exact and CODECS[self.alone.codec].lossless
            else self.identities
        )

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a token's KV as it is stored: a codec may make it smaller."""
        return self.entry_bytes(PER_TOKEN) // PER_TOKEN

    def entry_bytes(self, tokens: int, identity: Identity | None = None) -> int:
        """Stored bytes of an entry, by default of a chunk to be fused."""
        layout = CODECS[(identity or self.identity).codec].layout(
            (2, self._adapter.kv_heads, tokens, self._adapter.head_dim), self._adapter.dtype
        )
        return self._adapter.layer_count * layout.nbytes

    @property
    def makes_scores(self) -> bool:
        """Whether chunks are scored, which takes longer than encoding them."""
        return self.scorer is not None and self._makes_scores

    @property
    def scores_identity(self) -> Identity:
        """Of the scores that lie next to the entries of chunks; there must be a scorer."""
        assert self.scorer is not None, "this encoder has no scorer"
        return dataclasses.replace(self.identity, scorer=self.scorer.name)

    @property
    def measured_as(self) -> Identity:
        """What measurements of fusion are saved under: the chunks' identity, and how they are
        scored.
        """
        return dataclasses.replace(self.identity, scorer=self.scorer.made_as if self.scorer else "")

    def make_scores(self) -> None:
        """Score chunks from now on, because a selector is used that needs scores."""
        self._makes_scores = True

    def prefix(
        self, length: int, compute_lock: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> MemoryLease | None:
        """The prefix's KV with the RoPE frequencies of a prompt of `length` tokens; `None` if there
        is no prefix.

        `compute_lock` acquires the lock if the prefix must be encoded; by default the caller holds
        it.
        """
        if not self.prefix_ids:
            return None
        frequencies = self._adapter.rope.frequencies(length)
        with self._lock:
            entry = self._prefixes.get(frequencies)
        if entry is None:
            if self._adapter.rope.frequencies(len(self.prefix_ids)) != frequencies:
                # only a prompt of that length has these frequencies, so the prompt computes the
                # prefix
                return None
            with compute_lock():
                (kv,) = raw_kv(self._adapter, [TokenRun(self.prefix_ids)], self._between)
                identity = dataclasses.replace(self.alone, context=ids_digest(()))
                entry = self._entry(self.prefix_ids, kv, identity, len(self.prefix_ids))
            with self._lock:
                self._prefixes[frequencies] = entry
                if len(self._prefixes) > KEPT_PREFIXES:
                    self._prefixes.popitem(last=False)
        return MemoryLease(entry)

    def chunks(
        self, chunks: Sequence[tuple[int, ...]], identity: Identity | None = None
    ) -> list[Entry]:
        """The entries of chunks that go through the model together. The caller holds the compute
        lock.

        `identity` is one of `identities`; by default the first. A cancelled request ends it between
        two layers.
        """
        identity = identity or self.identity
        made = self._behind_neutral_text if identity.behind else self._behind_prefix
        runs = [made(token_ids) for token_ids in chunks]
        found = raw_kv(self._adapter, runs, self._between)
        return [
            self._entry(ids, kv, identity, run.stop)
            for ids, kv, run in zip(chunks, found, runs, strict=True)
        ]

    def scores(self, entries: Sequence[Entry]) -> list[Entry]:
        """The scores to be put next to the entries of chunks; none if it makes no scores.

        The caller holds the compute lock.
        """
        scorer = self.scorer
        if scorer is None or not self._makes_scores:
            return []
        scores = scorer.scores(
            [entry.info.token_ids for entry in entries], [entry.kv for entry in entries]
        )
        return [
            Entry.of_scores(entry.info, scorer.name, own)
            for entry, own in zip(entries, scores, strict=True)
        ]

    def register(self, chunks: Sequence[tuple[int, ...]]) -> None:
        """Announce chunks to be encoded, so that the scorer may use them. The caller holds the
        compute lock.
        """
        if self.scorer is not None and self.makes_scores:
            self.scorer.register(chunks)

    def _behind_prefix(self, token_ids: tuple[int, ...]) -> TokenRun:
        before = len(self.prefix_ids)
        lease = self.prefix(before + len(token_ids))
        if lease is None:  # the prefix has other KV in a prompt of this length
            return TokenRun(self.prefix_ids + token_ids, skip=before)
        return TokenRun(token_ids, Context((lease.read_encoded().layers,)))

    def _behind_neutral_text(self, token_ids: tuple[int, ...]) -> TokenRun:
        """Behind as much of the neutral text as leaves room for the chunk in the model's
        context.
        """
        limit = self._adapter.context_length
        before = (self.prefix_ids + self._neutral_ids)[:limit]
        if before not in self._contexts:
            (kv,) = raw_kv(self._adapter, [TokenRun(before)], self._between)
            self._contexts[before] = Context((kv,))
        context = self._contexts[before]
        return TokenRun(
            token_ids, context if limit is None else context.cut(limit - len(token_ids))
        )

    def _entry(
        self, token_ids: tuple[int, ...], kv: torch.Tensor, identity: Identity, stop: int
    ) -> Entry:
        """`stop` is the length of what was encoded, with all that stood before."""
        frequencies = self._adapter.rope.frequencies(stop)
        shape = self._adapter.kv_shape
        return Entry(
            EntryInfo(identity.key(token_ids), identity, token_ids, frequencies, *shape), kv.cpu()
        )


class StoredScores:
    """Scores of one encoder's chunks in a store."""

    def __init__(self, encoder: Encoder, store: Store) -> None:
        self._encoder = encoder
        self._store = store

    def find(self, token_ids: tuple[int, ...]) -> torch.Tensor | None:
        """The scores (T, 1 + C) of a stored chunk; `None` if it has none, or the encoder makes
        none.
        """
        scorer = self._encoder.scorer
        if scorer is None or not self._encoder.makes_scores:
            return None
        scores = self._store.scores(self._encoder.scores_identity, token_ids)
        # anyone may write to a server
        fits = scores is not None and scores.shape == (len(token_ids), scorer.columns)
        return scores if fits else None

    def lacking(self, token_ids: tuple[int, ...]) -> bool:
        """Whether the encoder makes scores, and this chunk has none."""
        return self._encoder.makes_scores and self.find(token_ids) is None


def neutral_ids(tokenizer: Any | None) -> tuple[int, ...]:
    """The text's token ids; none without a tokenizer, or with one that does not know its words.

    Where there are none, chunks are encoded alone, and the log says so.
    """
    if tokenizer is None:
        log.info("Without a tokenizer there is no neutral text: chunks are encoded alone.")
        return ()
    text = files(__package__).joinpath("neutral_text.txt").read_text("utf-8").strip() + "\n\n"
    ids = tuple(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    unknown = 0 if tokenizer.unk_token_id is None else ids.count(tokenizer.unk_token_id)
    if unknown > MOST_UNKNOWN * len(ids):
        log.info(
            "The tokenizer does not know %d of %d neutral tokens: chunks are encoded alone.",
            unknown,
            len(ids),
        )
        return ()
    return ids[-NEUTRAL_TOKENS:]
