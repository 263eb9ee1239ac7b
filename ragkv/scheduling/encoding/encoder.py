"""Encoding: computes chunks' KV once and makes position-free entries.

A chunk is encoded behind the application's prefix and a neutral text. In a prompt a chunk follows
other text, so this is the KV to expect of it (ours; docs/research/selection.md). The text ships with the
package, so no words of one document are carried into the KV of another. A changed text changes the
identity of entries. With an empty neutral text chunks are encoded directly after the prefix, as in
the papers. Neither the prefix's KV nor the text's is part of an entry.

A chunk that a request missed is encoded here later, in the background: KV that saw a particular
context is never stored under the chunk's key. (CacheBlend sections 5.1 and 6, "Managing KV cache",
stores what the request computed.) Several chunks go through the model together: few rows take
nearly as long as many (`model/token_runs.py`).
"""

import dataclasses
import logging
from collections.abc import Callable, MutableMapping, Sequence
from importlib.resources import files
from typing import Any

import torch

from ragkv.model import PASS_ROWS, Adapter, Context, TokenRun, raw_kv
from ragkv.model.rows import Pause, no_pause
from ragkv.store import Entry, EntryInfo, Identity, MemoryLease, ids_digest, stored_bytes

# The end of the text is used. A longer text is a little better, and slower to encode with.
NEUTRAL_TOKENS = 1_280
# the share of the text's tokens that a tokenizer may not know; beyond it there is no neutral text
MOST_UNKNOWN = 0.02

# Each engine uses two: its prefix when it is built, and then the prefix with the text.
KEPT_CONTEXTS = 8

log = logging.getLogger(__name__)

# Bytes per token are reported for a chunk of this length: codecs add bytes for each chunk.
PER_TOKEN = 512


class Encoder:
    """Makes the entries of chunks, and of the prefix."""

    def __init__(
        self,
        adapter: Adapter,
        prefix_ids: tuple[int, ...],
        identity: Identity,
        between: Pause = no_pause,
        *,
        neutral_ids: tuple[int, ...] = (),
        contexts: MutableMapping[tuple[int, ...], Context] | None = None,
    ) -> None:
        """Chunks are encoded behind `prefix_ids` and `neutral_ids`; `identity` has the rest.

        `contexts` keeps the KV of prefix and neutral text, for all encoders on one model. The
        caller of what encodes holds its compute lock. `between` is called between layers, so that
        others may compute.
        """
        self._adapter = adapter
        self.prefix_ids = prefix_ids
        self._between = between
        self.identity = dataclasses.replace(
            identity,
            context=ids_digest(prefix_ids),
            behind=ids_digest(neutral_ids) if neutral_ids else "",
        )
        self._neutral_ids = neutral_ids
        self._contexts = {} if contexts is None else contexts
        # the tokens of chunks that are encoded together
        self.batch_tokens = PASS_ROWS[adapter.device.type]

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a token's KV as it is stored: a codec may make it smaller."""
        return self.entry_bytes(PER_TOKEN) // PER_TOKEN

    def entry_bytes(self, tokens: int) -> int:
        """Stored bytes of a chunk's entry."""
        adapter = self._adapter
        return stored_bytes(self.identity.codec, tokens, *adapter.kv_shape, adapter.dtype)

    def prefix(self) -> MemoryLease | None:
        """The prefix's KV with the RoPE frequencies of its own length; `None` if there is no prefix,
        or no room behind it.

        The caller holds the compute lock.
        """
        limit = self._adapter.context_length
        if not self.prefix_ids or (limit is not None and len(self.prefix_ids) >= limit):
            return None
        (kv,) = self._context(self.prefix_ids).pieces
        identity = dataclasses.replace(self.identity, context=ids_digest(()), behind="")
        return MemoryLease(self._entry(self.prefix_ids, kv, identity, len(self.prefix_ids)))

    def chunks(
        self, chunks: Sequence[tuple[int, ...]], check: Callable[[], None] = no_pause
    ) -> list[Entry]:
        """The entries of chunks that go through the model together.

        The caller holds the compute lock. What `check` raises between two layers ends the work.
        """

        def between() -> None:
            check()
            self._between()

        runs = list(map(self._run, chunks))
        found = raw_kv(self._adapter, runs, between)
        return [
            self._entry(ids, kv, self.identity, run.stop)
            for ids, kv, run in zip(chunks, found, runs, strict=True)
        ]

    def _run(self, token_ids: tuple[int, ...]) -> TokenRun:
        """A chunk behind prefix and neutral text, or as much of it as leaves room for the chunk in
        the model's context.
        """
        limit = self._adapter.context_length
        before = (self.prefix_ids + self._neutral_ids)[:limit]
        if not before:
            return TokenRun(token_ids)
        frequencies = self._adapter.rope.frequencies
        length = len(before) + len(token_ids)
        if not self._neutral_ids and frequencies(len(before)) != frequencies(length):
            # the prefix has other KV in a prompt of this length
            return TokenRun(before + token_ids, skip=len(before))
        context = self._context(before)
        return TokenRun(
            token_ids, context if limit is None else context.cut(limit - len(token_ids))
        )

    def _context(self, before: tuple[int, ...]) -> Context:
        """The KV of what stands before chunks, computed once for all engines on the model while it
        is one of the `KEPT_CONTEXTS` used last.
        """
        context = self._contexts.pop(before, None)
        if context is None:
            (kv,) = raw_kv(self._adapter, [TokenRun(before)], self._between)
            context = Context((kv,))
        self._contexts[before] = context  # at the end: it was used last
        while len(self._contexts) > KEPT_CONTEXTS:
            self._contexts.pop(next(iter(self._contexts)), None)
        return context

    def _entry(
        self, token_ids: tuple[int, ...], kv: torch.Tensor, identity: Identity, stop: int
    ) -> Entry:
        """`stop` is the length of what was encoded, with all that stood before."""
        frequencies = self._adapter.rope.frequencies(stop)
        shape = self._adapter.kv_shape
        return Entry(
            EntryInfo(identity.key(token_ids), identity, token_ids, frequencies, *shape), kv.cpu()
        )


def neutral_ids(tokenizer: Any | None) -> tuple[int, ...]:
    """The text's token ids; none without a tokenizer, or with one that does not know its words.

    Without them chunks are encoded directly after the prefix, and the log says so.
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
