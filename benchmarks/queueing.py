"""Sessions in a scheduler's queue over memory and disk: CachedAttention's placement (sections 3.3
and 4.3).

One server takes requests first come first served. A request takes the prefill of its uncached
tokens, which attend to the history, or the loading of the history where that takes longer, and its
share of decoding. A session's whole history is held in memory or on disk. Memory evicts to disk,
and disk evicts for good (the paper); in an inclusive store, as ragkv's, disk has what memory has,
too. With look-ahead, sessions among the next `C_mem / S_kv` waiting requests are fetched to memory
before they are served. Histories longer than the context lose their older half and stay usable, as
they are stored without positions.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count, islice

from benchmarks.simulate.policies import WindowedLookAhead, make_any_policy
from benchmarks.simulate.prefix_tier import PrefixTier
from benchmarks.simulate.workloads import GeneratedSession
from ragkv.store.policies import Eviction


@dataclass(frozen=True)
class QueueServer:
    """The server of the queue. The defaults are CachedAttention's LLaMA-13B: .78 MB a token, a
    context of 4,096.
    """

    memory_tokens: int
    disk_tokens: int
    token_ms: float = 0.1  # prefill of one token
    turn_ms: float = 350.0  # a turn's share of decoding in a batch
    context_tokens: int = 4096
    # of a token's time, for each key that it attends to: 4 x layers x width / (2 x weights)
    key_share: float = 0.0
    memory_tokens_per_s: float = float("inf")  # loaded to the device; hidden behind computing
    disk_tokens_per_s: float = float("inf")  # read by one reader, in the order of the queue
    inclusive: bool = False  # memory's histories are on disk as well
    ttl_s: float = float("inf")  # a history unused for longer is dropped

    def prefill_s(self, tokens: int, behind: int = 0) -> float:
        """Seconds to compute so many tokens that attend to `behind` others and to each other."""
        keys = behind + tokens / 2
        return self.token_ms / 1000 * tokens * (1 + self.key_share * keys)


@dataclass(frozen=True)
class Hits:
    """Turns from the second on, after the warm-up, by the place of their history; first turns have
    none.
    """

    policy: str
    turns: int
    from_memory: int
    from_disk: int
    first_turns: int
    mean_queue: float  # mean number of waiting requests when one is started
    mean_wait_s: float
    prompt_tokens: int = 0  # of all turns
    prefill_s: float = 0.0  # of all turns, with loading
    recompute_s: float = 0.0  # the same if nothing were cached
    busy_s: float = 0.0  # of the server, with decoding
    recompute_busy_s: float = 0.0
    hours: float = 0.0  # from the first counted turn to the last

    @property
    def ttft_s(self) -> float:
        """Mean seconds from a request's start to its first token, without waiting."""
        return self.prefill_s / max(1, self.turns + self.first_turns)

    @property
    def recompute_ttft_s(self) -> float:
        """The same if nothing were cached."""
        return self.recompute_s / max(1, self.turns + self.first_turns)

    @property
    def hit_rate(self) -> float:
        """Hits over the turns that have a history."""
        return (self.from_memory + self.from_disk) / max(1, self.turns)

    @property
    def hit_rate_with_first_turns(self) -> float:
        """Hits over all turns, as if first turns could hit."""
        return (self.from_memory + self.from_disk) / max(1, self.turns + self.first_turns)

    @property
    def memory_share(self) -> float:
        """The share of hits that were in memory."""
        return self.from_memory / max(1, self.from_memory + self.from_disk)


class SessionTier(PrefixTier):
    """A tier that holds a session whole or not at all."""

    def hold(self, session: str, tokens: int, now: float) -> None:
        """Hold so many tokens of a session, and evict, perhaps the session itself."""
        self._set(session, tokens, now)
        while self._used > self.capacity:
            self._take(self.policy.victim((), now) or Eviction(next(iter(self.held))), now)


class _Hierarchy:
    """Memory above disk, each holding whole sessions under a policy of its own."""

    def __init__(self, name: str, server: QueueServer, mean_tokens: float) -> None:
        window = int((server.memory_tokens + server.disk_tokens) / mean_tokens)
        policies = [
            WindowedLookAhead(max(1, window)) if name == "lookahead" else make_any_policy(name)
            for _ in range(2)
        ]
        self._numbers = count()
        self._requests: dict[str, int] = {}  # that waits, by session
        self._demoted: list[tuple[str, int]] = []  # by the session that is kept now
        self.memory = SessionTier(
            policies[0], server.memory_tokens, lambda *lost: self._demoted.append(lost), whole=True
        )
        self.disk = SessionTier(policies[1], server.disk_tokens, whole=True)
        self._is_inclusive = server.inclusive
        self._disk_tokens_per_s = server.disk_tokens_per_s
        self._disk_free_at = 0.0
        self._ready_at: dict[str, float] = {}  # of sessions that are read from disk
        self.fetch_window = int(server.memory_tokens / mean_tokens) if name == "lookahead" else 0

    def queued(self, session: str) -> None:
        self._requests[session] = next(self._numbers)
        for place in (self.memory, self.disk):
            place.policy.queued(session, self._requests[session])

    def start(self, session: str) -> None:
        request = self._requests.pop(session)
        for place in (self.memory, self.disk):
            place.policy.left(session, request)

    def keep(self, session: str, tokens: int, now: float) -> bool:
        """Hold a session in memory and demote others to disk; whether it stayed in memory
        itself.
        """
        self.disk.hold(session, tokens if self._is_inclusive else 0, now)
        self._demoted.clear()
        self.memory.hold(session, tokens, now)
        for other, size in () if self._is_inclusive else self._demoted:
            self.disk.hold(other, size, now)
        return session in self.memory.held

    def read(self, session: str, tokens: int, now: float) -> float:
        """Read a session from disk, behind what is being read; returns when it is there."""
        self._disk_free_at = max(self._disk_free_at, now) + tokens / self._disk_tokens_per_s
        self._ready_at[session] = self._disk_free_at
        return self._disk_free_at

    def ready_at(self, session: str) -> float:
        """When a session that was fetched ahead is in memory."""
        return self._ready_at.pop(session, 0.0)

    def drop(self, session: str, now: float) -> None:
        self.memory.hold(session, 0, now)
        self.disk.hold(session, 0, now)

    def fetch(self, waiting: Sequence[str], now: float) -> None:
        """Fetch waiting sessions from disk to memory, in the order of the queue, until one does not
        stay there.
        """
        for session in waiting:
            if session not in self.disk.held or session in self.memory.held:
                continue
            tokens = self.disk.held[session]
            self.read(session, tokens, now)
            if not self.keep(session, tokens, now):
                break


def serve(
    sessions: Sequence[GeneratedSession],
    name: str,
    server: QueueServer,
    warm_up_turns: int = 0,
    until_s: float = float("inf"),
) -> Hits:
    """Serve all sessions under one policy for memory and disk; turns that arrive after `until_s`
    are not counted.
    """
    lengths = [
        min(server.context_tokens, sum(new + out for new, out, _ in s.turns)) for s in sessions
    ]
    tiers = _Hierarchy(name, server, sum(lengths) / len(lengths))
    arrivals = [(session.at, number, 0) for number, session in enumerate(sessions)]
    heapify(arrivals)
    queue: deque[tuple[float, int, int]] = deque()
    history = [0] * len(sessions)
    last = [0.0] * len(sessions)
    now = 0.0
    done = 0
    turns = first = memory = disk = waiting = 0
    waited = 0.0
    counted = _Times()
    while arrivals or queue:
        if not queue:
            now = max(now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now:
            queue.append(heappop(arrivals))
            tiers.queued(str(queue[-1][1]))
        came, number, turn = queue.popleft()
        key = str(number)
        (new, out, think) = sessions[number].turns[turn]
        if now - last[number] > server.ttl_s:
            tiers.drop(key, now)
        in_memory = key in tiers.memory.held
        on_disk = key in tiers.disk.held and not in_memory
        is_counted = done >= warm_up_turns and came <= until_s
        if is_counted:
            waiting = waiting + len(queue)
            waited = waited + now - came
            turns = turns + (turn > 0)
            first = first + (turn == 0)
            memory = memory + in_memory
            disk = disk + on_disk
        done += 1
        tiers.start(key)
        if history[number] + new > server.context_tokens:
            history[number] //= 2  # truncation; the stored KV is cut alike
        recompute_s = server.prefill_s(new + history[number])
        if in_memory or on_disk:
            there = tiers.ready_at(key) if in_memory else tiers.read(key, history[number], now)
            load_s = max(0.0, there - now) + history[number] / server.memory_tokens_per_s
            prefill_s = max(server.prefill_s(new, history[number]), load_s)
        else:
            prefill_s = recompute_s
        if is_counted:
            counted.add(new + history[number], prefill_s, recompute_s, now)
        tiers.fetch([str(n) for _, n, _ in islice(queue, tiers.fetch_window)], now)
        now += prefill_s + server.turn_ms / 1000
        history[number] = min(server.context_tokens, history[number] + new + out)
        last[number] = now
        tiers.keep(key, history[number], now)
        if turn + 1 < len(sessions[number].turns):
            heappush(arrivals, (now + think, number, turn + 1))
    count = max(1, turns + first)
    decoding_s = count * server.turn_ms / 1000
    return Hits(
        name,
        turns,
        memory,
        disk,
        first,
        waiting / count,
        waited / count,
        counted.tokens,
        counted.prefill_s,
        counted.recompute_s,
        counted.prefill_s + decoding_s,
        counted.recompute_s + decoding_s,
        (now - counted.began_s) / 3600,
    )


class _Times:
    """Sums over counted turns."""

    def __init__(self) -> None:
        self.tokens = 0
        self.prefill_s = 0.0
        self.recompute_s = 0.0
        self.began_s = 0.0

    def add(self, tokens: int, prefill_s: float, recompute_s: float, now: float) -> None:
        if not self.tokens:
            self.began_s = now
        self.tokens += tokens
        self.prefill_s += prefill_s
        self.recompute_s += recompute_s
