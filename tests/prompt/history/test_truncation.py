"""A conversation outgrows the context: tokens are dropped, the kept KV is rotated, nothing is
computed again.
"""

from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.config import SessionConfig
from ragkv.errors import ConfigError, InputError, PromptTooLongError
from ragkv.prompt.history import Block, History, Part, PartKind, fitted, merged
from ragkv.prompt.history.truncation import View
from ragkv.registry import DISCARDING_LISTS
from tests import reference, tiny_models
from tests.engine.helpers import A, B, close, full_prefill
from tests.fixed import fixed
from tests.sessions.helpers import ask, engine_at, files, question, talk, with_kv

CONTEXT = 59


def small_engine(directory: Path | None = None, **session: Any) -> Engine:
    model = tiny_models.model("llama")
    model.config.max_position_embeddings = CONTEXT
    config = EngineConfig(
        store=StoreConfig(directory=None if directory is None else str(directory)),
        fusion=fixed(selector="first-k"),
        session=SessionConfig(**{"block_tokens": 8, "sink_tokens": 0, **session}),
    )
    return Engine(model, config=config)


def fill(engine: Engine) -> Any:
    """A session with as many turns of 9 tokens as fit."""
    return talk(engine, turns=6)


class TestEdit:
    """`History.without` against a plain list of ids."""

    history = History(
        (Block("a", "p", "f", (1, 2, 3, 4), 0, 0, 4), Block("b", "p", "f", (5, 6, 7), 1, 1, 3)),
        (8, 9),
        (Part(PartKind.CHUNK, 3), Part(PartKind.QUESTION, 2), Part(PartKind.ANSWER, 3)),
    )

    @pytest.mark.parametrize(
        "ranges", [[], [(0, 2)], [(1, 3)], [(3, 5)], [(0, 8)], [(2, 3), (4, 7)], [(6, 8)]]
    )
    def test_without_drops_exactly_the_given_ranges(self, ranges: list[tuple[int, int]]) -> None:
        gone = {index for start, stop in ranges for index in range(start, stop)}
        kept = tuple(
            token for index, token in enumerate(self.history.token_ids) if index not in gone
        )
        cut = self.history.without(ranges)
        assert cut.token_ids == kept
        assert sum(map(len, cut.parts)) == len(kept) == len(cut)

    @pytest.mark.parametrize("wrong", [(2, 1), (-1, 2), (0, 9), (0,), "ab", (0.5, 1), None, 3])
    def test_an_invalid_range_is_refused(self, wrong: Any) -> None:
        with pytest.raises(InputError, match="no range"):
            merged([wrong], 8)

    def test_overlapping_ranges_in_any_order_are_merged(self) -> None:
        assert merged([(4, 6), (0, 2), (1, 3), (5, 5)], 8) == [(0, 3), (4, 6)]


class TestDroppedTokens:
    parts = (
        Part(PartKind.CHUNK, 4, 0),
        Part(PartKind.CHUNK, 2, 0),
        Part(PartKind.QUESTION, 2, 0),
        Part(PartKind.ANSWER, 2, 0),
        Part(PartKind.CHUNK, 6, 1),
        Part(PartKind.QUESTION, 2, 1),
        Part(PartKind.ANSWER, 2, 1),
    )

    def dropped(self, name: str, needed: int, target: int, sinks: int = 0) -> list[tuple[int, int]]:
        view = View(History((), tuple(range(20)), self.parts), needed, target, sinks)
        found: list[tuple[int, int]] = resolve_name(DISCARDING_LISTS[name])(view)
        return found

    def test_oldest_drops_the_first_tokens_behind_the_sinks(self) -> None:
        assert self.dropped("oldest", 1, 10) == [(0, 10)]
        assert self.dropped("oldest", 1, 10, sinks=3) == [(3, 13)]

    def test_keep_dialogue_drops_all_documents_of_a_turn_the_oldest_turn_first_and_then_the_oldest_words(
        self,
    ) -> None:
        assert self.dropped("keep-dialogue", 1, 3) == [(0, 4), (4, 6)]
        assert self.dropped("keep-dialogue", 1, 10) == [(0, 4), (4, 6), (10, 16)]
        assert self.dropped("keep-dialogue", 1, 10, sinks=5) == [(5, 6), (10, 16)]
        # half of the 8 remaining words
        assert merged(self.dropped("keep-dialogue", 13, 10), 20) == [(0, 16)]

    @pytest.mark.parametrize("discard", DISCARDING_LISTS)
    def test_all_history_is_dropped_before_a_prompt_is_refused(self, discard: str) -> None:
        history = History((), tuple(range(20)), self.parts)
        for room in range(12):
            for sinks in (0, 3, 30):
                settings = SessionConfig(sink_tokens=sinks, discard=discard)
                assert len(fitted(history, room, settings)[0]) <= room

    def test_a_list_that_drops_nothing_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Otherwise it would be asked again for ever."""
        monkeypatch.setattr("ragkv.prompt.history.truncation.oldest", lambda _view: [(0, 0)])
        with pytest.raises(ConfigError, match="'oldest' dropped nothing of a history of 9 tokens"):
            fitted(History((), tuple(range(9))), 3, SessionConfig(discard="oldest"))

    def test_truncation_drops_half_of_the_history_behind_four_sinks_at_a_time(self) -> None:
        history = History((), tuple(range(21)))
        assert fitted(history, 20, SessionConfig()) == (
            History((), (0, 1, 2, 3, *range(14, 21))),
            "history truncated: 10 of 21 tokens dropped",
        )
        assert len(fitted(history, 5, SessionConfig())[0]) == 4  # 21 -> 11 -> 6 -> the sinks
        assert fitted(history, 21, SessionConfig()) == (history, None)


class TestReuseAfterTruncation:
    def test_a_turn_after_truncation_computes_only_its_new_tokens(self, tmp_path: Path) -> None:
        with small_engine(tmp_path) as engine:
            session = fill(engine)
            before = len(session.token_ids)
            reuse = ask(engine, session, 6).reuse
            dropped = before // 2
            assert reuse.notes == (f"history truncated: {dropped} of {before} tokens dropped",)
            assert reuse.tokens == 1 + before - dropped + 5
            assert reuse.computed == 1 + 5  # the token without KV, and the question
            assert reuse.fused == before - dropped - 1
            assert reuse.compute == pytest.approx(6 / reuse.tokens)
            assert ask(engine, session, 7).reuse.computed == 6  # the next turn, too

    def test_kept_kv_is_rotated_to_its_new_positions(self) -> None:
        """The logits equal the model's own pass over the kept raw keys, rotated to their new
        positions.
        """
        with small_engine() as engine:
            session = fill(engine)
            blocks = session.state.history.blocks
            prefill = engine.prefill(question(6), session=session)
            assert prefill.reuse.fused > 0
            kept = len(session.token_ids) - len(session.token_ids) // 2
            ids = [1, *session.token_ids[-kept:], *question(6)]
            assert prefill.token_ids.tolist() == ids
            raw = []
            for block in blocks:
                lease = engine.sessions.blocks.writer.lease(block)
                with lease:
                    raw.append(torch.stack([lease.read_layer(layer) for layer in range(4)]))
            stored = torch.cat(raw, dim=3)[:, :, :, -(kept - 1) :]  # (L, 2, G, T, D)
            cache = reference.full_prefill(tiny_models.model("llama"), ids[:1])[1]
            naive = tiny_models.model("llama")
            places = torch.arange(1, kept)
            for layer in range(4):
                cos, sin = reference.embeddings_at(naive, layer, places, len(ids))
                k_rot = engine.model.adapter.rotate(layer, stored[layer, 0][None], cos, sin)
                cache.update(k_rot, stored[layer, 1][None], layer)
            rest = torch.tensor([ids[kept:]])
            out = naive(
                rest, past_key_values=cache, position_ids=torch.arange(kept, len(ids))[None]
            )
            close(prefill.logits, out.logits[0, -1])

    def test_truncated_history_is_approximate_and_ratio_one_is_exact(self) -> None:
        with small_engine() as engine:
            session = fill(engine)
            ids = engine.prefill(question(6), session=session).token_ids.tolist()
            whole = full_prefill(ids)[0]
            assert not torch.allclose(
                engine.prefill(question(6), session=session).logits, whole, atol=1e-2
            )
            close(engine.prefill(question(6), session=session, ratio=1.0).logits, whole)

    def test_truncation_keeps_the_sink_tokens(self) -> None:
        with small_engine(sink_tokens=4) as engine:
            session = fill(engine)
            before = session.token_ids
            ask(engine, session, 6)
            assert session.token_ids[:4] == before[:4]
            assert session.token_ids[4:].index(before[4 + len(before) // 2]) == 0

    def test_a_failed_turn_truncates_nothing(self) -> None:
        with small_engine() as engine:
            session = fill(engine)
            before = session.state
            with pytest.raises(PromptTooLongError):
                engine.answer([5] * CONTEXT, session=session)
            stream = engine.stream(question(6), session=session, max_new_tokens=4, min_new_tokens=4)
            next(stream)
            stream.close()
            engine.prefill(question(6), session=session)
            assert session.state == before

    def test_truncation_is_durable_and_deletes_blocks_that_no_history_has(
        self, tmp_path: Path
    ) -> None:
        with small_engine(tmp_path) as engine:
            session = fill(engine)
            engine.flush()
            before = files(tmp_path)
            ask(engine, session, 6)
            engine.flush()
            history = session.state.history
            assert (
                files(tmp_path) == len({block.token_ids for block in history.blocks}) < before + 2
            )
        with small_engine(tmp_path) as engine:
            session = engine.session("s")
            assert session.state.history == history
            assert engine.prefill(question(7), session=session).reuse.computed == 6

    def test_rewinding_a_turn_that_truncated_restores_the_dropped_tokens(
        self, tmp_path: Path
    ) -> None:
        with small_engine(tmp_path) as engine:
            session = fill(engine)
            before = session.token_ids
            ask(engine, session, 6)
            engine.flush()
            session.rewind()
            assert session.token_ids == before
            session.rewind(3)  # far enough that the next prompt fits: dropped tokens are computed
            reuse = engine.prefill(question(3), session=session, ratio=1.0).reuse
            assert any("its block was lost" in note for note in reuse.notes)


class TestDiscardingLists:
    def test_a_session_with_keep_dialogue_drops_documents_and_keeps_words(self) -> None:
        with small_engine(discard="keep-dialogue") as engine:
            session = engine.session("s")
            for turn, chunk in enumerate((A, B)):
                ask(engine, session, turn, [chunk], ratio=1.0)
            for turn in (2, 3):
                ask(engine, session, turn)
            words = [token for part, token in by_part(session) if part.kind is not PartKind.CHUNK]
            ask(engine, session, 4)
            assert [token for _, token in by_part(session)][: len(words)] == words
            assert all(part.kind is not PartKind.CHUNK for part, _ in by_part(session))

    def test_session_discard_drops_tokens_at_any_time(self, tmp_path: Path) -> None:
        with engine_at(tmp_path) as engine:
            session = talk(engine)
            before = session.token_ids
            turns = session.turns
            assert session.discard([(9, 18)]) == 9
            assert session.token_ids == before[:9] + before[18:]
            assert session.turns == turns
            reuse = engine.prefill(question(3), session=session, ratio=0.0).reuse
            assert reuse.exact == 1 + 9 - 0 and reuse.computed == 6
            with pytest.raises(InputError, match="no range"):
                session.discard([(0, 1000)])
        with engine_at(tmp_path) as engine:
            assert engine.session("s").token_ids == before[:9] + before[18:]


def by_part(session: Any) -> list[tuple[Part, int]]:
    ids = iter(session.token_ids)
    return [(part, next(ids)) for part in session.state.history.parts for _ in range(len(part))]


def test_truncated_history_is_never_exact_in_another_session(tmp_path: Path) -> None:
    """Another session with the same ids as a truncated one computes them."""
    with small_engine(tmp_path) as engine:
        session = fill(engine)
        ask(engine, session, 6)
        other = engine.session("other")
        history = session.state.history
        kept = history.token_ids
        engine.append(other, kept[:-4], kept[-4:], ratio=0.0)
        assert with_kv(other) == len(kept)
        prefill = engine.prefill(question(7), session=other, ratio=0.0)
        assert prefill.reuse.exact == 1 + len(kept)
        close(prefill.logits, full_prefill(prefill.token_ids.tolist())[0])
