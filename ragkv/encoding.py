"""Encoding: a chunk's KV computed once, behind the application's prefix alone, and stored position-free.

The prefix gives a chunk the attention sinks it will have in a prompt; its own KV is not part of the entry. A chunk that
a request missed is encoded here later, in the background: KV that has seen a particular context is never stored under
the chunk's key (CacheBlend sections 5.1 and 6, "Managing KV cache", which stores what the request computed).
"""

import dataclasses
import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import torch

from ragkv import teams
from ragkv.compute import Compute
from ragkv.errors import RagKVError, StoreReadOnlyError
from ragkv.flight import Flights
from ragkv.fusion import Fusor, Plan, ResidentLease, ScoreModel, Scorer, Span, SpanKind, SpanState, make_selector
from ragkv.fusion.learned import ASKED_TOKENS
from ragkv.model import Adapter
from ragkv.store import Entry, EntryInfo, Identity, Store, ids_digest

log = logging.getLogger(__name__)

KEPT_PREFIXES = 4  # prefix KV kept, one for each set of RoPE frequencies met lately
IDLE_PATIENCE_S = 30.0  # a background encoding waits so long for the engine to be idle, then goes ahead


class Traffic:
    """Requests under way on one model, whichever engine has them."""

    def __init__(self) -> None:
        self.requests = 0
        self.changed = threading.Condition()


class Activity:
    """Who is using the model: requests, which go first, and background work, which waits for a gap."""

    def __init__(self, beside: "Activity | None" = None) -> None:
        """Another engine's on the model of `beside`: the two take turns, and each is closed by itself."""
        self.compute: Compute = beside.compute if beside else Compute()  # one pass at a time
        self._traffic: Traffic = beside._traffic if beside else Traffic()
        self._closed = False

    @contextmanager
    def turn(self, check: Callable[[], None] | None = None) -> Iterator[None]:
        """The model, alone. Raises `RagKVError` once closed, and what `check` raises while it waits."""
        self.compute.acquire(check=check)
        try:
            if self._closed:
                raise RagKVError("The engine is closed; build a new one.")
            yield
        finally:
            self.compute.release()

    def close(self) -> None:
        """Let the pass under way end, and none begin."""
        with self.compute:
            self._closed = True

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request in and out."""
        traffic = self._traffic
        with traffic.changed:
            traffic.requests += 1
        try:
            yield
        finally:
            with traffic.changed:
                traffic.requests -= 1
                traffic.changed.notify_all()

    def wait_idle(self, timeout_s: float, hurried: Callable[[], bool]) -> None:
        """Return when no request runs, when `hurried` says so after a `wake`, or after `timeout_s`."""
        with self._traffic.changed:
            self._traffic.changed.wait_for(lambda: self._traffic.requests == 0 or hurried(), timeout_s)

    def wake(self) -> None:
        """Let who waits look again whether to hurry."""
        with self._traffic.changed:
            self._traffic.changed.notify_all()


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

    def studied(self, token_ids: tuple[int, ...]) -> tuple[Entry, list[torch.Tensor]]:
        """A chunk's entry without scores, and its KV behind the scorer's texts: what scores are learned from."""
        assert self._scorer is not None, "nothing is scored here"
        return self._encode(token_ids, behind=self._prefix_ids), self._scorer.others(token_ids)

    def meet(self, chunks: Sequence[tuple[int, ...]]) -> None:
        """These are about to be encoded: some may become texts to score behind. The caller holds the compute lock."""
        if self._scorer is not None:
            self._scorer.meet(chunks)

    @torch.no_grad()
    def weighed(self, plan: Plan, asked_ids: Sequence[int]) -> Plan:
        """`plan` with its candidates' scores as a question of these ids weighs them, where a network can tell."""
        scores, topics = plan.candidates.sensitivity, plan.candidates.topics
        if self._learned is None or scores is None or topics is None:
            return plan
        device = self._adapter.device
        asked = self._adapter.embed(torch.tensor(asked_ids[-ASKED_TOKENS:], dtype=torch.int64, device=device))[0]
        weighed = self._learned.weighed(scores.to(device), topics.to(device), asked).cpu()
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


class BackgroundEncoder:
    """Encodes missed chunks, and scores those stored unscored, in gaps between requests, on one thread."""

    def __init__(self, encoder: Encoder, store: Store, activity: Activity) -> None:
        self._encoder, self._store, self._activity = encoder, store, activity
        self.flights = Flights(store)
        self._waiting: queue.SimpleQueue[tuple[int, ...] | None] = queue.SimpleQueue()
        self._known: set[tuple[int, ...]] = set()
        self._changed = threading.Condition()
        self._closing = False
        self._flushing = 0  # calls of `flush` under way: no patience then
        self._thread = threading.Thread(target=self._work, name="ragkv-encoder", daemon=True)
        self._thread.start()

    def add(self, token_ids: tuple[int, ...]) -> None:
        """Encode these tokens when there is time; once, however often they are asked for."""
        with self._changed:
            if self._closing or token_ids in self._known:
                return
            self._known.add(token_ids)
        self._waiting.put(token_ids)

    def forget(self, token_ids: tuple[int, ...]) -> None:
        """Do not encode these after all: their chunk was deleted."""
        with self._changed:
            self._known.discard(token_ids)

    def flush(self) -> None:
        """Return when nothing waits any more. Does not wait for requests to end."""
        teams.give_back()
        with self._changed:
            self._flushing += 1
            self._activity.wake()
            self._changed.wait_for(lambda: not self._known)
            self._flushing -= 1

    def close(self) -> bool:
        """Finish the encoding under way, drop the rest: it can be encoded when it is missed again.

        `False` if this is its own thread, where garbage collection may call: it then ends by itself, soon.
        """
        with self._changed:
            self._closing = True
            self._known.clear()
            self._changed.notify_all()
        self._activity.wake()
        self._waiting.put(None)
        if threading.current_thread() is self._thread:
            return False
        self._thread.join()
        return True

    def _work(self) -> None:
        while (token_ids := self._waiting.get()) is not None:
            self._activity.wait_idle(IDLE_PATIENCE_S, lambda: self._closing or self._flushing > 0)
            try:
                self._encode(token_ids)
            except Exception:
                log.exception("A missed chunk of %d tokens could not be encoded; it stays a miss.", len(token_ids))
            teams.give_back()  # the store's codec may have made one
            with self._changed:
                self._known.discard(token_ids)
                self._changed.notify_all()

    def _encode(self, token_ids: tuple[int, ...]) -> None:
        if token_ids not in self._known or self._scored(token_ids):
            return
        key, tokens = self._encoder.identity.key(token_ids), len(token_ids)
        flight = self.flights.claim(key, tokens, lambda: bool(self._scored(token_ids)))
        if flight is None and self.flights.arrived(key, tokens, self._hurried) and self._scored(token_ids):
            return  # another replica's; looking at it brought it here
        encoded = False
        try:
            with self._activity.compute:
                entry = self._encoder.chunk(token_ids)
            encoded = True
            self._keep(token_ids, entry)
        finally:
            if flight is not None:
                self.flights.land(flight, encoded)

    def _keep(self, token_ids: tuple[int, ...], entry: Entry) -> None:
        scored = self._scored(token_ids)  # warmed meanwhile?
        if scored is False:
            with suppress(StoreReadOnlyError):
                self._store.delete_key(entry.info.key)  # the same KV without scores
        with self._changed:
            if token_ids in self._known and not scored:  # not deleted meanwhile
                self._store.put(entry)

    def _hurried(self) -> bool:
        return self._closing or self._flushing > 0

    def _scored(self, token_ids: tuple[int, ...]) -> bool | None:
        """Whether the stored entry has all that the encoder would give it; `None` if there is none."""
        lease = self._store.lease(self._encoder.identity, token_ids)
        if lease is None:
            return None
        with lease:
            return lease.sensitivity is not None or not self._encoder.scores
