"""Sensitivity: scores against a naive reference, stored scores, missing scores, and asking
selectors.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ragkv import Engine, EngineConfig, FusionConfig, StoreConfig
from ragkv.fusion import Candidates, StaticSelector
from ragkv.fusion import sensitivity as sensitivity_module
from ragkv.fusion.learned import scored_layers, variance
from ragkv.fusion.sensitivity import COMPUTED_TOKENS, TEXT_TOKENS, Scorer
from ragkv.model import Rows, Watch
from tests import tiny_models
from tests.fusion import helpers

CHUNK = tuple(tiny_models.tokens(20, seed=40))
OTHERS = [tuple(tiny_models.tokens(70, seed)) for seed in range(50, 62)]  # four make a text


@torch.no_grad()
def projections(ids: tuple[int, ...], wanted: int) -> torch.Tensor:
    """Keys before RoPE and values of the last `wanted` tokens of `ids` from the model itself: (L,
    2, T, G * D).
    """
    model: Any = tiny_models.model("llama")
    found: list[torch.Tensor] = []
    for layer in model.model.layers:
        for name in ("k_proj", "v_proj"):
            getattr(layer.self_attn, name).register_forward_hook(
                lambda _m, _i, out: found.append(out[0, -wanted:])
            )
    model(torch.tensor([ids]))
    return torch.stack(found).reshape(len(model.model.layers), 2, wanted, -1)


@pytest.fixture
def every_token_behind_every_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensitivity_module, "MOST_MOVED", 1.0)


def naive(prefix: tuple[int, ...], texts: list[tuple[int, ...]]) -> list[float]:
    """The score of every token of `CHUNK`, all computed behind every text, written with loops."""
    stored = projections(prefix + CHUNK, len(CHUNK))
    others = [projections(prefix + text + CHUNK, len(CHUNK)) for text in texts]
    centre = sum(others) / len(others)
    scores = []
    for token in range(len(CHUNK)):
        varied = 0.0
        for layer in (2,):
            for part in range(2):
                norm = stored[layer, part].square().sum(-1).mean()
                for other in others:
                    varied += (
                        (other - centre)[layer, part, token].square().sum()
                        / norm
                        / (len(others) - 1)
                    )
        scores.append(float(varied))
    return scores


def scores_beside(chunk: tuple[int, ...], *neighbourhoods: list[tuple[int, ...]]) -> torch.Tensor:
    """The scores of the tokens of a chunk, (T,), where these neighbourhoods are known."""
    with Engine(tiny_models.model("llama"), config=no_scores()) as engine:
        entry = engine.entries.encoder.chunks([chunk])[0]
        scorer = Scorer(engine.model.adapter, (1,), 2)
        for chunks in neighbourhoods:
            scorer.register(chunks)
        return scorer.scores([chunk], [entry.kv])[0][:, 0]


class TestScorer:
    @pytest.mark.parametrize("family", ["llama", "llama-dynamic", "gemma2", "phi3"])
    def test_scores_of_any_family_are_finite_and_positive(self, family: str) -> None:
        with Engine(tiny_models.model(family), config=scoring()) as engine:
            engine.warm([CHUNK, *OTHERS])
            for chunk in (CHUNK, *OTHERS):
                scores = scored(engine, chunk)
                assert scores is not None and scores.dtype == torch.float16
                assert torch.isfinite(scores).all() and (scores > 0).all()

    @pytest.mark.usefixtures("every_token_behind_every_text")
    def test_scores_equal_the_naive_reference(self) -> None:
        got = scores_beside(CHUNK, OTHERS)
        texts = [sum(OTHERS[place : place + 4], ())[:TEXT_TOKENS] for place in (0, 4)]
        assert got.tolist() == pytest.approx(naive((1,), texts), rel=2e-3)

    @pytest.mark.usefixtures("every_token_behind_every_text")
    def test_one_of_the_texts_is_the_chunks_neighbourhood_which_is_computed_if_it_is_not_there(
        self,
    ) -> None:
        neighbourhood = [OTHERS[9], CHUNK, OTHERS[10], OTHERS[11]]
        got = scores_beside(CHUNK, OTHERS[:8], neighbourhood)
        neighbours = (OTHERS[9] + OTHERS[10])[-COMPUTED_TOKENS:]
        kept = sum(OTHERS[:4], ())[:TEXT_TOKENS]
        assert got.tolist() == pytest.approx(naive((1,), [neighbours, kept]), rel=2e-3)

    @pytest.mark.parametrize("share", [0.3, 0.5])
    def test_behind_the_second_text_tokens_that_hardly_moved_keep_their_stored_kv(
        self, share: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sensitivity_module, "MOST_MOVED", share)
        with Engine(tiny_models.model("llama"), config=no_scores()) as engine:
            stored = engine.entries.encoder.chunks([CHUNK])[0].kv
            scorer = Scorer(engine.model.adapter, (1,), 2)
            scorer.register(OTHERS)
            got = scorer.scores([CHUNK], [stored])[0][:, 0]
            ((first, second),) = scorer.kv_behind_texts([CHUNK], [stored], share)
        # twice the score of a token whose KV behind the second text is the stored KV
        moved = variance(stored, [first])
        kept = moved.argsort()[: len(CHUNK) - math.ceil(share * len(CHUNK))]
        assert torch.equal(second[..., kept, :], stored[:3, ..., kept, :])
        assert got[kept].tolist() == pytest.approx((moved[kept] / 2).tolist(), rel=2e-3)

    def test_a_chunk_is_never_scored_behind_itself(self) -> None:
        chunk = OTHERS[0]
        assert torch.equal(scores_beside(chunk, OTHERS, [chunk]), scores_beside(chunk, OTHERS[4:]))

    def test_a_single_chunk_is_scored_behind_its_own_shuffled_tokens(self) -> None:
        with Engine(tiny_models.model("llama"), config=scoring()) as engine:
            engine.warm([CHUNK])
            scores = scored(engine, CHUNK)
            assert scores is not None and (scores > 0).all()


def no_scores(**store: Any) -> EngineConfig:
    return EngineConfig(store=StoreConfig(**store), fusion=FusionConfig(sensitivity_prefixes=0))


def scoring(**store: Any) -> EngineConfig:
    return EngineConfig(store=StoreConfig(**store), fusion=FusionConfig(selector="sensitivity"))


def scored(engine: Engine, chunk: Sequence[int]) -> torch.Tensor | None:
    if engine.entries.encoder.scorer is None:
        return None
    return engine.store.scores(engine.entries.encoder.scores_identity, tuple(chunk))


class TestStoredScores:
    def test_scores_travel_through_memory_and_disk(self, tmp_path: Path) -> None:
        config = scoring(directory=str(tmp_path))
        with Engine(tiny_models.model("llama"), config=config) as engine:
            engine.warm(helpers.CHUNKS)
            in_memory = [scored(engine, chunk) for chunk in helpers.CHUNKS]
            before = engine.prefill(
                helpers.QUESTION, helpers.CHUNKS, selector="sensitivity", ratio=0.2
            ).selected
        config = scoring(directory=str(tmp_path), memory_bytes=0)
        with Engine(tiny_models.model("llama"), config=config) as engine:
            for kept, chunk in zip(in_memory, helpers.CHUNKS, strict=True):
                assert torch.equal(scored(engine, chunk), kept)
            again = engine.prefill(
                helpers.QUESTION, helpers.CHUNKS, selector="sensitivity", ratio=0.2
            ).selected
        assert torch.equal(before, again)

    def test_unscored_entries_are_scored_in_the_background_and_attention_is_used_until_then(
        self, tmp_path: Path
    ) -> None:
        with Engine(
            tiny_models.model("llama"), config=no_scores(directory=str(tmp_path))
        ) as engine:
            engine.warm(helpers.CHUNKS)
            kv = (
                engine.store.lease(engine.entries.encoder.identity, tuple(helpers.CHUNKS[1]))
                .read_layer(2)
                .clone()
            )
        config = EngineConfig(store=StoreConfig(directory=str(tmp_path)))
        with Engine(tiny_models.model("llama"), config=config) as engine:
            first = engine.prefill(
                helpers.QUESTION, helpers.CHUNKS, selector="sensitivity", ratio=0.2
            )
            assert first.reuse.selector == "attention"
            assert any("sensitivity" in note for note in first.reuse.notes)
            engine.flush()
            second = engine.prefill(
                helpers.QUESTION, helpers.CHUNKS, selector="sensitivity", ratio=0.2
            )
            assert (second.reuse.selector, second.reuse.notes) == ("sensitivity", ())
            assert second.reuse.missed_chunks == 0
        with (
            Engine(tiny_models.model("llama"), config=config) as engine,
            engine.store.lease(engine.entries.encoder.identity, tuple(helpers.CHUNKS[1])) as lease,
        ):
            assert scored(engine, helpers.CHUNKS[1]) is not None
            assert torch.equal(lease.read_layer(2), kv)  # what was stored stays

    def test_without_a_scorer_unscored_entries_stay_unscored(self) -> None:
        with helpers.engine(sensitivity_prefixes=0) as engine:
            prefill = engine.prefill(
                helpers.QUESTION, helpers.CHUNKS, selector="sensitivity", ratio=0.2
            )
            engine.flush()
            assert prefill.reuse.selector == "attention"
            assert scored(engine, helpers.CHUNKS[1]) is None


class Given(StaticSelector):
    """Selects given positions."""

    name = "given"

    def __init__(self, positions: torch.Tensor) -> None:
        self._positions = positions

    def select(self, candidates: Candidates, ratio: float, seed: int) -> torch.Tensor:
        return torch.searchsorted(candidates.positions, self._positions)


class TestAskingSelector:
    @pytest.mark.parametrize("most", [1, 3, 64])
    def test_the_end_of_a_question_asks_and_its_tokens_are_recomputed_as_if_they_had_been_known(
        self, most: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        watched = list[list[int]]()

        class Noting(Watch):
            def add(self, *attended: Any) -> None:
                watched.append(attended[2].positions[-self._rows :].tolist())
                super().add(*attended)

        monkeypatch.setattr("ragkv.fusion.plan.MOST_ASKING_ROWS", most)
        monkeypatch.setattr("ragkv.fusion.fusor.Watch", Noting)
        with helpers.engine() as engine:
            asking = engine.prefill(
                helpers.QUESTION, helpers.CHUNKS, selector="attention", ratio=0.2
            )
            known = engine.prefill(
                helpers.QUESTION, helpers.CHUNKS, selector=Given(asking.selected), ratio=0.2
            )
        length = len(asking.token_ids)
        rows = min(most, len(helpers.QUESTION))
        places = range(length - len(helpers.QUESTION), length)[:rows]  # the question's first ones
        # layers 2 and 3 of 4; the last one computes one row
        assert watched == [[*places], [places[-1]]]
        assert torch.equal(asking.logits, known.logits)
        assert (asking.reuse.compute - known.reuse.compute) * 4 * length == pytest.approx(4 * rows)
        assert asking.reuse.bytes_by_tier == known.reuse.bytes_by_tier

    def test_a_long_question_chooses_as_its_end_alone_does(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ragkv.fusion.plan.MOST_ASKING_ROWS", 3)
        with helpers.engine() as engine:
            long, end = (
                engine.prefill(question, helpers.CHUNKS, selector="attention", ratio=0.2)
                for question in (helpers.QUESTION, helpers.QUESTION[-3:])
            )
        assert torch.equal(long.selected, end.selected)

    # plain, a window, a soft-cap
    @pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
    @pytest.mark.parametrize("asking", [1, 6])
    @torch.no_grad()
    def test_a_watch_collects_the_models_own_attention_weights(
        self, family: str, asking: int
    ) -> None:
        model = tiny_models.model(family)
        model.set_attn_implementation("eager")
        ids = tiny_models.tokens(25)
        weights = model(torch.tensor([ids]), output_attentions=True).attentions  # L of (1, H, S, S)
        wanted = torch.stack([layer[0, :, -asking:].mean((0, 1)) for layer in weights]).mean(0)
        with Engine(tiny_models.model(family), config=scoring()) as engine:
            adapter = engine.model.adapter
            kv = adapter.new_kv(25)
            watch = Watch(asking, 25, adapter.device)
            hidden = adapter.embed(torch.tensor(ids))
            for layer in range(4):
                rows = Rows.span(0, 25, adapter.device)
                tables = adapter.rope.tables(25)
                hidden = adapter.run_layer(layer, hidden, rows, kv, tables, None, watch)
        torch.testing.assert_close(watch.received(), wanted, atol=1e-5, rtol=1e-4)


def test_scored_layers_are_the_last_eighth_of_the_first_five_eighths() -> None:
    assert {layers: list(scored_layers(layers)) for layers in (1, 2, 4, 8, 24)} == {
        1: [0],
        2: [1],
        4: [2],
        8: [5],
        24: [13, 14, 15],
    }


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The runs that the scorer computes, in order."""
    seen = list[Any]()
    original = sensitivity_module.raw_kv

    def noted(adapter: Any, own: Any, *args: Any) -> Any:
        seen.extend(own)
        return original(adapter, own, *args)

    monkeypatch.setattr(sensitivity_module, "raw_kv", noted)
    return seen


def test_neighbours_that_were_just_encoded_are_not_computed_again(runs: list[Any]) -> None:
    chunks = [tuple(tiny_models.tokens(50 + seed, seed)) for seed in range(16)]
    with Engine(tiny_models.model("llama"), config=scoring()) as engine:
        engine.warm(chunks)
    rows = [run.row_count for run in runs]
    texts = [count for count in rows if count > 200]
    assert len(texts) == 3  # computed once, and each chunk is in one of them at most
    behind_second = sum(-(-len(chunk) // 2) for chunk in chunks)
    # and the prefix of one token
    assert sum(rows) - sum(texts) == sum(map(len, chunks)) + behind_second + 1


def test_a_chunk_is_scored_behind_all_neighbours_with_known_kv(
    runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # the tiny model's context has 512
    monkeypatch.setattr(sensitivity_module, "NEIGHBOUR_TOKENS", 350)
    chunks = [tuple(tiny_models.tokens(60, seed)) for seed in range(20)]
    with Engine(tiny_models.model("llama"), config=scoring()) as engine:
        engine.warm(chunks)
    lengths = {run.token_ids: len(run.context) for run in reversed(runs)}  # behind the first text
    assert {lengths[chunk] - 1 for chunk in chunks} == {350}, "without the prefix of one token"


@pytest.mark.parametrize(
    ("tokens", "allowed", "kept"), [(80, 200, [40, 80, 80]), (150, 512, [61, 150, 150])]
)
def test_the_nearest_neighbours_are_kept_where_not_all_fit(
    tokens: int, allowed: int, kept: list[int], runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most `NEIGHBOUR_TOKENS`, and what the tiny model's context of 512 leaves beside prefix and
    chunk.
    """
    monkeypatch.setattr(sensitivity_module, "NEIGHBOUR_TOKENS", allowed)
    chunks = [tuple(tiny_models.tokens(tokens, seed)) for seed in range(4)]
    with Engine(tiny_models.model("llama"), config=no_scores()) as engine:
        stored = [engine.entries.encoder.chunks([chunk])[0].kv for chunk in chunks]
        scorer = Scorer(engine.model.adapter, (1,), 2)
        scorer.register(chunks)
        scorer.kv_behind_texts(chunks, stored, 0.5)
    first = next(run for run in runs if run.token_ids == chunks[3])  # behind the first text
    *_, farthest, middle, nearest = first.context.pieces
    assert [piece.shape[3] for piece in (farthest, middle, nearest)] == kept
    assert torch.equal(nearest, stored[2]) and torch.equal(farthest, stored[0][:, :, :, -kept[0] :])
