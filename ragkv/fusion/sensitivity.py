"""Sensitivity: how much each token of a chunk depends on the text before the chunk, measured once,
at ingest.

The scorer encodes chunks again behind k other texts, whose KV is there: kept texts are computed
once, and neighbours are chunks that were just encoded. The passes behind texts end in the middle of
the model. Behind the first text all tokens of a chunk are computed, behind the others only those
that moved most. Tokens whose keys and values differ depend on context. The entry stores one number
per token, so selection at question time needs no check layer and is known before anything is
loaded. This is ours; it replaces the estimate from one layer in CacheBlend section 4.3. It knows
nothing of requests or stores; `docs/selection.md` has the measurements.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from ragkv.model import Adapter, Context, ReusedTokens, TokenRun, raw_kv

from .learned import ScoreModel, scored_layers, variance
from .plan import Plan

TEXT_TOKENS = 256  # A kept text behind which chunks are scored has `TEXT_TOKENS`.
# The neighbouring text from the chunk's document has at most `NEIGHBOUR_TOKENS`;
NEIGHBOUR_TOKENS = 512
COMPUTED_TOKENS = 128  # where the KV of fewer is there, `COMPUTED_TOKENS` of it are computed.
KNOWN_TOKENS = 512  # The KV of the last `KNOWN_TOKENS` encoded is kept for their neighbours.
# Behind further texts only the share `MOST_MOVED` is computed, the tokens that moved most behind
# the first;
MOST_MOVED = 0.5
MOST_MOVED_LEARNED = 0.3  # a network loses nothing by `MOST_MOVED_LEARNED` (docs/selection.md).
# Scores made as `VARIANCE` and as `LEARNED` are compared with no others.
VARIANCE = "variance-3"
LEARNED = "learned-2"


@dataclass(frozen=True, slots=True)
class _KeptText:
    """An encoded text behind the application's prefix."""

    chunks: frozenset[tuple[int, ...]]  # that it consists of
    context: Context  # the application's prefix, then the chunks, cut to length


class Scorer:
    """Scores the chunks of one model behind one application prefix. The caller holds the compute
    lock.

    One of the k texts is the chunk's neighbourhood at ingest, most likely its own document: a name
    or a description explained there is resolved behind this text only. The others are kept texts,
    made of the first other chunks that were registered; random tokens do not work. A chunk is never
    scored behind itself. While there are too few texts, the chunk's own tokens in shuffled order
    stand in.
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

        `between` is called between layers, so that others may compute. Without `learned` the score
        is the variance.
        """
        self._adapter = adapter
        self._prefix_ids = tuple(prefix_ids)
        self._count = count
        self.learned = learned
        self.network_digest = learned.digest if learned else ""
        self.columns = 1 + learned.topics if learned else 1  # numbers a token
        self._most_moved = MOST_MOVED_LEARNED if learned else MOST_MOVED
        self.made_as = f"{LEARNED}-{learned.digest}" if learned else VARIANCE
        self.name = f"a-{self.made_as}"  # in the identity of scores
        self._between = between
        self._layers = range(scored_layers(adapter.layer_count).stop)  # computed behind texts
        # at most k + 1, because a chunk cannot use the text that contains it
        self._texts: list[_KeptText] = []
        self._waiting: list[tuple[int, ...]] = []  # chunks that do not fill a text yet
        self._batch: Sequence[tuple[int, ...]] = ()  # chunks ingested together, in order
        self._places: dict[tuple[int, ...], int] = {}  # in the batch
        # the stored KV of the last chunks
        self._known: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()
        self._prefix: Context | None = None  # made when a chunk is scored

    def register(self, chunks: Sequence[tuple[int, ...]]) -> None:
        """Announce chunks to be scored: they are each other's neighbours, and become kept texts
        while these lack.
        """
        if chunks is self._batch:
            return
        self._batch = chunks
        self._places = {token_ids: place for place, token_ids in enumerate(chunks)}
        for token_ids in self._batch:
            if len(self._texts) > self._count:
                return
            if token_ids in self._waiting or any(token_ids in text.chunks for text in self._texts):
                continue
            self._waiting.append(token_ids)
            if sum(map(len, self._waiting)) >= TEXT_TOKENS:
                text = tuple(chain(*self._waiting))[:TEXT_TOKENS]
                self._texts.append(
                    _KeptText(frozenset(self._waiting), self._encoded(self._prefix_ids + text))
                )
                self._waiting = []

    def scores(
        self, chunks: Sequence[tuple[int, ...]], stored: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The sensitivity (T, 1 + C) float16, on the host, of chunks with the stored KV (L, 2, G,
        T, D).
        """
        behind = self.kv_behind_texts(chunks, stored, self._most_moved)
        return [self._scores(*pair) for pair in zip(stored, behind, strict=True)]

    def _scores(self, stored: torch.Tensor, behind: Sequence[torch.Tensor]) -> torch.Tensor:
        own = stored.to(self._adapter.device)
        scores = (
            self.learned.scores(own, behind) if self.learned else variance(own, behind)[:, None]
        )
        most = torch.finfo(torch.float16).max
        return scores.clamp(-most, most).half().cpu()

    @torch.no_grad()
    def weighted_by_question(self, plan: Plan, question_ids: Sequence[int]) -> Plan:
        """`plan` with its candidates' scores weighted for this question; unchanged without a
        network or its scores.
        """
        scores = plan.candidates.sensitivity
        topics = plan.candidates.topics
        if self.learned is None or scores is None or topics is None:
            return plan
        device = self._adapter.device
        ids = torch.tensor(
            question_ids[-self.learned.question_tokens :], dtype=torch.int64, device=device
        )
        question = self._adapter.embed(ids)[0]
        weighted = self.learned.weighted_by_question(
            scores.to(device), topics.to(device), question
        ).cpu()
        return replace(plan, candidates=replace(plan.candidates, sensitivity=weighted))

    def kv_behind_texts(
        self, chunks: Sequence[tuple[int, ...]], stored: Sequence[torch.Tensor], most_moved: float
    ) -> list[list[torch.Tensor]]:
        """The raw KV (L', 2, G, T, D) of each chunk behind k texts; its neighbours come first if it
        has any.

        L' are the first layers, up to the last of `scored_layers`. Behind all texts but the first
        only the share `most_moved` of the tokens is computed, those that moved most behind the
        first; the others have their stored KV there. `stored` is the KV (L, 2, G, T, D) of the
        chunks behind the prefix, which they lend each other as neighbours.
        """
        if any(token_ids not in self._places for token_ids in chunks):
            self.register(chunks)
        for token_ids, kv in zip(chunks, stored, strict=True):
            self._known[token_ids] = kv
            self._known.move_to_end(token_ids)
        texts = [self._contexts(token_ids) for token_ids in chunks]
        while len(self._known) > len(chunks) and sum(map(len, self._known)) > KNOWN_TOKENS:
            self._known.popitem(last=False)
        runs = [TokenRun(token_ids, own[0]) for token_ids, own in zip(chunks, texts, strict=True)]
        first = raw_kv(self._adapter, runs, self._between, self._layers)
        reused = [
            _those_that_moved(kv, behind, most_moved)
            for kv, behind in zip(stored, first, strict=True)
        ]
        runs = [
            TokenRun(token_ids, context, reused=left)
            for token_ids, own, left in zip(chunks, texts, reused, strict=True)
            for context in own[1:]
        ]
        others = iter(raw_kv(self._adapter, runs, self._between, self._layers))
        return [[kv, *(next(others) for _ in range(self._count - 1))] for kv in first]

    def _contexts(self, token_ids: tuple[int, ...]) -> list[Context]:
        """The k texts that the chunk is scored behind; its neighbours come first if it has any."""
        found = []
        if (neighbours := self._neighbours(token_ids)) is not None:
            found.append(neighbours)
        texts = [text for text in self._texts if token_ids not in text.chunks][
            : self._count - len(found)
        ]
        found += [self._fitting(text.context, token_ids) for text in texts]
        return found + [self._shuffled(token_ids, seed) for seed in range(self._count - len(found))]

    def _neighbours(self, token_ids: tuple[int, ...]) -> Context | None:
        """The batch's chunks before this one and, if these are too short, after it, in order;
        `None`: there are none.

        As many as have their stored KV at hand; if these are too few, fewer that are computed.
        """
        place = self._places[token_ids]
        others = (*range(place - 1, -1, -1), *range(place + 1, len(self._batch)))
        known = [other for other in others if self._batch[other] in self._known]
        known_tokens, all_tokens = (
            sum(len(self._batch[other]) for other in several) for several in (known, others)
        )
        if known_tokens >= min(COMPUTED_TOKENS, all_tokens):
            return self._behind_known(token_ids, known) if known else None
        taken: list[int] = []
        for other in others:
            if sum(len(self._batch[index]) for index in taken) >= COMPUTED_TOKENS:
                break
            taken.append(other)
        neighbours = (self._batch[index] for index in sorted(taken))
        return self._computed(token_ids, tuple(chain(*neighbours))[-COMPUTED_TOKENS:])

    def _behind_known(self, token_ids: tuple[int, ...], nearest: Sequence[int]) -> Context:
        """The tokens of the batch's `nearest` chunks that are closest to the chunk, in order, from
        their stored KV.
        """
        prefix = self._prefix_context()
        place = self._places[token_ids]
        pieces = dict[int, torch.Tensor]()
        left = min(NEIGHBOUR_TOKENS, self._fitting_tokens(token_ids, prefix))
        for other in nearest:
            if left == 0:
                break
            kv = self._known[self._batch[other]]
            kept = min(left, kv.shape[3])
            pieces[other] = (
                kv[:, :, :, kv.shape[3] - kept :] if other < place else kv[:, :, :, :kept]
            )
            left -= kept
        return self._fitting(
            Context((*prefix.pieces, *(pieces[other] for other in sorted(pieces)))), token_ids
        )

    def _shuffled(self, token_ids: tuple[int, ...], seed: int) -> Context:
        """The chunk's own tokens in shuffled order."""
        order = torch.randperm(len(token_ids), generator=torch.Generator().manual_seed(seed))[
            :COMPUTED_TOKENS
        ]
        return self._computed(token_ids, tuple(token_ids[place] for place in order.tolist()))

    def _computed(self, token_ids: tuple[int, ...], before: tuple[int, ...]) -> Context:
        """The prefix and `before`, which is computed, cut so that the chunk behind them fits the
        model's context.
        """
        prefix = self._fitting(self._prefix_context(), token_ids)
        before = before[max(0, len(before) - self._fitting_tokens(token_ids, prefix)) :]
        if not before:
            return prefix
        return Context((*prefix.pieces, self._kv(before, prefix)))

    def _fitting_tokens(self, token_ids: tuple[int, ...], prefix: Context) -> int:
        """The most tokens between the prefix and the chunk that fit the model's context."""
        limit = self._adapter.context_length
        return NEIGHBOUR_TOKENS if limit is None else max(0, limit - len(prefix) - len(token_ids))

    def _fitting(self, context: Context, token_ids: tuple[int, ...]) -> Context:
        """`context`, cut so that the chunk behind it fits the model's context."""
        limit = self._adapter.context_length
        return context if limit is None else context.cut(max(0, limit - len(token_ids)))

    def _prefix_context(self) -> Context:
        if self._prefix is None:
            self._prefix = self._encoded(self._prefix_ids) if self._prefix_ids else Context()
        return self._prefix

    def _encoded(self, token_ids: tuple[int, ...]) -> Context:
        return Context((self._kv(token_ids, Context()),))

    def _kv(self, token_ids: tuple[int, ...], context: Context) -> torch.Tensor:
        """The raw KV (L', 2, G, T, D) of tokens that chunks are scored behind, in the layers that
        need it.
        """
        (kv,) = raw_kv(self._adapter, [TokenRun(token_ids, context)], self._between, self._layers)
        return kv


def _those_that_moved(stored: torch.Tensor, behind: torch.Tensor, share: float) -> ReusedTokens:
    """What is computed behind other texts of a chunk with KV (L, 2, G, T, D), and (L', 2, G, T, D)
    behind the first.
    """
    moved = variance(stored, [behind])
    return ReusedTokens(stored, moved.topk(math.ceil(share * len(moved))).indices.sort().values)
