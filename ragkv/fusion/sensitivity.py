"""Sensitivity: which tokens of a chunk depend on what stands before it, measured once, when the chunk is ingested.

A chunk is encoded once more behind each of k other texts; where its keys and values then differ from the stored
ones, they depend on context. One number a token travels with the entry, so that selection at question time needs no
check layer and is known before anything is loaded (ours; it takes the place of CacheBlend section 4.3's guess from one
layer). It knows nothing of requests or stores; `docs/selection.md` has what was measured.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from ragkv.model import Adapter, PromptKV, Recording, Rows

TEXT_TOKENS = 128  # of a text behind which chunks are scored


@dataclass(slots=True)
class _Text:
    """An unrelated text behind the application's prefix, encoded."""

    chunks: set[tuple[int, ...]]  # what it is made of
    token_ids: tuple[int, ...]  # the application's prefix, then those chunks, cut to length
    kv: PromptKV  # valid up to the text's end; a chunk's rows are written behind it and forgotten


class Scorer:
    """Scores chunks of one model behind one application prefix. The caller holds the compute lock.

    The texts are the first other chunks it met: text of the application's own kind measures best (random tokens do not
    measure at all), and a chunk is never scored behind itself. Until there are k of them, the chunk's own tokens in
    another order stand in.
    """

    def __init__(self, adapter: Adapter, prefix_ids: Sequence[int], count: int) -> None:
        """`count` is k, the number of texts; the sinks are those of `prefix_ids`, which stands before each."""
        self._adapter, self._prefix_ids, self._count = adapter, tuple(prefix_ids), count
        self._texts: list[_Text] = []  # at most k + 1, so that k are left for a chunk that one is made of
        self._waiting: list[tuple[int, ...]] = []  # chunks that do not fill a text yet

    def meet(self, chunks: Iterable[tuple[int, ...]]) -> None:
        """Take the first of `chunks` for texts, while some are wanting."""
        for token_ids in chunks:
            if len(self._texts) > self._count:
                return
            if token_ids in self._waiting or any(token_ids in text.chunks for text in self._texts):
                continue
            self._waiting.append(token_ids)
            if sum(map(len, self._waiting)) >= TEXT_TOKENS:
                self._texts.append(self._encoded(self._waiting))
                self._waiting = []

    def scores(self, token_ids: tuple[int, ...], stored: torch.Tensor) -> torch.Tensor:
        """The sensitivity (T,) float16, on the host, of a chunk whose entry is `stored` (L, 2, G, T, D)."""
        self.meet([token_ids])
        texts = [text for text in self._texts if token_ids not in text.chunks][: self._count]
        others = [self._chunk_behind(text, token_ids) for text in texts]
        others += [self._chunk_shuffled(token_ids, seed) for seed in range(self._count - len(texts))]
        scores = sensitivity(stored.to(self._adapter.device), others)
        return scores.clamp_max(torch.finfo(torch.float16).max).half().cpu()

    def _encoded(self, chunks: Sequence[tuple[int, ...]]) -> _Text:
        head = self._prefix_ids + tuple(chain(*chunks))[:TEXT_TOKENS]
        kv = self._adapter.new_kv(len(head) + 2 * TEXT_TOKENS)
        if not self._adapter.rope.depends_on_length:
            drive(self._adapter, head, kv, 0, None)
        return _Text(set(chunks), head, kv)

    def _chunk_behind(self, text: _Text, token_ids: tuple[int, ...]) -> torch.Tensor:
        """The chunk's raw KV (L, 2, G, T, D) behind that text."""
        start = len(text.token_ids)
        length, limit = start + len(token_ids), self._adapter.context_length
        if self._adapter.rope.depends_on_length or (limit is not None and length > limit):
            return self._chunk_after(text.token_ids, token_ids)
        text.kv.reserve(length)
        record = self._adapter.new_recording(start, length)
        drive(self._adapter, token_ids, text.kv, start, record)
        text.kv.length = start
        return record.kv

    def _chunk_shuffled(self, token_ids: tuple[int, ...], seed: int) -> torch.Tensor:
        """The chunk's raw KV (L, 2, G, T, D) behind its own tokens in another order."""
        order = torch.randperm(len(token_ids), generator=torch.Generator().manual_seed(seed))[:TEXT_TOKENS]
        return self._chunk_after(self._prefix_ids + tuple(token_ids[place] for place in order.tolist()), token_ids)

    def _chunk_after(self, head: tuple[int, ...], token_ids: tuple[int, ...]) -> torch.Tensor:
        """The chunk's raw KV (L, 2, G, T, D) behind `head`, in one pass; a short context takes the head's beginning."""
        limit = self._adapter.context_length
        head = head if limit is None else head[: max(0, limit - len(token_ids))]
        length = len(head) + len(token_ids)
        record = self._adapter.new_recording(len(head), length)
        drive(self._adapter, head + token_ids, self._adapter.new_kv(length), 0, record)
        return record.kv


def sensitivity(stored: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """How far a chunk's KV (L, 2, G, T, D) moves with what stands before it, (T,) float32.

    The geometric mean of two numbers: how far it is from what is stored, and how far the `others` are from each other.
    The first alone is high where a chunk begins, behind whatever text; the second alone, where nothing comes of it.
    """
    later = stored.shape[0] // 2
    base = stored[later:].float()  # (L', 2, G, T, D)
    norm = base.square().sum(dim=(2, 4)).mean(dim=-1, keepdim=True).clamp_min(1e-12)  # (L', 2, 1)
    behind = [other[later:].float() for other in others]
    moved = torch.stack([_relative(other - base, norm) for other in behind]).mean(dim=0)
    if len(behind) == 1:
        return moved
    centre = torch.stack(behind).mean(dim=0)
    varied = torch.stack([_relative(other - centre, norm) for other in behind]).sum(dim=0) / (len(behind) - 1)
    return (moved * varied).sqrt()


def _relative(difference: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """|dK|^2 / mean |K|^2 + |dV|^2 / mean |V|^2, summed over layers: (L', 2, G, T, D), (L', 2, 1) -> (T,)."""
    return (difference.square().sum(dim=(2, 4)) / norm).sum(dim=(0, 1))


@torch.no_grad()
def drive(adapter: Adapter, token_ids: Sequence[int], kv: PromptKV, start: int, record: Recording | None) -> None:
    """Push `token_ids` (T,) through every layer at positions start ... over what `kv` holds."""
    stop = start + len(token_ids)
    rows, tables = Rows.span(start, stop, adapter.device), adapter.rope.tables(stop)
    hidden = adapter.embed(torch.tensor(token_ids, device=adapter.device))
    for layer in range(adapter.layer_count):
        hidden = adapter.run_layer(layer, hidden, rows, kv, tables, record)
    kv.length = stop
