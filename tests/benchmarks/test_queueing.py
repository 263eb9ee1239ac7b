"""Sessions in a queue over memory and disk, with small numbers."""

from benchmarks.queueing import QueueServer, serve
from benchmarks.simulate.workloads import GeneratedSession, ShareGPTLike

LOAD = ShareGPTLike(sessions=300).draw()
MANY = QueueServer(memory_tokens=10**9, disk_tokens=10**9)


def test_every_later_turn_hits_memory_if_all_sessions_fit() -> None:
    done = serve(LOAD, "lru", MANY)
    assert (done.hit_rate, done.memory_share) == (1.0, 1.0)
    assert done.turns + done.first_turns == sum(len(session.turns) for session in LOAD)


def test_a_session_evicted_from_memory_is_found_on_disk() -> None:
    sessions = [GeneratedSession(n * 10.0, ((5, 5, 100.0), (5, 5, 0.0))) for n in range(3)]
    done = serve(sessions, "lru", QueueServer(memory_tokens=20, disk_tokens=100))
    assert (done.from_memory, done.from_disk) == (0, 3)


def test_look_ahead_hits_more_under_overload_and_nearly_always_in_memory() -> None:
    at_once = ShareGPTLike(sessions=300, arrivals_per_s=10.0, think_s=5.0).draw()
    server = QueueServer(memory_tokens=40_000, disk_tokens=160_000)
    lru = serve(at_once, "lru", server)
    ahead = serve(at_once, "lookahead", server)
    assert lru.mean_queue > 50
    assert ahead.hit_rate > 1.3 * lru.hit_rate
    assert ahead.memory_share > 0.9 > lru.memory_share
