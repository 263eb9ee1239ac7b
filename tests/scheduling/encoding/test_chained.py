"""A chunk behind the same chunks as before is exact; its entry goes with every text that it holds or has seen."""

import dataclasses
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from ragkv import Engine, StoreConfig
from ragkv.errors import ConfigError
from tests import tiny_models
from tests.engine.helpers import A, B, C, Q, close, counts, engine_of, full_prefill, ids, text_engine
from tests.scheduling.encoding.test_background import damage_layer

D = tiny_models.tokens(6, seed=9)


def chained(family: str = "llama", directory: Path | None = None, **changes: Any) -> Engine:
    """An engine that makes chained entries."""
    settings = dict(chained_entries=4, directory=None if directory is None else str(directory), **changes)
    return engine_of(family, store=StoreConfig(**settings))


def served(engine: Engine, chunks: list[list[int]], **options: Any) -> Any:
    """The report of a request, after which everything that it misses is encoded."""
    reuse = engine.prefill(Q, chunks, **{"ratio": 0.0, **options}).reuse
    engine.flush()
    return reuse


def links(engine: Engine) -> dict[str, tuple[int, ...]]:
    """The token ids of the chained entries, by key."""
    return {info.key: info.token_ids for info in engine.parts.store.infos() if info.identity.behind}


def key(engine: Engine, chunk: list[int]) -> str:
    return engine.parts.encoder.identity.key(chunk)


class TestExact:
    @pytest.mark.parametrize("family", tiny_models.FAMILIES)
    @pytest.mark.parametrize("reuse", ["fused", "prefix"])
    def test_chunks_behind_the_same_chunks_are_exact_in_every_family(self, family: str, reuse: Any) -> None:
        chunks = [A, B, C]
        with chained(family) as engine:
            served(engine, chunks, reuse=reuse)
            again = engine.prefill(Q, chunks, ratio=0.0, reuse=reuse)
            close(again.logits, full_prefill(ids(chunks), family)[0])
            exact = len(ids(chunks)) - len(Q)
            if family not in tiny_models.LENGTH_DEPENDENT:
                assert counts(again.reuse) == (exact, 0, 0, len(Q))

    @pytest.mark.parametrize("family", tiny_models.SLIDING)
    def test_a_chain_may_be_longer_than_the_window(self, family: str) -> None:
        chunks = [tiny_models.tokens(2 * tiny_models.WINDOW, seed) for seed in (5, 6, 7)]
        with chained(family) as engine:
            served(engine, chunks)
            again = engine.prefill(Q, chunks, ratio=0.0)
            close(again.logits, full_prefill(ids(chunks), family)[0])
            assert again.reuse.fused == 0

    def test_chunks_behind_the_chain_are_fused(self) -> None:
        with chained() as engine:
            engine.warm([A, B, C, D])
            served(engine, [A, B])
            fused = engine.prefill(Q, [A, B, D], ratio=0.0)
            assert counts(fused.reuse) == (1 + len(A) + len(B), len(D), 0, len(Q))

    def test_chunks_behind_the_chain_are_computed_where_only_exact_kv_is_reused(self) -> None:
        with chained() as engine:
            engine.warm([A, B, C, D])
            served(engine, [A, B])
            exact = engine.prefill(Q, [A, B, D], reuse="prefix")
            assert counts(exact.reuse) == (1 + len(A) + len(B), 0, 0, len(D) + len(Q))
            close(exact.logits, full_prefill(ids([A, B, D]))[0])
            (why,) = [span.why for span in exact.spans if span.why]
            assert "behind what precedes it" in why

    def test_the_same_chunks_in_another_order_are_not_exact(self) -> None:
        with chained() as engine:
            engine.warm([A, B])
            served(engine, [A, B])
            assert engine.prefill(Q, [B, A], ratio=0.0).reuse.exact == 1 + len(B)

    def test_a_chunk_that_is_missing_in_front_is_computed_and_the_chain_stays_exact(self) -> None:
        with chained() as engine:
            served(engine, [A, B])
            file_key = key(engine, A)
            engine.parts.store._tiers[0].delete(file_key)  # as if it was evicted
            again = engine.prefill(Q, [A, B], ratio=0.0)
            assert counts(again.reuse) == (1 + len(B), 0, 0, len(A) + len(Q))
            close(again.logits, full_prefill(ids([A, B]))[0])

    def test_a_conversation_begins_with_a_chain_and_stays_exact(self) -> None:
        with chained() as engine:
            served(engine, [A, B])
            session = engine.session("s")
            engine.append(session, Q, C, [A, B], ratio=0.0)
            assert engine.prefill(Q, [], session, ratio=0.0).reuse.fused == 0

    def test_without_the_setting_nothing_is_chained(self) -> None:
        with engine_of() as engine:
            served(engine, [A, B])
            assert served(engine, [A, B]).exact == 1 + len(A)
            assert not links(engine)
            assert engine.reuse_order([B, A, B]) == [0, 1]

    def test_entries_of_a_codec_that_rounds_are_not_chained(self) -> None:
        with chained(codec="int8") as engine:
            served(engine, [A, B])
            assert not links(engine)

    def test_text_between_chunks_ends_the_chain(self) -> None:
        from ragkv.types import Text

        with chained() as engine:
            served(engine, [A, Text(tuple(D)), B])
            assert not links(engine)

    def test_a_request_that_reuses_nothing_makes_no_chain(self) -> None:
        with chained() as engine:
            served(engine, [A, B], reuse="none")
            assert not links(engine)

    def test_looking_for_a_chain_in_vain_is_no_cache_miss(self) -> None:
        with chained() as engine:
            engine.warm([A, B])
            before = engine.stats().store.tiers[0].misses
            assert engine.prefill(Q, [A, B], ratio=0.0).reuse.missed_chunks == 0
            assert engine.stats().store.tiers[0].misses == before

    def test_a_negative_setting_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="chained_entries"):
            StoreConfig(chained_entries=-1)


class TestStorage:
    def test_chains_survive_a_restart(self, tmp_path: Path) -> None:
        with chained(directory=tmp_path) as engine:
            served(engine, [A, B, C])
        with chained(directory=tmp_path, memory_bytes=0) as engine:
            assert engine.prefill(Q, [A, B, C], ratio=0.0).reuse.exact == len(ids([A, B, C])) - len(Q)
            assert engine.reuse_order([C, B, A]) == [2, 1, 0]

    def test_chains_survive_the_loss_of_the_index(self, tmp_path: Path) -> None:
        with chained(directory=tmp_path) as engine:
            served(engine, [A, B])
        for file in (tmp_path / "index").iterdir():
            file.unlink()
        with chained(directory=tmp_path) as engine:
            engine.delete([A])
            assert not links(engine)

    def test_a_damaged_entry_is_a_miss_and_is_made_again(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.CRITICAL)
        with chained(directory=tmp_path, memory_bytes=0) as engine:
            served(engine, [A, B])
            (file,) = tmp_path.glob("entries/*/*~*.safetensors")
            damage_layer(file, 2)
            prefill = engine.prefill(Q, [A, B], reuse="prefix")
            assert prefill.reuse.exact == 1 + len(A)
            close(prefill.logits, full_prefill(ids([A, B]))[0])
            engine.flush()
            assert engine.prefill(Q, [A, B], reuse="prefix").reuse.exact == 1 + len(A) + len(B)

    def test_at_most_so_many_of_a_chunk_are_stored_and_the_last_used_stay(self) -> None:
        others = [tiny_models.tokens(5, seed) for seed in range(20, 25)]
        with chained() as engine:
            for other in others[:4]:
                served(engine, [other, A])
            served(engine, [others[0], A])  # a use
            served(engine, [others[4], A])
            found = [len(engine.parts.chained.stored([tuple(other), tuple(A)])) == 2 for other in others]
            assert found == [True, False, True, True, True]

    def test_a_full_tier_drops_the_chains_of_a_chunk_before_the_chunk(self) -> None:
        with engine_of() as measured:
            served(measured, [A])
            one = measured.stats().store.tiers[0].used_bytes // len(A)
        capacity = one * (len(A) + len(B) + len(B) + len(C))
        with chained(memory_bytes=capacity, memory_reserve_bytes=0, policy="lru") as engine:
            served(engine, [A, B])
            assert len(links(engine)) == 1
            engine.warm([C, D])
            assert engine.stats().store.tiers[0].used_bytes <= capacity
            held = {info.key for info in engine.parts.store.infos()}
            assert not links(engine) or key(engine, B) in held


class TestDeletion:
    @pytest.mark.parametrize("deleted", ["A", "B", "C"])
    def test_every_chain_that_holds_or_has_seen_a_deleted_text_goes(self, tmp_path: Path, deleted: str) -> None:
        chunks = {"A": A, "B": B, "C": C}
        with chained(directory=tmp_path) as engine:
            served(engine, [A, B, C])
            served(engine, [D, A])
            engine.delete([chunks[deleted]])
            left = {tuple(info): None for info in links(engine).values()}
            files = {file.stem for file in tmp_path.glob("entries/*/*~*.safetensors")}
            assert files == set(links(engine))
            want = {"A": [], "B": [A], "C": [A, B]}[deleted]
            assert set(left) == set(map(tuple, want))

    def test_a_chain_that_is_encoded_while_its_text_is_deleted_is_not_stored(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with chained() as engine:
            engine.warm([A, B])
            encode = engine.parts.chained.encode

            def delete_first(*args: Any) -> Any:
                entry = encode(*args)
                engine.delete([A])
                return entry

            monkeypatch.setattr(engine.parts.chained, "encode", delete_first)
            served(engine, [A, B])
            assert not links(engine)

    def test_an_entry_that_another_replica_deleted_takes_its_chains_along(self) -> None:
        with chained() as engine:
            served(engine, [A, B])
            engine.drop([key(engine, A)])
            assert not links(engine)

    def test_a_sweep_drops_chains_of_texts_that_are_not_kept(self) -> None:
        with chained() as engine:
            served(engine, [A, B])
            served(engine, [C, B])
            assert engine.count_stale([A, B]) == (0, 1)
            engine.retain([A, B])
            assert len(links(engine)) == 1
            engine.parts.store._tiers[0].delete(key(engine, A))  # its chain outlives it
            engine.retain([B])
            assert not links(engine)

    def test_gc_keeps_own_chains_and_drops_those_of_other_models(self, tmp_path: Path) -> None:
        with chained(directory=tmp_path) as engine:
            served(engine, [A, B])
            assert engine.gc() == 0
        with chained("qwen2", directory=tmp_path) as other:
            other.gc()
            assert not links(other)

    def test_orphaned_blocks_of_conversations_are_no_chains(self, tmp_path: Path) -> None:
        with chained(directory=tmp_path) as engine:
            served(engine, [A, B])
            assert engine.parts.store.block_keys() == []


class TestOrder:
    def test_the_longest_stored_chain_comes_first_and_duplicates_are_dropped(self) -> None:
        with chained() as engine:
            served(engine, [C, A, B])
            served(engine, [B, A])
            assert engine.reuse_order([A, B, A, D, C]) == [4, 0, 1, 3]
            assert engine.reuse_order([D, A, B]) == [2, 1, 0]
            assert engine.reuse_order([D, A]) == [0, 1]
            assert engine.reuse_order([]) == []

    def test_the_order_is_that_of_an_exhaustive_search(self) -> None:
        chunks, runs = [A, B, C, D], list(itertools.permutations(range(4)))
        with chained() as engine:
            for run in ([A, B, C], [B, A], [C, D, B, A], [D, C]):
                served(engine, run)
            for some in itertools.permutations(chunks):
                order = engine.reuse_order(some)
                assert sorted(order) == [0, 1, 2, 3]
                exact = {run: self.exact(engine, [some[index] for index in run]) for run in runs}
                assert exact[tuple(order)] == max(exact.values())

    def exact(self, engine: Engine, chunks: list[list[int]]) -> int:
        """How many tokens of these chunks are exact in this order."""
        found = engine.parts.chained.stored([tuple(chunk) for chunk in chunks])
        return sum(len(chunk) for chunk in chunks[: len(found)]) if len(found) > 1 else 0

    def test_chunks_may_be_texts(self) -> None:
        with text_engine(store=StoreConfig(chained_entries=2)) as engine:
            engine.prefill("Which?", ["first text", "second text"], ratio=0.0)
            engine.flush()
            assert engine.reuse_order(["second text", "first text"]) == [1, 0]


def test_identities_without_chains_have_the_keys_of_earlier_versions() -> None:
    with engine_of() as engine:
        identity = engine.parts.encoder.identity
        assert "behind" not in json.loads(identity.to_json())
        behind = dataclasses.replace(identity, behind="0" * 32)
        assert type(identity).from_json(behind.to_json()) == behind
        assert behind.key(A) == f"{identity.key(A)}~{'0' * 32}"
