"""`reuse="prefix"`: exact blocks of any earlier prompt with the same beginning, and of no other."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ragkv import Engine, StoreConfig
from ragkv.assembly import PREFIX_SHARE
from ragkv.prompt import prefix_blocks
from ragkv.prompt.prefix_blocks import BLOCK_TOKENS
from ragkv.store.entry import Entry
from tests import tiny_models
from tests.engine.helpers import PREFIX, Q, close, counts, engine_of, full_prefill, ids

LONG = tiny_models.tokens(2 * BLOCK_TOKENS + 5, seed=11)
OTHER = tiny_models.tokens(BLOCK_TOKENS, seed=12)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with engine_of() as engine:
        yield engine


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_a_prompt_finds_the_whole_blocks_that_an_earlier_one_began_with(family: str) -> None:
    with engine_of(family) as engine:
        first = engine.prefill(Q, [LONG], reuse="prefix")
        second = engine.prefill(Q[::-1], [LONG, OTHER], reuse="prefix")
        length = len(ids([LONG, OTHER]))
        rope = engine.model.adapter.rope
        first_length = len(ids([LONG]))
        digests = {rope.digest(n) for n in (first_length, first_length + 1, length)}
        is_lasting = len(digests) == 1
    found = 2 * BLOCK_TOKENS if is_lasting else 0
    assert first.reuse.exact in (0, len(PREFIX))
    assert second.reuse.exact - first.reuse.exact == found
    assert (second.reuse.fused, second.reuse.recomputed) == (0, 0)
    close(second.logits, full_prefill(ids([LONG, OTHER], Q[::-1]), family)[0])


def test_a_block_is_found_only_behind_the_same_tokens(engine: Engine) -> None:
    engine.prefill(Q, [LONG], reuse="prefix")
    changed = [*LONG[:40], LONG[40] ^ 1, *LONG[41:]]
    assert engine.prefill(Q, [changed], reuse="prefix").reuse.exact == 1 + BLOCK_TOKENS
    assert engine.prefill(Q, [OTHER, LONG], reuse="prefix").reuse.exact == 1


def test_a_prompt_that_was_seen_whole_computes_its_last_token(engine: Engine) -> None:
    prompt = LONG[: 2 * BLOCK_TOKENS]
    first = engine.prefill([], [prompt], reuse="prefix")
    again = engine.prefill([], [prompt], reuse="prefix")
    # the last block has the last token, so it is not kept
    assert counts(again.reuse) == (1 + BLOCK_TOKENS, 0, 0, BLOCK_TOKENS)
    close(again.logits, first.logits)


def test_blocks_stand_behind_a_conversations_history(engine: Engine) -> None:
    for name in "ab":
        engine.append(engine.session(name), Q, Q, [], reuse="prefix")
    asked = [engine.prefill(Q, [LONG], engine.session(name), reuse="prefix").reuse for name in "ab"]
    assert asked[1].exact - asked[0].exact == 2 * BLOCK_TOKENS


def test_other_kinds_of_reuse_neither_keep_nor_find_blocks(engine: Engine) -> None:
    engine.prefill(Q, [LONG], reuse="none")
    engine.prefill(Q, [LONG], reuse="fused")
    assert engine.prefill(Q, [LONG], reuse="prefix").reuse.exact == 1
    assert engine.prefill(Q, [LONG], reuse="none").reuse.exact == 0


def test_a_deletion_forgets_the_blocks_which_may_hold_what_was_deleted(engine: Engine) -> None:
    engine.prefill(Q, [LONG], reuse="prefix")
    engine.entries.delete([OTHER])
    assert engine.prefill(Q, [LONG], reuse="prefix").reuse.exact == 1


def while_the_first_block_is_copied(patch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Call `act` once, when a request copies a block to keep it."""
    acts = iter([act])

    def entry(*fields: Any) -> Entry:
        next(acts, lambda: None)()
        return Entry(*fields)

    patch.setattr(prefix_blocks, "Entry", entry)


def test_a_deletion_while_a_prompt_is_kept_forgets_its_blocks_too(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    while_the_first_block_is_copied(monkeypatch, lambda: engine.entries.delete([OTHER]))
    engine.prefill(Q, [LONG], reuse="prefix")
    assert engine.prefill(Q, [LONG], reuse="prefix").reuse.exact == 1
    assert engine.prefill(Q, [LONG], reuse="prefix").reuse.exact == 1 + 2 * BLOCK_TOKENS


def test_a_block_that_two_requests_keep_at_once_takes_its_room_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with engine_of() as probe:
        block_bytes = BLOCK_TOKENS * probe.stats().kv_bytes_per_token
    room = PREFIX_SHARE * 2 * block_bytes  # for the two blocks of the prompt
    with engine_of(store=StoreConfig(memory_bytes=room)) as engine:
        while_the_first_block_is_copied(
            monkeypatch, lambda: engine.prefill(Q, [LONG], reuse="prefix")
        )
        engine.prefill(Q, [LONG], reuse="prefix")
        assert engine.prefill(Q, [LONG], reuse="prefix").reuse.exact == 1 + 2 * BLOCK_TOKENS


def test_the_least_recently_used_blocks_make_room() -> None:
    with engine_of() as probe:
        block_bytes = BLOCK_TOKENS * probe.stats().kv_bytes_per_token
    room = PREFIX_SHARE * 2 * block_bytes  # for two blocks
    with engine_of(store=StoreConfig(memory_bytes=room)) as engine:
        engine.prefill(Q, [LONG], reuse="prefix")
        engine.prefill(Q, [OTHER, OTHER[:4]], reuse="prefix")
        assert engine.prefill(Q, [OTHER, OTHER[:4]], reuse="prefix").reuse.exact > 1
        # its first block had to go, and none is found behind a gap
        assert engine.prefill(Q, [LONG], reuse="prefix").reuse.exact == 1
