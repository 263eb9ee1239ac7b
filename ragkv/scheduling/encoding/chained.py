"""Chained entries: the KV of chunks behind other chunks, exact where the same chunks precede them in a prompt.

Only runs of chunks right behind the application's prefix are chained: what is exact is decided by a digest of the ids
between the prefix and the chunk. The order of a prompt's chunks that reuses the longest stored chain, with duplicates
dropped, is the idea of ContextPilot; there a request's order is found in a tree of earlier prompts, here by looking up
what is stored. Chained entries are stored on this machine alone, at most `store.chained_entries` of one chunk.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ragkv.errors import EntryDamagedError
from ragkv.store import CODECS, Entry, Identity, Lease, Store, ids_bytes

from .encoder import Encoder

Ids = tuple[int, ...]


class ChainedEntries:
    """The chained entries of one encoder's chunks in a store. Holds no request's state."""

    def __init__(self, encoder: Encoder, store: Store, most: int) -> None:
        """`most` of one chunk are stored; 0: none are made, and none are looked up."""
        self._encoder, self._store, self.most = encoder, store, most

    @property
    def used(self) -> bool:
        """Whether they are looked up: not with a codec that rounds, because then no entry is exact."""
        return self.most > 0 and CODECS[self._encoder.identity.codec].lossless

    @property
    def made(self) -> bool:
        """Whether they are made."""
        return self.used and not self._store.read_only

    def identity(self, before: Sequence[Ids]) -> Identity:
        """The identity of a chunk behind the chunks `before`; the chunk's own if there are none."""
        return replace(self._encoder.identity, behind=_digest(before).hexdigest() if before else "")

    def lease(self, before: Sequence[Ids], token_ids: Ids) -> Lease | None:
        """The entry of a chunk behind the chunks `before`, held for reading."""
        return self._store.lease(self.identity(before), token_ids)

    def stored(self, chunks: Sequence[Ids]) -> list[Identity]:
        """The identities under which the first chunks are stored, each behind those before it; not a use.

        The first chunk's own entry is taken for stored: what is not is encoded soon.
        """
        found = list[Identity]()
        for before, token_ids in _links(chunks):
            identity = self.identity(before)
            if before and not self._store.contains_chained(identity.key(token_ids)):
                break
            found.append(identity)
        return found

    def read(self, before: Sequence[Ids], token_ids: Ids, frequencies: str) -> torch.Tensor | None:
        """The KV (L, 2, G, T, D) of a stored entry; `None` if it is not there, damaged, or of other frequencies."""
        lease = self._store.lease(self.identity(before), token_ids, promote=False)
        if lease is None:
            return None
        with lease:
            if lease.info.frequencies != frequencies:
                return None
            try:
                return torch.stack([lease.read_layer(layer).clone() for layer in range(lease.info.layers)])
            except EntryDamagedError:  # the tier has dropped it
                return None

    def encode(self, before: Sequence[Ids], pieces: Sequence[torch.Tensor], token_ids: Ids) -> Entry:
        """The entry of a chunk behind the chunks `before`, whose KV is `pieces`. The caller holds the compute lock."""
        if not before:
            return self._encoder.chunk(token_ids)
        return self._encoder.chained(self.identity(before), before, pieces, token_ids)

    def put(self, entry: Entry) -> None:
        """Store a chained entry; returns when it is stored."""
        self._store.put_chained(entry, self.most)

    def order(self, chunks: Sequence[Ids]) -> list[int]:
        """The indices of `chunks` in the order that reuses most tokens exactly; later ones of equal ids are dropped.

        In front is the stored chain of the most tokens, of several the one whose chunks come first in `chunks`; the
        others follow as they stand.
        """
        distinct = [index for index, token_ids in enumerate(chunks) if token_ids not in chunks[:index]]
        chain: tuple[int, ...] = ()
        if self.used:
            own = {index: self._encoder.identity.key(chunks[index]) for index in distinct}
            found = ((first, *rest) for first in distinct for rest in self._behind(chunks, own, (first,), _digest()))
            chain = max(found, key=lambda run: sum(len(chunks[index]) for index in run), default=())
            chain = chain if len(chain) > 1 else ()
        return [*chain, *(index for index in distinct if index not in chain)]

    def _behind(
        self, chunks: Sequence[Ids], own: dict[int, str], run: tuple[int, ...], seen: Any
    ) -> Iterator[tuple[int, ...]]:
        """All stored chains behind the chunks `run`, the empty one last. `seen`: the digest without the last of them.

        There are at most `most` chained entries of a chunk, so the search ends soon, however many chunks there are.
        """
        seen = seen.copy()
        seen.update(ids_bytes(chunks[run[-1]]))
        behind = seen.hexdigest()
        for index, key in own.items():
            if index not in run and self._store.contains_chained(f"{key}~{behind}"):
                for rest in self._behind(chunks, own, (*run, index), seen):
                    yield (index, *rest)
        yield ()


def chainable(chunks: Sequence[Ids], plain: Iterable[int]) -> Sequence[Ids]:
    """The first of a prompt's chunks, up to one that is only text."""
    return chunks[: min(plain, default=len(chunks))]


def _links(chunks: Sequence[Ids]) -> Iterator[tuple[Sequence[Ids], Ids]]:
    """Each chunk with those before it."""
    return ((chunks[:index], token_ids) for index, token_ids in enumerate(chunks))


def _digest(chunks: Iterable[Ids] = ()) -> Any:
    """A running digest of the ids of chunks, one behind the other."""
    digest = hashlib.blake2b(digest_size=16, person=b"ragkv-chained")
    for token_ids in chunks:
        digest.update(ids_bytes(token_ids))
    return digest


__all__ = ["ChainedEntries", "chainable"]
