"""Chunk entries in the simulator: what is found, and the hits of each policy."""

import pytest

from ragkv.lab.simulate import ALL_POLICIES, RagRequest, make_any_policy
from ragkv.lab.simulate.chunks import Read, position_free, replay_chunks
from ragkv.lab.simulate.ragpulse import PromptPart
from ragkv.store.policies import make_policy


def request(at: float, *passages: int) -> RagRequest:
    parts = (
        PromptPart("sys_prompt", 0, 10),
        *(PromptPart("passages_ids", n, 5) for n in passages),
        PromptPart("user_input", int(at), 2),
    )
    return RagRequest(at, "s", parts, 7)


ASKED = [request(0, 1, 2), request(1, 2, 1)]


def hits(reads: list[Read]) -> int:
    return replay_chunks(reads, make_policy("lru"), 1_000).hit_tokens


def test_passages_in_another_order_are_found_position_free() -> None:
    assert hits(position_free(ASKED)) == 10 + 5 + 5


def test_a_chunk_tier_holds_a_chunk_whole_or_not_at_all() -> None:
    reads = [Read(0, "a", 5), Read(1, "b", 4), Read(2, "a", 5), Read(3, "big", 9), Read(4, "a", 5)]
    evicted: list[str] = []
    done = replay_chunks(reads, make_policy("lru"), 8, on_evict=evicted.append)
    assert (done.hit_tokens, done.tokens, evicted) == (5, 28, ["a", "b"])


@pytest.mark.parametrize("name", sorted(ALL_POLICIES))
def test_no_policy_finds_more_than_was_ever_read(name: str) -> None:
    reads = [Read(n, f"k{n * n % 7}", 1 + n % 3) for n in range(60)]
    done = replay_chunks(reads, make_any_policy(name), 6)
    assert 0 <= done.hits <= 60 - len({read.key for read in reads})
