"""The guard and the verdict it goes by."""

from pathlib import Path

import pytest
import torch

from ragkv import Engine, EngineConfig, FusionConfig, StoreConfig
from ragkv.fusion import Candidates, raised_ratio
from ragkv.fusion.gate_result import GateResult, Point, Tolerance, load, save
from ragkv.fusion.guard import remaining_deviation
from tests import tiny_models
from tests.fusion import helpers
from tests.store.entries import IDENTITY

SCORES = torch.tensor([4.0, 3.0, 2.0, 1.0])
FOUR = Candidates(torch.arange(4), torch.zeros(4, dtype=torch.int64), torch.arange(4), SCORES)


class TestLeft:
    def test_is_what_the_unselected_scores_come_to_a_token(self) -> None:
        assert remaining_deviation(FOUR, torch.tensor([0, 2])) == pytest.approx((3 + 1) / 4)
        assert remaining_deviation(FOUR, torch.arange(4)) == 0.0

    def test_is_unknown_without_scores(self) -> None:
        assert remaining_deviation(helpers.candidates(4, scored=False), torch.arange(2)) is None


class TestRaised:
    @pytest.mark.parametrize(
        ("ratio", "limit", "wanted"),
        [(0.0, 2.5, 0.0), (0.0, 2.4, 0.25), (0.25, 1.5, 0.25), (0.25, 1.4, 0.5), (0.25, 0.0, 1.0), (0.5, 1.5, 0.5)],
    )
    def test_to_the_least_share_that_leaves_no_more_than_the_limit(
        self, ratio: float, limit: float, wanted: float
    ) -> None:
        assert raised_ratio(FOUR, ratio, limit) == wanted

    def test_never_lowers(self) -> None:
        assert raised_ratio(FOUR, 0.75, 100.0) == 0.75


def points(*values: tuple[float, float, float | None]) -> tuple[Point, ...]:
    return tuple(Point(ratio, kl, kl, 1.0, 1.0, left) for ratio, kl, left in values)


def verdict(*values: tuple[float, float, float | None], selector: str = "sensitivity") -> GateResult:
    return GateResult(selector, Tolerance(kl=0.05), points(*values), contexts=3, tokens=48)


class TestVerdict:
    def test_the_ratio_is_the_least_from_which_on_the_tolerance_is_kept(self) -> None:
        assert verdict((0.0, 0.04, 9.0), (0.1, 0.06, 8.0), (0.2, 0.05, 7.0), (0.3, 0.01, 6.0)).ratio == 0.2
        assert (
            verdict((0.0, 0.04, 9.0), (0.1, 0.06, 8.0), (0.2, 0.05, 7.0), (0.3, 0.01, 6.0)).remaining_deviation == 7.0
        )

    def test_a_ratio_that_saves_too_little_is_a_refusal(self) -> None:
        refused = verdict((0.0, 1.0, None), (0.7, 0.04, None), (1.0, 0.0, None))
        assert refused.ratio is None
        assert "refused" in str(refused) and "full prefill" in str(refused)

    def test_is_filed_by_identity_and_selector(self, tmp_path: Path) -> None:
        passed = verdict((0.1, 0.01, 2.0), (1.0, 0.0, 0.0))
        save(passed, tmp_path, IDENTITY)
        other = verdict((0.2, 0.01, None), selector="hkvd")
        save(other, tmp_path, IDENTITY)
        assert load(tmp_path, IDENTITY, "sensitivity") == passed
        assert load(tmp_path, IDENTITY, "hkvd") == other
        assert load(tmp_path, IDENTITY, "random") is None

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}'])
    def test_an_unreadable_file_is_no_verdict(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "gate.json").write_text(text)
        assert load(tmp_path, IDENTITY, "sensitivity") is None


class TestAnEngineHeeds:
    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        return tmp_path

    def engine(self, directory: Path, filed: GateResult) -> Engine:
        store = StoreConfig(directory=str(directory))
        config = EngineConfig(store=store, fusion=FusionConfig(selector="sensitivity", ratio=0.1))
        with Engine(tiny_models.model("llama"), config=config) as engine:
            engine.warm(helpers.CHUNKS)
            save(filed, directory, engine.parts.encoder.identity)
        return Engine(tiny_models.model("llama"), config=config)

    def test_a_refusal_by_a_full_prefill_that_says_so(self, directory: Path) -> None:
        with self.engine(directory, verdict((0.0, 1.0, None), (1.0, 0.0, None))) as engine:
            prefill = engine.prefill(helpers.QUESTION, helpers.CHUNKS)
            assert prefill.reuse.computed == prefill.reuse.tokens
            assert any("refused" in note for note in prefill.reuse.notes)

    def test_a_higher_ratio_by_using_it(self, directory: Path) -> None:
        with self.engine(directory, verdict((0.3, 0.01, 1e9), (1.0, 0.0, 0.0))) as engine:
            prefill = engine.prefill(helpers.QUESTION, helpers.CHUNKS)
            assert prefill.reuse.ratio == 0.3
            assert any("raised" in note for note in prefill.reuse.notes)
            assert engine.prefill(helpers.QUESTION, helpers.CHUNKS, ratio=0.1).reuse.ratio == 0.1, (
                "asked for is asked for"
            )

    def test_a_lower_ratio_by_keeping_its_own(self, directory: Path) -> None:
        with self.engine(directory, verdict((0.0, 0.01, 1e9), (1.0, 0.0, 0.0))) as engine:
            reuse = engine.prefill(helpers.QUESTION, helpers.CHUNKS).reuse
            assert (reuse.ratio, reuse.notes) == (0.1, ())

    def test_the_limit_of_deviation_by_raising_a_requests_ratio(self, directory: Path) -> None:
        with self.engine(directory, verdict((0.0, 0.01, 1e9), (1.0, 0.0, 0.0))) as engine:
            usual = engine.prefill(helpers.QUESTION, helpers.CHUNKS)
        with self.engine(
            directory, verdict((0.0, 0.01, usual.fused.remaining_deviation / 2), (1.0, 0.0, 0.0))
        ) as engine:
            guarded = engine.prefill(helpers.QUESTION, helpers.CHUNKS)
        assert guarded.fused.remaining_deviation <= usual.fused.remaining_deviation / 2
        assert guarded.reuse.ratio > usual.reuse.ratio
        assert any("guard" in note for note in guarded.reuse.notes)
