"""The replay, against a naive reference block by block and against the best possible caching."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.queueing import SessionTier
from benchmarks.simulate import (
    ALL_POLICIES,
    Trace,
    TraceRow,
    TraceSettings,
    make_any_policy,
    replay,
)
from benchmarks.simulate.policies import ThresholdLRU
from ragkv.store.policies import Policy, PolicySettings

from .reference import BLOCK_TOKENS, Reference, best_possible, random_rows

RATES = (0.2, 0.05)
WITHOUT_REFERENCE = {  # their hand-written traces stand at the end of this file
    "lookahead",  # evicts whole sessions
}
FIGURE_1 = [TraceRow(0, 0, "A", 100, 0, 100), TraceRow(1, 1, "B", 100, 0, 100)]


@pytest.fixture(autouse=True)
def short_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThresholdLRU, "THRESHOLD_TOKENS", 64)


def policy_for(name: str, trace: Trace, xi: int) -> Policy:
    settings = TraceSettings(
        xi_blocks=xi,
        block_tokens=BLOCK_TOKENS,
        new_blocks=trace.expected_new_blocks,
        new_blocks_seen=tuple(trace.new_blocks),
        turn_rate_per_s=RATES[0],
        end_rate_per_s=RATES[1],
    )
    return make_any_policy(name, settings)


def run(
    name: str, rows: list[TraceRow], capacity: int, xi: int, forced: bool = False
) -> tuple[list[int], list[str]]:
    """Uncached blocks of every request, and the conversation of every evicted block."""
    trace = Trace.of(rows, BLOCK_TOKENS)
    evicted: list[str] = []
    done = replay(
        trace,
        policy_for(name, trace, xi),
        capacity,
        forced=forced,
        on_evict=lambda group, blocks: evicted.extend([group] * blocks),
    )
    return done.uncached, evicted


@pytest.mark.parametrize("name", sorted(set(ALL_POLICIES) - WITHOUT_REFERENCE))
def test_every_policy_evicts_as_its_naive_reference_does_block_by_block(name: str) -> None:
    for seed in range(60):
        rows = random_rows(seed)
        for capacity, xi in ((3, 0), (8, 2), (15, 4), (40, 1), (0, 3)):
            for forced in (False, True):
                reference = Reference(name, rows, capacity, xi, forced=forced, end_rate=RATES[1])
                uncached, evicted = run(name, rows, capacity, xi, forced)
                where = (seed, capacity, xi, forced)
                assert (where, uncached) == (where, reference.uncached)
                assert (where, evicted) == (where, reference.evicted)


@pytest.mark.parametrize(("policy", "worst"), [("lru", 200), ("t-lru", 150)])
def test_the_replay_reproduces_figure_1_of_the_t_lru_paper(policy: str, worst: int) -> None:
    largest = 0
    for asks in "AB":
        rows = [*FIGURE_1, TraceRow(2, 2, asks, 200, 100, 200)]
        trace = Trace.of(rows, 1)
        settings = PolicySettings(xi_blocks=150, new_blocks=100)
        largest = max(largest, *replay(trace, make_any_policy(policy, settings), 100).uncached)
    assert largest == worst


@pytest.mark.parametrize("name", ["t-lru", "t-lru-guarded", "et-lru"])
def test_a_tail_policy_without_a_threshold_makes_the_decisions_of_lru(name: str) -> None:
    for seed in range(200):
        rows = random_rows(seed, requests=40)
        assert run(name, rows, 12, 0) == run("lru", rows, 12, 0)


def test_tail_belady_reaches_the_least_possible_tel() -> None:
    for seed in range(300):
        rows = random_rows(seed, requests=9, conversations=3)
        for capacity, xi in ((3, 1), (5, 2)):
            uncached, _ = run("tail-belady", rows, capacity, xi)
            assert sum(max(0, b - xi) for b in uncached) == best_possible(rows, capacity, xi)


def test_belady_reaches_the_most_possible_hits_where_conversations_only_grow() -> None:
    for seed in range(300):
        rows = random_rows(seed, requests=9, conversations=3, contracting=False)
        for capacity in (3, 6):
            assert sum(run("belady", rows, capacity, 0)[0]) == best_possible(rows, capacity, 0)


def test_tail_belady_without_a_threshold_bounds_the_hits_where_conversations_contract() -> None:
    for seed in range(100):
        rows = random_rows(seed, requests=9, conversations=3)
        assert (
            sum(run("tail-belady", rows, 4, 0)[0])
            == best_possible(rows, 4, 0)
            <= sum(run("belady", rows, 4, 0)[0])
        )


ROWS = st.integers(0, 10**6).map(random_rows)


@pytest.mark.parametrize("name", sorted(ALL_POLICIES))
@given(rows=ROWS, capacity=st.integers(0, 30), xi=st.integers(0, 8), forced=st.booleans())
def test_a_replay_never_exceeds_its_capacity_and_never_reuses_more_than_is_shared(
    name: str, rows: list[TraceRow], capacity: int, xi: int, forced: bool
) -> None:
    trace = Trace.of(rows, BLOCK_TOKENS)
    policy = policy_for(name, trace, xi)
    held: dict[str, int] = {}
    report_held = policy.held
    served = policy.turn_prefilled

    def recount(group: str, blocks: int, size: int, now: float) -> None:
        assert 0 <= blocks == size
        held[group] = blocks
        report_held(group, blocks, size, now)

    def check(turn: object) -> None:
        assert sum(held.values()) <= capacity
        served(turn)  # type: ignore[arg-type]

    # type: ignore[method-assign]
    policy.held = recount
    policy.turn_prefilled = check
    done = replay(trace, policy, capacity, forced=forced)
    assert sum(held.values()) <= capacity
    assert all(
        turn.prompt - turn.shared <= b <= turn.prompt
        for b, turn in zip(done.uncached, trace.turns, strict=True)
    )


# Policies without a reference have a trace by hand, whose victims neither LRU nor FIFO chooses.


def victims_with_waiting_sessions(name: str) -> str:
    """The sessions that a tier of three evicts, in order, while others wait in the queue."""
    victims: list[str] = []
    policy = make_any_policy(name)
    tier = SessionTier(policy, 3, lambda group, _: victims.append(group), whole=True)
    for at, session in enumerate("abc"):
        tier.hold(session, 1, at)
    policy.queued("a", 0)
    tier.hold("d", 1, 3)  # a waits: b is evicted
    for number, session in enumerate("edc", 1):
        policy.queued(session, number)
    tier.hold("e", 1, 4)  # all wait: c, nearest the queue's tail, is evicted
    policy.left("a", 0)
    tier.hold("f", 1, 5)  # a waits no longer
    return "".join(victims)


def test_lookahead_evicts_the_victims_of_its_trace() -> None:
    assert victims_with_waiting_sessions("lookahead") == "bca"
    assert all(victims_with_waiting_sessions(other) != "bca" for other in ("lru", "fifo", "t-lru"))
