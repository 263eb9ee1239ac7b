"""Sensitivity: which tokens of a chunk depend on what stands before it, measured once, when the chunk is ingested.

A chunk is encoded once more behind each of k other texts; where its keys and values then differ from the stored
ones, they depend on context. One number a token travels with the entry, so that selection at question time needs no
check layer and is known before anything is loaded (ours; it takes the place of CacheBlend section 4.3's guess from one
layer). It knows nothing of requests or stores; `docs/selection.md` has what was measured.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from ragkv.model import Adapter, PromptKV, Recording, Rows

from .learned import ScoreModel

TEXT_TOKENS = 256  # of a kept text behind which chunks are scored
NEIGHBOUR_TOKENS = 128  # of the text beside a chunk in its document


@dataclass(slots=True)
class _Text:
    """A text behind the application's prefix, encoded."""

    chunks: set[tuple[int, ...]]  # what it is made of
    token_ids: tuple[int, ...]  # the application's prefix, then those chunks, cut to length
    kv: PromptKV  # valid up to the text's end; a chunk's rows are written behind it and forgotten


class Scorer:
    """Scores chunks of one model behind one application prefix. The caller holds the compute lock.

    Of the k texts one is what stands beside the chunk where it was ingested, most likely its own document: a name or a
    description that is explained there is resolved behind it and nowhere else. The others are kept texts, the first
    other chunks that were met; random tokens do not do. A chunk is never scored behind itself, and while texts are
    wanting its own tokens in another order stand in.
    """

    def __init__(
        self,
        adapter: Adapter,
        prefix_ids: Sequence[int],
        count: int,
        between: Callable[[], None] = lambda: None,
        learned: ScoreModel | None = None,
    ) -> None:
        """`count` is k, the number of texts; the sinks are those of `prefix_ids`, which stands before each.

        `between` is called between layers: others may decode a step there. `learned` says what a chunk's KV behind
        the texts means; without, the variance does.
        """
        self._adapter, self._prefix_ids, self._count = adapter, tuple(prefix_ids), count
        self._learned = learned
        self._between = between
        self._texts: list[_Text] = []  # at most k + 1, so that enough are left for a chunk that one is made of
        self._waiting: list[tuple[int, ...]] = []  # chunks that do not fill a text yet
        self._batch: Sequence[tuple[int, ...]] = ()  # what is being ingested together, in order
        self._places: dict[tuple[int, ...], int] = {}  # in the batch

    def register(self, chunks: Sequence[tuple[int, ...]]) -> None:
        """`chunks` are about to be scored: they are each other's neighbours, and kept texts while some are wanting."""
        if chunks is self._batch:
            return
        self._batch, self._places = chunks, {token_ids: place for place, token_ids in enumerate(chunks)}
        for token_ids in self._batch:
            if len(self._texts) > self._count:
                return
            if token_ids in self._waiting or any(token_ids in text.chunks for text in self._texts):
                continue
            self._waiting.append(token_ids)
            if sum(map(len, self._waiting)) >= TEXT_TOKENS:
                self._texts.append(self._encoded(self._waiting))
                self._waiting = []

    def scores(self, token_ids: tuple[int, ...], stored: torch.Tensor) -> torch.Tensor:
        """The sensitivity (T, C) float16, on the host, of a chunk whose entry is `stored` (L, 2, G, T, D)."""
        others, stored = self.kv_behind_texts(token_ids), stored.to(self._adapter.device)
        scores = self._learned.scores(stored, others) if self._learned else sensitivity(stored, others)[:, None]
        most = torch.finfo(torch.float16).max
        return scores.clamp(-most, most).half().cpu()

    def kv_behind_texts(self, token_ids: tuple[int, ...]) -> list[torch.Tensor]:
        """The chunk's raw KV (L, 2, G, T, D) behind each of k other texts, its neighbours' first if it has any."""
        if token_ids not in self._places:
            self.register([token_ids])
        others = []
        if neighbours := self._neighbours(token_ids):
            others.append(self._chunk_after(self._prefix_ids + neighbours, token_ids))
        texts = [text for text in self._texts if token_ids not in text.chunks][: self._count - len(others)]
        others += [self._chunk_behind(text, token_ids) for text in texts]
        return others + [self._chunk_shuffled(token_ids, seed) for seed in range(self._count - len(others))]

    def _neighbours(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The text before the chunk where it was ingested, then, while it is too short, what follows; () if alone."""
        place = self._places[token_ids]
        taken: list[int] = []
        for other in (*range(place - 1, -1, -1), *range(place + 1, len(self._batch))):
            if sum(len(self._batch[index]) for index in taken) >= NEIGHBOUR_TOKENS:
                break
            taken.append(other)
        return tuple(chain(*(self._batch[index] for index in sorted(taken))))[-NEIGHBOUR_TOKENS:]

    def _encoded(self, chunks: Sequence[tuple[int, ...]]) -> _Text:
        head = self._prefix_ids + tuple(chain(*chunks))[:TEXT_TOKENS]
        kv = self._adapter.new_kv(len(head) + TEXT_TOKENS)
        if not self._adapter.rope.depends_on_length:
            drive(self._adapter, head, kv, 0, None, self._between)
        return _Text(set(chunks), head, kv)

    def _chunk_behind(self, text: _Text, token_ids: tuple[int, ...]) -> torch.Tensor:
        """The chunk's raw KV (L, 2, G, T, D) behind that text."""
        start = len(text.token_ids)
        length, limit = start + len(token_ids), self._adapter.context_length
        if self._adapter.rope.depends_on_length or (limit is not None and length > limit):
            return self._chunk_after(text.token_ids, token_ids)
        text.kv.reserve(length)
        record = self._adapter.new_recording(start, length)
        drive(self._adapter, token_ids, text.kv, start, record, self._between)
        text.kv.length = start
        return record.kv

    def _chunk_shuffled(self, token_ids: tuple[int, ...], seed: int) -> torch.Tensor:
        """The chunk's raw KV (L, 2, G, T, D) behind its own tokens in another order."""
        order = torch.randperm(len(token_ids), generator=torch.Generator().manual_seed(seed))[:NEIGHBOUR_TOKENS]
        return self._chunk_after(self._prefix_ids + tuple(token_ids[place] for place in order.tolist()), token_ids)

    def _chunk_after(self, head: tuple[int, ...], token_ids: tuple[int, ...]) -> torch.Tensor:
        """The chunk's raw KV (L, 2, G, T, D) behind `head`, in one pass; a short context takes the head's beginning."""
        limit = self._adapter.context_length
        head = head if limit is None else head[: max(0, limit - len(token_ids))]
        length = len(head) + len(token_ids)
        record = self._adapter.new_recording(len(head), length)
        drive(self._adapter, head + token_ids, self._adapter.new_kv(length), 0, record, self._between)
        return record.kv


def sensitivity(stored: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """How far a chunk's KV (L, 2, G, T, D) moves with what stands before it, (T,) float32.

    The variance over the `others`, in units of the squared norm of what is stored, over the later half of the layers:
    how far they are from what is stored counts only where there is just one, since it is high wherever a chunk begins,
    behind whatever text, and nothing comes of that.
    """
    later = stored.shape[0] // 2
    base = stored[later:].float()  # (L', 2, G, T, D)
    norm = base.square().sum(dim=(2, 4)).mean(dim=-1, keepdim=True).clamp_min(1e-12)  # (L', 2, 1)
    behind = [other[later:].float() for other in others]
    centre = base if len(behind) == 1 else torch.stack(behind).mean(dim=0)
    return torch.stack([_relative(other - centre, norm) for other in behind]).sum(dim=0) / max(1, len(behind) - 1)


def _relative(difference: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """|dK|^2 / mean |K|^2 + |dV|^2 / mean |V|^2, summed over layers: (L', 2, G, T, D), (L', 2, 1) -> (T,)."""
    return (difference.square().sum(dim=(2, 4)) / norm).sum(dim=(0, 1))


@torch.no_grad()
def drive(
    adapter: Adapter,
    token_ids: Sequence[int],
    kv: PromptKV,
    start: int,
    record: Recording | None,
    between: Callable[[], None] = lambda: None,
) -> None:
    """Push `token_ids` (T,) through every layer at positions start ... over what `kv` holds."""
    stop = start + len(token_ids)
    rows, tables = Rows.span(start, stop, adapter.device), adapter.rope.tables(stop)
    hidden = adapter.embed(torch.tensor(token_ids, device=adapter.device))
    for layer in range(adapter.layer_count):
        hidden = adapter.run_layer(layer, hidden, rows, kv, tables, record)
        between()
    kv.length = stop
