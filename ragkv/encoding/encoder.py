"""Encoding: a chunk's KV computed once, behind the application's prefix alone, and stored position-free.

The prefix gives a chunk the attention sinks it will have in a prompt; its own KV is not part of the entry. A chunk that
a request missed is encoded here later, in the background: KV that has seen a particular context is never stored under
the chunk's key (CacheBlend sections 5.1 and 6, "Managing KV cache", which stores what the request computed).
"""

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from ragkv.fusion import Fusor, Plan, ResidentLease, ScoreModel, Scorer, Span, SpanKind, SpanState, make_selector
from ragkv.fusion.learned import QUESTION_TOKENS
from ragkv.model import Adapter
from ragkv.store import Entry, EntryInfo, Identity, ids_digest

KEPT_PREFIXES = 4  # prefix KV kept, one for each set of RoPE frequencies met lately


class Encoder:
    """Makes entries: the prefix's, which it keeps, and chunks'."""

    def __init__(
        self,
        adapter: Adapter,
        fusor: Fusor,
        prefix_ids: tuple[int, ...],
        identity: Identity,
        sensitivity_prefixes: int = 0,
        between: Callable[[], None] = lambda: None,
        learned: ScoreModel | None = None,
    ) -> None:
        """`sensitivity_prefixes` is k of `Scorer`, and `learned` its network; with 0 entries are stored without scores.

        `between` is called between layers: others may decode a step there.
        """
        self._adapter, self._fusor, self._prefix_ids, self._between = adapter, fusor, prefix_ids, between
        self._scorer: Scorer | None = None
        self._learned = learned
        if sensitivity_prefixes:
            self._scorer = Scorer(adapter, prefix_ids, sensitivity_prefixes, between, learned)
        scorer = learned.digest if learned else ""  # scores of different making are never compared
        self.identity = dataclasses.replace(identity, context=ids_digest(prefix_ids), scorer=scorer)  # of chunks
        self._prefixes: OrderedDict[str, Entry] = OrderedDict()  # by frequencies
        self._lock = threading.Lock()

    def prefix(
        self, length: int, turn: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> ResidentLease | None:
        """The prefix's KV under the frequencies of a prompt of `length` tokens; `None` if there is no prefix.

        `turn` gives the compute lock, should it have to be encoded; by default the caller holds it.
        """
        if not self._prefix_ids:
            return None
        frequencies = self._adapter.rope.frequencies(length)
        with self._lock:
            entry = self._prefixes.get(frequencies)
        if entry is None:
            if self._adapter.rope.frequencies(len(self._prefix_ids)) != frequencies:
                return None  # cannot be computed apart from a prompt of that length: the prompt computes it
            with turn():
                entry = self._encode(self._prefix_ids, behind=())
            with self._lock:
                self._prefixes[frequencies] = entry
                if len(self._prefixes) > KEPT_PREFIXES:
                    self._prefixes.popitem(last=False)
        return ResidentLease(entry)

    def chunk(self, token_ids: tuple[int, ...]) -> Entry:
        """The entry of a chunk, scored if there is a scorer. The caller holds the compute lock."""
        entry = self._encode(token_ids, behind=self._prefix_ids)
        if self._scorer is None:
            return entry
        return dataclasses.replace(entry, sensitivity=self._scorer.scores(token_ids, entry.kv))

    def training_sample(self, token_ids: tuple[int, ...]) -> tuple[Entry, list[torch.Tensor]]:
        """A chunk's entry without scores, and its KV behind the scorer's texts: what scores are learned from."""
        assert self._scorer is not None, "nothing is scored here"
        return self._encode(token_ids, behind=self._prefix_ids), self._scorer.kv_behind_texts(token_ids)

    def register(self, chunks: Sequence[tuple[int, ...]]) -> None:
        """These are about to be encoded: some may become texts to score behind. The caller holds the compute lock."""
        if self._scorer is not None:
            self._scorer.register(chunks)

    @torch.no_grad()
    def weighted_by_question(self, plan: Plan, asked_ids: Sequence[int]) -> Plan:
        """`plan` with its candidates' scores as a question of these ids weighs them, where a network can tell."""
        scores, topics = plan.candidates.sensitivity, plan.candidates.topics
        if self._learned is None or scores is None or topics is None:
            return plan
        device = self._adapter.device
        asked = self._adapter.embed(torch.tensor(asked_ids[-QUESTION_TOKENS:], dtype=torch.int64, device=device))[0]
        weighed = self._learned.weighted_by_question(scores.to(device), topics.to(device), asked).cpu()
        return dataclasses.replace(plan, candidates=dataclasses.replace(plan.candidates, sensitivity=weighed))

    @property
    def scores(self) -> bool:
        """Whether entries are scored."""
        return self._scorer is not None

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
