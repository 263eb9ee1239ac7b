"""Exact prefix reuse, as in other engines: finds blocks of earlier prompts with the same beginning.

Requests with `reuse="prefix"` keep the KV of their prompts here, in blocks of equal length. A
block's key has a digest of all tokens before it (`history.Chain`), so a prompt finds only the
blocks with which it begins. The blocks are in memory only. The least recently used one is evicted
first.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ragkv.fusion import Span, SpanState
from ragkv.model import Recording
from ragkv.prompt.history import Chain
from ragkv.store.entry import Entry, EntryInfo, Identity
from ragkv.store.tiers import Lease, MemoryLease

from .prompt import Prompt

# Keeps the KV of a prompt that was computed exactly, for later ones that begin like it: prompt,
# digest of its RoPE frequencies, raw KV.
Keep = Callable[[Prompt, str, Recording], None]

# Shorter blocks share a little more of two prompts and cost more calls; vLLM's have 16.
BLOCK_TOKENS = 32


@dataclass(eq=False)
class PrefixBlocks:
    """The blocks of one engine's prompts."""

    identity: Identity  # the engine's; its `seen_digest` does not count
    capacity_bytes: int
    _used_bytes: int = field(default=0, init=False)
    # entries by a digest of all tokens up to the block's end
    _entries: OrderedDict[str, Entry] = field(default_factory=OrderedDict, init=False)
    _deletions: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def keeper(self) -> Keep:
        """Returns a function that keeps the blocks of a request. The request asks for it before it
        looks anything up.

        If a chunk is deleted after that, the function keeps no block: any block may have it.
        """
        return partial(self._keep, self._deletions)

    def find(self, prompt: Prompt, rope_digest: str) -> tuple[MemoryLease, ...]:
        """The blocks with which the prompt goes on after its history, without its last token."""
        found = []
        with self._lock:
            for name, _, _ in _names(prompt, rope_digest):
                entry = self._entries.get(name)
                if entry is None:
                    break
                self._entries.move_to_end(name)
                found.append(MemoryLease(entry))
        return tuple(found)

    def _keep(self, deletions: int, prompt: Prompt, rope_digest: str, record: Recording) -> None:
        """Keep the blocks of a prompt whose raw KV `record` has, unless something was deleted since
        `deletions` were counted.
        """
        layers, _, kv_heads, _, head_dim = record.kv.shape
        for name, at, ids in _names(prompt, rope_digest):
            with self._lock:
                if name in self._entries:
                    continue
            low = at - record.start
            kv = record.kv[:, :, :, low : low + len(ids)].cpu().clone()
            identity = replace(self.identity, seen_digest=name, neutral="")
            shape = (layers, kv_heads, head_dim)
            info = EntryInfo(identity.key(ids), identity, ids, rope_digest, *shape)
            self._add(name, Entry(info, kv), deletions)

    def forget(self) -> None:
        """Drop all blocks, because a deleted chunk may be in any of them."""
        with self._lock:
            self._deletions += 1
            self._entries.clear()
            self._used_bytes = 0

    def _add(self, name: str, entry: Entry, deletions: int) -> None:
        with self._lock:
            # while the block was copied, another request may have kept it
            if name in self._entries or deletions != self._deletions:
                return
            self._entries[name] = entry
            self._used_bytes += entry.info.size_bytes
            while self._used_bytes > self.capacity_bytes and self._entries:
                _, dropped = self._entries.popitem(last=False)
                self._used_bytes -= dropped.info.size_bytes


def reusing(spans: Sequence[Span], blocks: Sequence[Lease], start: int) -> list[Span]:
    """`spans` with the tokens that `blocks` hold, from position `start` on, reused exactly."""
    changed: list[Span] = []
    places = []
    for lease in blocks:
        places.append((start, start + len(lease.info.token_ids), lease))
        start = places[-1][1]
    for span in spans:
        at = span.start
        for low, high, lease in places if span.state is SpanState.COMPUTED else ():
            if max(low, at) < min(high, span.stop):
                stop = min(high, span.stop)
                exact = replace(span, start=at, stop=stop, state=SpanState.EXACT, lease=lease)
                changed.append(replace(exact, offset=at - low, why=None))
                at = stop
        if at < span.stop:
            changed.append(replace(span, start=at))
    return changed


def _names(prompt: Prompt, rope_digest: str) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Each whole block's name, first position and ids; the last token is always computed."""
    chain = Chain(prompt.prefix)
    chain.add(prompt.past_ids)
    ids = prompt.token_ids
    first = prompt.body_start
    for at in range(first, len(ids) - BLOCK_TOKENS, BLOCK_TOKENS):
        block = ids[at : at + BLOCK_TOKENS]
        chain.add(block)
        yield chain.digest(rope_digest), at, block
