"""Sensitivity: how much each token of a chunk depends on the text before the chunk, measured once, at ingest.

The scorer encodes a chunk again behind each of k other texts. Tokens whose keys and values differ between them depend
on context. The entry stores one number per token, so selection at question time needs no check layer and is known
before anything is loaded. This is ours; it replaces the estimate from one layer in CacheBlend section 4.3. It knows
nothing of requests or stores; `docs/selection.md` has the measurements.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from ragkv.model import Adapter, PromptKV, full_pass

from .learned import QUESTION_TOKENS, ScoreModel
from .plan import Plan

TEXT_TOKENS = 256  # of a kept text behind which chunks are scored
NEIGHBOUR_TOKENS = 128  # of the neighbouring text from the chunk's document


@dataclass(slots=True)
class _Text:
    """An encoded text behind the application's prefix."""

    chunks: set[tuple[int, ...]]  # that it consists of
    token_ids: tuple[int, ...]  # the application's prefix, then the chunks, cut to length
    kv: PromptKV  # valid up to the text's end; the rows of a chunk are written behind it and then discarded


class Scorer:
    """Scores the chunks of one model behind one application prefix. The caller holds the compute lock.

    One of the k texts is the chunk's neighbourhood at ingest, most likely its own document: a name or a description
    explained there is resolved behind this text only. The others are kept texts, made of the first other chunks that
    were registered; random tokens do not work. A chunk is never scored behind itself. While there are too few texts,
    the chunk's own tokens in shuffled order stand in.
    """

    def __init__(
        self,
        adapter: Adapter,
        prefix_ids: Sequence[int],
        count: int,
        between: Callable[[], None] = lambda: None,
        learned: ScoreModel | None = None,
    ) -> None:
        """`count` is k; every text stands behind `prefix_ids`, which holds the attention sinks.

        `between` is called between layers, so that others may compute. Without `learned` the score is the variance.
        """
        self._adapter, self._prefix_ids, self._count = adapter, tuple(prefix_ids), count
        self._learned = learned
        self.network_digest = learned.digest if learned else ""
        self._between = between
        self._texts: list[_Text] = []  # at most k + 1, because a chunk cannot use the text that contains it
        self._waiting: list[tuple[int, ...]] = []  # chunks that do not fill a text yet
        self._batch: Sequence[tuple[int, ...]] = ()  # chunks ingested together, in order
        self._places: dict[tuple[int, ...], int] = {}  # in the batch

    def register(self, chunks: Sequence[tuple[int, ...]]) -> None:
        """Announce chunks to be scored: they are each other's neighbours, and become kept texts while these lack."""
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
        """The sensitivity (T, 1 + C) float16, on the host, of a chunk with the stored KV (L, 2, G, T, D)."""
        behind, stored = self.kv_behind_texts(token_ids), stored.to(self._adapter.device)
        scores = self._learned.scores(stored, behind) if self._learned else sensitivity(stored, behind)[:, None]
        most = torch.finfo(torch.float16).max
        return scores.clamp(-most, most).half().cpu()

    @torch.no_grad()
    def weighted_by_question(self, plan: Plan, question_ids: Sequence[int]) -> Plan:
        """`plan` with its candidates' scores weighted for this question; unchanged without a network or its scores."""
        scores, topics = plan.candidates.sensitivity, plan.candidates.topics
        if self._learned is None or scores is None or topics is None:
            return plan
        device = self._adapter.device
        ids = torch.tensor(question_ids[-QUESTION_TOKENS:], dtype=torch.int64, device=device)
        question = self._adapter.embed(ids)[0]
        weighted = self._learned.weighted_by_question(scores.to(device), topics.to(device), question).cpu()
        return replace(plan, candidates=replace(plan.candidates, sensitivity=weighted))

    def kv_behind_texts(self, token_ids: tuple[int, ...]) -> list[torch.Tensor]:
        """The chunk's raw KV (L, 2, G, T, D) behind each of k texts; its neighbours come first if it has any."""
        if token_ids not in self._places:
            self.register([token_ids])
        found = []
        if neighbours := self._neighbours(token_ids):
            found.append(self._chunk_after(self._prefix_ids + neighbours, token_ids))
        texts = [text for text in self._texts if token_ids not in text.chunks][: self._count - len(found)]
        found += [self._chunk_behind(text, token_ids) for text in texts]
        return found + [self._chunk_shuffled(token_ids, seed) for seed in range(self._count - len(found))]

    def _neighbours(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The batch's tokens before the chunk and, if these are too few, after it; () if the batch has no others."""
        place = self._places[token_ids]
        taken: list[int] = []
        for other in (*range(place - 1, -1, -1), *range(place + 1, len(self._batch))):
            if sum(len(self._batch[index]) for index in taken) >= NEIGHBOUR_TOKENS:
                break
            taken.append(other)
        return tuple(chain(*(self._batch[index] for index in sorted(taken))))[-NEIGHBOUR_TOKENS:]

    def _encoded(self, chunks: Sequence[tuple[int, ...]]) -> _Text:
        token_ids = self._prefix_ids + tuple(chain(*chunks))[:TEXT_TOKENS]
        kv = self._adapter.new_kv(len(token_ids) + TEXT_TOKENS)
        if not self._adapter.rope.depends_on_length:
            full_pass(self._adapter, token_ids, kv, between=self._between)
        return _Text(set(chunks), token_ids, kv)

    def _chunk_behind(self, text: _Text, token_ids: tuple[int, ...]) -> torch.Tensor:
        """The chunk's raw KV (L, 2, G, T, D) behind a kept text."""
        start = len(text.token_ids)
        length, limit = start + len(token_ids), self._adapter.context_length
        if self._adapter.rope.depends_on_length or (limit is not None and length > limit):
            return self._chunk_after(text.token_ids, token_ids)
        text.kv.reserve(length)
        record = self._adapter.new_recording(start, length)
        full_pass(self._adapter, token_ids, text.kv, start, record, self._between)
        text.kv.length = start
        return record.kv

    def _chunk_shuffled(self, token_ids: tuple[int, ...], seed: int) -> torch.Tensor:
        """The chunk's raw KV (L, 2, G, T, D) behind its own tokens in shuffled order."""
        order = torch.randperm(len(token_ids), generator=torch.Generator().manual_seed(seed))[:NEIGHBOUR_TOKENS]
        return self._chunk_after(self._prefix_ids + tuple(token_ids[place] for place in order.tolist()), token_ids)

    def _chunk_after(self, before: tuple[int, ...], token_ids: tuple[int, ...]) -> torch.Tensor:
        """The chunk's raw KV (L, 2, G, T, D) behind `before`, which is cut to fit the context, in one pass."""
        limit = self._adapter.context_length
        before = before if limit is None else before[: max(0, limit - len(token_ids))]
        length = len(before) + len(token_ids)
        record = self._adapter.new_recording(len(before), length)
        full_pass(self._adapter, before + token_ids, self._adapter.new_kv(length), 0, record, self._between)
        return record.kv


def sensitivity(stored: torch.Tensor, behind_texts: Sequence[torch.Tensor]) -> torch.Tensor:
    """How much a chunk's KV (L, 2, G, T, D) varies with the text before it, (T,) float32.

    It is the variance over `behind_texts`, in units of the squared norm of the stored KV, over the later half of the
    layers. The distance from the stored KV is used only if there is one text: it is high at the start of every chunk,
    behind any text, and recomputing these tokens changes nothing.
    """
    later = stored.shape[0] // 2
    base = stored[later:].float()  # (L', 2, G, T, D)
    norm = base.square().sum(dim=(2, 4)).mean(dim=-1, keepdim=True).clamp_min(1e-12)  # (L', 2, 1)
    behind = [kv[later:].float() for kv in behind_texts]
    centre = base if len(behind) == 1 else torch.stack(behind).mean(dim=0)
    return torch.stack([_relative(kv - centre, norm) for kv in behind]).sum(dim=0) / max(1, len(behind) - 1)


def _relative(difference: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """|dK|^2 / mean |K|^2 + |dV|^2 / mean |V|^2, summed over layers: (L', 2, G, T, D), (L', 2, 1) -> (T,)."""
    return (difference.square().sum(dim=(2, 4)) / norm).sum(dim=(0, 1))
