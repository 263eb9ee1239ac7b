"""Encoding: computes a chunk's KV once and makes a position-free entry of it.

A chunk is encoded after the application's prefix and a neutral text. In a prompt a chunk also
follows other text, so this is its expected KV (ours; docs/research/selection.md). The neutral text
ships with the package, so no words of one document enter the KV of another. Another neutral text
changes the identity of entries. With an empty one, chunks are encoded directly after the prefix, as
in the papers. An entry holds neither the prefix's KV nor the neutral text's.

After a cache miss a chunk is encoded here in the background. The KV that the request computed is
not stored under the chunk's key, because it saw the context of that prompt. CacheBlend stores what
the request computed (sections 5.1 and 6, "Managing KV cache"). Several chunks go through the model
together, because few rows take nearly as long as many (`model/token_runs.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ragkv.model import PASS_ROWS, Adapter, TokenRun, raw_kv
from ragkv.model.rows import Pause
from ragkv.runtime import no_check
from ragkv.store.codecs import stored_bytes
from ragkv.store.entry import Entry, EntryInfo, Identity

from .contexts import Contexts

# Bytes per token are reported for a chunk of this length: codecs add bytes for each chunk.
PER_TOKEN = 512


@dataclass(eq=False)
class Encoder:
    """Makes the entries of chunks."""

    adapter: Adapter
    identity: Identity  # that of the entries
    prefix_ids: tuple[int, ...]  # the tokens before the neutral text
    neutral_ids: tuple[int, ...]
    contexts: Contexts  # the KV of both, which may be computed under the caller's compute lock
    between: Pause = no_check  # called between layers, so that others may compute

    @property
    def batch_tokens(self) -> int:
        """The tokens of chunks that are encoded together."""
        return PASS_ROWS[self.adapter.device.type]

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a token's KV as it is stored: a codec may make it smaller."""
        return self.entry_bytes(PER_TOKEN) // PER_TOKEN

    def entry_bytes(self, tokens: int) -> int:
        """Stored bytes of a chunk's entry."""
        adapter = self.adapter
        return stored_bytes(self.identity.codec, tokens, *adapter.kv_shape, adapter.dtype)

    def chunks(
        self, chunks: Sequence[tuple[int, ...]], check: Callable[[], None] = no_check
    ) -> list[Entry]:
        """The entries of chunks that go through the model together.

        The caller holds the compute lock. What `check` raises between two layers ends the work.
        """

        def between() -> None:
            check()
            self.between()

        runs = list(map(self._run, chunks))
        found = raw_kv(self.adapter, runs, between)
        return [
            self._entry(ids, kv, run.stop) for ids, kv, run in zip(chunks, found, runs, strict=True)
        ]

    def _run(self, token_ids: tuple[int, ...]) -> TokenRun:
        """A chunk behind prefix and neutral text, or as much of it as leaves room for the chunk in
        the model's context.
        """
        limit = self.adapter.context_length
        before = (self.prefix_ids + self.neutral_ids)[:limit]
        if not before:
            return TokenRun(token_ids)
        digest = self.adapter.rope.digest
        length = len(before) + len(token_ids)
        if not self.neutral_ids and digest(len(before)) != digest(length):
            # the prefix has other KV in a prompt of this length
            return TokenRun(before + token_ids, skip=len(before))
        context = self.contexts.of(before, self.between)
        return TokenRun(
            token_ids, context if limit is None else context.shortened(limit - len(token_ids))
        )

    def _entry(self, token_ids: tuple[int, ...], kv: torch.Tensor, stop: int) -> Entry:
        """`stop` is the length of what was encoded, with all that stood before."""
        identity = self.identity
        rope_digest = self.adapter.rope.digest(stop)
        shape = self.adapter.kv_shape
        return Entry(
            EntryInfo(identity.key(token_ids), identity, token_ids, rope_digest, *shape), kv.cpu()
        )
