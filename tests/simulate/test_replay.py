"""The replay, number by number, against a naive reference and against the best that is possible."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.simulate import ALL_POLICIES, Row, Trace, make_any_policy, replay
from ragkv.store.policies import Policy, PolicySettings, make_policy

from .reference import XI_BLOCK_TOKENS, Reference, best_possible, random_rows

RATES = (0.2, 0.05)
OURS = {
    "auto",
    "et-lru-learned",
    "gdsf",
    "lfu-da",
    "gdsf-memory",
}  # no definition in docs/policies.md to compare with
SIBLINGS = sorted(set(ALL_POLICIES) - OURS - {"lookahead"})  # whose unit is a session
FIGURE_1 = [Row(0, 0, "A", 100, 0, 100), Row(1, 1, "B", 100, 0, 100)]


def policy_for(name: str, trace: Trace, xi: int, **others: float) -> Policy:
    settings = PolicySettings(
        xi_blocks=xi,
        block_tokens=XI_BLOCK_TOKENS,
        new_blocks=trace.expected_new_blocks,
        new_blocks_seen=tuple(trace.new_blocks),
        threshold_tokens=64,
        turn_rate_per_s=RATES[0],
        end_rate_per_s=RATES[1],
        **others,  # type: ignore[arg-type]
    )
    return make_any_policy(name, settings)


def run(name: str, rows: list[Row], capacity: int, xi: int, forced: bool = False) -> tuple[list[int], list[str]]:
    """Uncached blocks of every request, and the conversation of every evicted block."""
    trace = Trace.of(rows, XI_BLOCK_TOKENS)
    evicted: list[str] = []
    done = replay(
        trace,
        policy_for(name, trace, xi),
        capacity,
        forced=forced,
        on_evict=lambda group, blocks: evicted.extend([group] * blocks),
    )
    return done.uncached, evicted


@pytest.mark.parametrize("name", SIBLINGS)
def test_every_policy_equals_the_naive_reference_block_by_block(name: str) -> None:
    for seed in range(60):
        rows = random_rows(seed)
        for capacity, xi in ((3, 0), (8, 2), (15, 4), (40, 1), (0, 3)):
            for forced in (False, True):
                reference = Reference(name, rows, capacity, xi, forced=forced, rates=RATES)
                uncached, evicted = run(name, rows, capacity, xi, forced)
                where = (seed, capacity, xi, forced)
                assert (where, uncached) == (where, reference.uncached)
                if name not in ("t-lru-all", "t-lru-literal"):  # which trim everybody, in no particular order
                    assert (where, evicted) == (where, [group for _, group in reference.evicted])


@pytest.mark.parametrize(("policy", "worst"), [("lru", 200), ("t-lru", 150)])
def test_figure_1_of_the_paper(policy: str, worst: int) -> None:
    largest = 0
    for asks in "AB":
        rows = [*FIGURE_1, Row(2, 2, asks, 200, 100, 200)]
        trace = Trace.of(rows, 1)
        settings = PolicySettings(xi_blocks=150, new_blocks=100)
        largest = max(largest, *replay(trace, make_policy(policy, settings), 100).uncached)
    assert largest == worst


@pytest.mark.parametrize("name", ["t-lru", "t-lru-all", "t-lru-eager", "t-lru-guarded", "et-lru", "et-lru-posterior"])
def test_without_a_threshold_it_is_lru_decision_by_decision(name: str) -> None:
    for seed in range(200):
        rows = random_rows(seed, requests=40)
        assert run(name, rows, 12, 0) == run("lru", rows, 12, 0)


def test_tail_belady_is_the_best_possible_for_the_tail() -> None:
    for seed in range(300):
        rows = random_rows(seed, requests=9, conversations=3)
        for capacity, xi in ((3, 1), (5, 2)):
            uncached, _ = run("tail-belady", rows, capacity, xi)
            assert sum(max(0, b - xi) for b in uncached) == best_possible(rows, capacity, xi)


def test_belady_is_the_best_possible_for_hits_where_conversations_only_grow() -> None:
    for seed in range(300):
        rows = random_rows(seed, requests=9, conversations=3, contracting=False)
        for capacity in (3, 6):
            assert sum(run("belady", rows, capacity, 0)[0]) == best_possible(rows, capacity, 0)


def test_where_conversations_contract_tail_belady_without_a_threshold_bounds_the_hits() -> None:
    for seed in range(100):
        rows = random_rows(seed, requests=9, conversations=3)
        assert sum(run("tail-belady", rows, 4, 0)[0]) == best_possible(rows, 4, 0) <= sum(run("belady", rows, 4, 0)[0])


ROWS = st.integers(0, 10**6).map(random_rows)


@pytest.mark.parametrize("name", sorted(ALL_POLICIES))
@given(rows=ROWS, capacity=st.integers(0, 30), xi=st.integers(0, 8), forced=st.booleans())
def test_after_any_sequence_the_capacity_holds_and_the_books_equal_a_recount(
    name: str, rows: list[Row], capacity: int, xi: int, forced: bool
) -> None:
    trace = Trace.of(rows, XI_BLOCK_TOKENS)
    policy = policy_for(name, trace, xi)
    held: dict[str, int] = {}
    told, served = policy.held, policy.served

    def recount(group: str, blocks: int, size: int, now: float) -> None:
        assert 0 <= blocks == size
        held[group] = blocks
        told(group, blocks, size, now)

    def check(turn: object) -> None:
        assert sum(held.values()) <= capacity
        served(turn)  # type: ignore[arg-type]

    policy.held, policy.served = recount, check  # type: ignore[method-assign]
    done = replay(trace, policy, capacity, forced=forced)
    assert sum(held.values()) <= capacity
    assert all(
        turn.prompt - turn.shared <= b <= turn.prompt for b, turn in zip(done.uncached, trace.turns, strict=True)
    )


@pytest.mark.parametrize("name", sorted(ALL_POLICIES))
@given(rows=ROWS, capacity=st.integers(0, 30))
def test_what_is_pinned_is_never_evicted(name: str, rows: list[Row], capacity: int) -> None:
    trace = Trace.of(rows, XI_BLOCK_TOKENS)
    policy = policy_for(name, trace, 2)
    now_served = ""
    victim = policy.victim

    def watch(pinned: tuple[str, ...], now: float) -> object:
        cut = victim(pinned, now)
        assert pinned == (now_served,) and (cut is None or cut.group != now_served)
        return cut

    served = policy.served

    def note(turn: object) -> None:
        nonlocal now_served
        now_served = turn.group  # type: ignore[attr-defined]
        served(turn)  # type: ignore[arg-type]

    policy.victim, policy.served = watch, note  # type: ignore[assignment, method-assign]
    replay(trace, policy, capacity, forced=True)
