"""Policies one block at a time, as docs/research/policies.md defines them: slow, naive, and sharing
no code with ragkv.

`Reference` raises `LookupError` for a policy that it does not define.
"""

import itertools
import random
from math import exp

from benchmarks.simulate import TraceRow

BLOCK_TOKENS = 16
RECENCY = {"lru", "threshold-lru"}  # LRU, after what `trim` does
FREE_FIRST = {"t-lru", "end-aware", "length-aware"}


def random_rows(
    seed: int, *, requests: int = 30, conversations: int = 5, contracting: bool = True
) -> list[TraceRow]:
    """A small trace with ties of time, conversations that contract, and turns that add nothing."""
    draw = random.Random(seed)
    stored = dict[str, int]()
    rows = []
    now = 0
    for request in range(requests):
        now += draw.choice([0, 0, 1, 2, 9])
        group = f"c{draw.randrange(conversations)}"
        length = stored.get(group, 0)
        shared = draw.randrange(length + 1) if contracting and draw.random() < 0.3 else length
        prompt = shared + draw.choice([0, 1, 1, 2, 5])
        stored[group] = max(0, prompt + draw.choice([-1, 0, 1, 4]))
        if not contracting:
            stored[group] = max(stored[group], length)
        rows.append(TraceRow(float(now), request, group, prompt, shared, stored[group]))
    draw.shuffle(rows)
    return rows


class Reference:
    """One policy over one trace: `uncached` blocks of every request, and the conversation of every
    `evicted` block.
    """

    def __init__(
        self,
        policy: str,
        rows: list[TraceRow],
        capacity: int,
        xi: int,
        *,
        forced: bool = False,
        threshold_tokens: int = 64,
        end_rate: float = 0.05,
    ) -> None:
        self.policy = policy
        self.capacity = capacity
        self.xi = xi
        self.forced = forced
        self.threshold_tokens = threshold_tokens
        self.end_rate = end_rate
        self.rows = sorted(rows, key=lambda row: (row.at, row.request))
        self.new = [
            row.prompt - row.shared
            for i, row in enumerate(self.rows)
            if any(other.conversation == row.conversation for other in self.rows[:i])
        ]
        mean = sum(self.new) / len(self.new) if self.new else 0.0
        self.expected = int(mean) if mean == int(mean) else int(mean) + 1
        self.x: dict[str, int] = {}
        self.length: dict[str, int] = {}
        self.last: dict[str, int] = {}  # index of the last request
        self.came: dict[str, int] = {}  # fifo: index of the request since which blocks are held
        self.gaps: list[float] = []
        self.uncached: list[int] = []
        self.evicted: list[str] = []
        for number in range(len(self.rows)):
            self.serve(number)

    def serve(self, number: int) -> None:
        row = self.rows[number]
        group = row.conversation
        self.uncached.append(row.prompt - min(self.x.get(group, 0), row.shared))
        if group in self.last:
            self.gaps.append(row.at - self.rows[self.last[group]].at)
        if not self.x.get(group):
            self.came[group] = number
        self.x[group] = self.length[group] = row.length
        self.last[group] = number
        self.trim(number, group)
        while sum(self.x.values()) > self.capacity:
            candidates = [
                g for g, blocks in self.x.items() if blocks and not (self.forced and g == group)
            ] or [group]
            self.take(min(candidates, key=lambda g: self.order(g, number)))

    def take(self, group: str) -> None:
        self.x[group] -= 1
        self.evicted.append(group)

    def trim(self, number: int, served: str) -> None:
        if (
            self.policy == "threshold-lru"
            and self.length[served] * BLOCK_TOKENS < self.threshold_tokens
        ):
            self.cap(served, 0)
        if self.policy == "tail-belady":
            self.cap(served, self.useful(served, number))

    def cap(self, group: str, most: int) -> None:
        while self.x[group] > most:
            self.take(group)

    def next(self, group: str, number: int) -> int | None:
        later = (i for i in range(number + 1, len(self.rows)) if self.rows[i].conversation == group)
        return next(later, None)

    def useful(self, group: str, number: int) -> int:
        i = self.next(group, number)
        return 0 if i is None else min(self.rows[i].shared, max(0, self.rows[i].prompt - self.xi))

    def budget(self, group: str, number: int) -> int:
        if self.policy == "length-aware":
            return self.useful(group, number)
        if self.policy == "end-aware" and self.next(group, number) is None:
            return 0
        return max(0, self.length[group] + self.expected - self.xi)

    def order(self, group: str, number: int) -> tuple[float, ...]:
        """The conversation with the lowest value loses the next block."""
        last = self.last[group]
        free = self.x[group] > self.budget(group, number)
        idle = self.rows[number].at - self.rows[last].at
        if self.policy in RECENCY:
            return (last,)
        if self.policy == "fifo":
            return (self.came[group],)
        if self.policy in ("belady", "tail-belady"):
            i = self.next(group, number)
            return (-1e9 if i is None else -i, last)
        if self.policy in FREE_FIRST:
            return (not free, last)
        if self.policy == "t-lru-guarded":
            gaps = sorted(self.gaps)
            limit = gaps[min(len(gaps) - 1, int(0.95 * len(gaps)))] if gaps else 1e9
            return (0 if idle > limit else 1 + (not free), last)
        if self.policy == "et-lru":
            alive = exp(-self.end_rate * idle)
            level = self.x[group] - self.length[group] + self.xi
            matters = sum(q >= level for q in self.new) / len(self.new) if self.new else 0.0
            return (alive * matters, last)
        raise LookupError(f"no reference for {self.policy}")


def best_possible(rows: list[TraceRow], capacity: int, xi: int) -> int:
    """The least TEL, in blocks, that any caching can reach: tries every choice after every
    request.
    """
    ordered = sorted(rows, key=lambda row: (row.at, row.request))
    groups = sorted({row.conversation for row in ordered})
    # blocks held of each group -> least TEL so far
    costs: dict[tuple[int, ...], int] = {(0,) * len(groups): 0}
    for row in ordered:
        me = groups.index(row.conversation)
        after = dict[tuple[int, ...], int]()
        for held, cost in costs.items():
            paid = cost + max(0, row.prompt - min(held[me], row.shared) - xi)
            choices = [range((row.length if i == me else x) + 1) for i, x in enumerate(held)]
            for choice in itertools.product(*choices):
                if sum(choice) <= capacity:
                    after[choice] = min(after.get(choice, paid), paid)
        costs = after
    return min(costs.values())
