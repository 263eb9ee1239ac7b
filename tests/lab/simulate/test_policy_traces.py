"""Every policy has a hand-written trace with its victims, which neither LRU nor FIFO nor the policy's parent produces.

A policy that is registered without a trace here fails, and so does a policy that ignores what makes it one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from ragkv.lab.simulate import ALL_POLICIES, make_any_policy
from ragkv.store.policies import NEVER, NextRequest, Policy, PolicySettings, TurnSize


class Tier:
    """A tier driven by hand. `victims` has the group of every evicted block (or chunk), in order of eviction."""

    def __init__(self, policy: Policy, capacity: int) -> None:
        self.victims: list[str] = []
        self._policy, self._capacity = policy, capacity
        self._held: dict[str, int] = {}  # group -> blocks
        self._block_size: dict[str, int] = {}
        self._turns: dict[str, tuple[int, float]] = {}  # group -> number and time of its last turn

    def turn(
        self, group: str, at: float, length: int, prompt: int = 0, shared: int = 0, then: NextRequest | None = None
    ) -> None:
        """Serve a turn of a conversation; all of its `length` blocks are held, then the tier evicts down to its size.

        `prompt` is at least `length`, `then` the conversation's next request, for policies that know the future.
        """
        number, last = self._turns.get(group, (0, at))
        self._turns[group] = number + 1, at
        since = at - last if number else None
        served = TurnSize(at, int(at), group, prompt or length, shared, length, number + 1, since, then)
        self._policy.served(served)
        self._hold(group, length, 1, at)
        for cut in self._policy.trims(self._overflow() > 0, at):
            self._cut(cut.group, cut.keep, at)
        self._evict(at)

    def read(self, group: str, at: float, size: int = 1) -> None:
        """Read a chunk that stands alone, and store it if it is not held."""
        if group in self._held:
            self._policy.used(group, at)
            return
        self._hold(group, 1, size, at)
        self._evict(at)

    def queue(self, *groups: str) -> None:
        for group in groups:
            self._policy.queued(group)

    def start(self, group: str) -> None:
        self._policy.left(group)

    def _overflow(self) -> int:
        return sum(blocks * self._block_size[group] for group, blocks in self._held.items()) - self._capacity

    def _evict(self, at: float) -> None:
        while (overflow := self._overflow()) > 0:
            cut = self._policy.victim((), at)
            assert cut is not None
            needed = -(-overflow // self._block_size[cut.group])
            self._cut(cut.group, cut.keep if cut.whole else max(cut.keep, self._held[cut.group] - needed), at)

    def _cut(self, group: str, keep: int, at: float) -> None:
        self.victims += [group] * (self._held.get(group, 0) - keep)
        self._hold(group, keep, self._block_size[group], at)

    def _hold(self, group: str, blocks: int, block_size: int, at: float) -> None:
        self._held[group], self._block_size[group] = blocks, block_size
        if not blocks:
            del self._held[group]
        self._policy.held(group, blocks, blocks * block_size, at)


@dataclass(frozen=True)
class HandTrace:
    """What happens to a tier, and the victims one policy must choose: a letter for each block, in order."""

    run: Callable[[Tier], None]
    capacity: int
    victims: str
    settings: PolicySettings

    def victims_of(self, name: str) -> str:
        tier = Tier(make_any_policy(name, self.settings), self.capacity)
        self.run(tier)
        return "".join(tier.victims)


TRACES: dict[str, HandTrace] = {}


def trace_of(
    name: str, capacity: int, victims: str, settings: PolicySettings | None = None
) -> Callable[[Callable[[Tier], None]], Callable[[Tier], None]]:
    """Register the decorated function as the trace of the policy `name`."""

    def register(run: Callable[[Tier], None]) -> Callable[[Tier], None]:
        TRACES[name] = HandTrace(run, capacity, victims, settings or PolicySettings())
        return run

    return register


def then(position: int, prompt: int = 1, shared: int = 1) -> NextRequest:
    return NextRequest(position, prompt, shared)


TAIL = PolicySettings(xi_blocks=3, new_blocks=1)  # the budget of a conversation of L blocks is L + 1 - 3
RATES = PolicySettings(xi_blocks=2, new_blocks_seen=(1, 3), turn_rate_per_s=0.2, end_rate_per_s=0.05)


@trace_of("lru", 2, "b")
@trace_of("fifo", 2, "a")
def _reads_one_chunk_again(tier: Tier) -> None:
    for at, chunk in enumerate("abac"):
        tier.read(chunk, at)


@trace_of("threshold-lru", 8, "bbba", PolicySettings(block_tokens=16, threshold_tokens=64))
def _has_a_conversation_below_the_threshold(tier: Tier) -> None:
    tier.turn("a", 0, length=5)
    tier.turn("b", 1, length=3)  # 48 tokens: not kept
    tier.turn("c", 2, length=4)


@trace_of("lookahead", 3, "bca")
def _has_waiting_sessions(tier: Tier) -> None:
    for at, session in enumerate("abc"):
        tier.read(session, at)
    tier.queue("a")
    tier.read("d", 3)  # a waits: b is evicted
    tier.queue("e", "d", "c")
    tier.read("e", 4)  # all wait: c, nearest the queue's tail, is evicted
    tier.start("a")
    tier.read("f", 5)  # a waits no longer


@trace_of("t-lru", 7, "aabbc", TAIL)
def _has_free_blocks_everywhere(tier: Tier) -> None:
    tier.turn("a", 0, length=4)
    tier.turn("b", 1, length=4)
    tier.turn("c", 2, length=4)


@trace_of("t-lru-guarded", 8, "aaaaccbb", TAIL)
def _has_a_conversation_idle_beyond_all_gaps(tier: Tier) -> None:
    tier.turn("a", 0, length=4)
    for at in (1, 2, 3):
        tier.turn("b", at, length=4)  # return gaps of 1 s
    tier.turn("c", 10, length=4)  # a is idle for 10 s
    tier.turn("b", 10.2, length=4)  # a return gap of 7.2 s
    tier.turn("d", 10.5, length=4)  # nothing is idle for longer: T-LRU


@trace_of("end-aware", 8, "bbbbaacc", TAIL)
def _has_a_conversation_that_does_not_return(tier: Tier) -> None:
    tier.turn("b", 0, length=4, then=NEVER)
    for at, group in enumerate("acd", 1):
        tier.turn(group, at, length=4, then=then(9))


@trace_of("length-aware", 6, "aaac", TAIL)
def _tells_the_lengths_of_the_next_turn(tier: Tier) -> None:
    tier.turn("a", 0, length=4, then=then(9, prompt=9, shared=1))  # 1 block is worth keeping
    tier.turn("b", 1, length=4, then=then(9, prompt=9, shared=4))  # all 4
    tier.turn("c", 2, length=2, then=NEVER)  # none


@trace_of("belady", 2, "ca")
def _tells_when_each_conversation_returns(tier: Tier) -> None:
    for at, (group, after) in enumerate({"a": then(9), "b": then(5), "c": NEVER, "d": then(7)}.items()):
        tier.turn(group, at, length=1, then=after)


@trace_of("tail-belady", 5, "abbbcccdd", PolicySettings(xi_blocks=2))
def _tells_when_and_with_what_each_conversation_returns(tier: Tier) -> None:
    tier.turn("a", 0, length=4, then=then(5, prompt=5, shared=4))  # 5 - xi = 3 blocks help
    tier.turn("b", 1, length=4, then=then(6, prompt=3, shared=4))  # 1 block helps
    tier.turn("c", 2, length=3, then=NEVER)
    tier.turn("d", 3, length=3, then=then(100, prompt=9, shared=3))  # all 3 help, but latest


# With RATES the last of four blocks matters with P = .5, the others always. The belief that a conversation lives after
# 1, 9 and 10 s is .95, .64 and .61; after 20 s it is below .5.
@trace_of("et-lru", 6, "abcaaabbbc", RATES)
def _has_a_conversation_idle_for_long(tier: Tier) -> None:
    tier.turn("a", 0, length=4)
    tier.turn("b", 9, length=4)
    tier.turn("c", 10, length=4)
    tier.turn("d", 30, length=4)


# In the fourth turn LRU's shadow computes a block more of `a` than that of T-LRU, which then leads. Before the second
# turn of a conversation Q^ is 0 and two blocks of four are free, afterwards one.
@trace_of("t-lru-auto", 9, "aaa" + "bbc" + "ca" + "bc" + "a" + "b", PolicySettings(xi_blocks=2, capacity_blocks=9))
def _shows_that_trimming_pays(tier: Tier) -> None:
    for number in range(8):
        tier.turn("abc"[number % 3], number, length=4, prompt=5, shared=4 if number > 2 else 0)


def test_every_policy_has_a_hand_written_trace() -> None:
    assert sorted(TRACES) == sorted(ALL_POLICIES), "write a trace with its victims for every policy, and only for those"


@pytest.mark.parametrize("name", sorted(TRACES))
def test_a_policy_evicts_the_victims_of_its_trace(name: str) -> None:
    assert TRACES[name].victims_of(name) == TRACES[name].victims


@pytest.mark.parametrize("name", sorted(TRACES))
def test_neither_lru_nor_fifo_nor_a_parent_evicts_the_victims_of_a_policys_trace(name: str) -> None:
    parents = {other for other, policy in ALL_POLICIES.items() if issubclass(ALL_POLICIES[name], policy)}
    for other in (parents | {"lru", "fifo"}) - {name}:
        assert TRACES[name].victims_of(other) != TRACES[name].victims, f"{other} passes as {name}"
