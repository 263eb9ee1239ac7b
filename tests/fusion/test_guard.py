"""The guard, and the gate result it uses."""

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


class TestRemainingDeviation:
    def test_the_remaining_deviation_is_the_sum_of_unselected_scores_per_token(self) -> None:
        assert remaining_deviation(FOUR, torch.tensor([0, 2])) == pytest.approx((3 + 1) / 4)
        assert remaining_deviation(FOUR, torch.arange(4)) == 0.0

    def test_the_remaining_deviation_is_unknown_without_scores(self) -> None:
        assert remaining_deviation(helpers.candidates(4, scored=False), torch.arange(2)) is None


class TestRaisedRatio:
    @pytest.mark.parametrize(
        ("ratio", "limit", "wanted"),
        [(0.0, 2.5, 0.0), (0.0, 2.4, 0.25), (0.25, 1.5, 0.25), (0.25, 1.4, 0.5), (0.25, 0.0, 1.0), (0.5, 1.5, 0.5)],
    )
    def test_the_guard_raises_the_ratio_to_the_lowest_one_within_the_limit(
        self, ratio: float, limit: float, wanted: float
    ) -> None:
        assert raised_ratio(FOUR, ratio, limit) == wanted

    def test_the_guard_never_lowers_the_ratio(self) -> None:
        assert raised_ratio(FOUR, 0.75, 100.0) == 0.75


def points(*values: tuple[float, float, float | None]) -> tuple[Point, ...]:
    return tuple(Point(ratio, kl, kl, 1.0, 1.0, left) for ratio, kl, left in values)


def gate_result(*values: tuple[float, float, float | None], selector: str = "sensitivity") -> GateResult:
    return GateResult(selector, Tolerance(kl=0.05), points(*values), contexts=3, tokens=48)


class TestGateResult:
    def test_the_gates_ratio_is_the_lowest_from_which_on_the_tolerance_is_kept(self) -> None:
        passed = gate_result((0.0, 0.04, 9.0), (0.1, 0.06, 8.0), (0.2, 0.05, 7.0), (0.3, 0.01, 6.0))
        assert (passed.ratio, passed.remaining_deviation) == (0.2, 7.0)

    def test_a_gate_result_whose_ratio_saves_too_little_is_a_refusal(self) -> None:
        refused = gate_result((0.0, 1.0, None), (0.7, 0.04, None), (1.0, 0.0, None))
        assert refused.ratio is None
        assert "refused" in str(refused) and "full prefill" in str(refused)

    def test_gate_results_are_saved_by_identity_and_selector(self, tmp_path: Path) -> None:
        passed = gate_result((0.1, 0.01, 2.0), (1.0, 0.0, 0.0))
        save(passed, tmp_path, IDENTITY)
        other = gate_result((0.2, 0.01, None), selector="hkvd")
        save(other, tmp_path, IDENTITY)
        assert load(tmp_path, IDENTITY, "sensitivity") == passed
        assert load(tmp_path, IDENTITY, "hkvd") == other
        assert load(tmp_path, IDENTITY, "random") is None

    def test_a_gate_result_saved_under_an_earlier_versions_field_names_is_still_read(self, tmp_path: Path) -> None:
        passed = gate_result((0.1, 0.01, 2.0), (1.0, 0.0, None))
        path = save(passed, tmp_path, IDENTITY)
        old = path.read_text().replace('"remaining_deviation"', '"left"')
        assert old.count('"left"') == 2
        path.write_text(old)
        assert load(tmp_path, IDENTITY, "sensitivity") == passed

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}'])
    def test_an_unreadable_gate_file_counts_as_no_result(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "gate.json").write_text(text)
        assert load(tmp_path, IDENTITY, "sensitivity") is None


class TestEngine:
    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        return tmp_path

    def engine(self, directory: Path, saved: GateResult) -> Engine:
        store = StoreConfig(directory=str(directory))
        config = EngineConfig(store=store, fusion=FusionConfig(selector="sensitivity", ratio=0.1))
        with Engine(tiny_models.model("llama"), config=config) as engine:
            engine.warm(helpers.CHUNKS)
            save(saved, directory, engine.parts.encoder.measured_as)
        return Engine(tiny_models.model("llama"), config=config)

    def test_an_engine_with_a_refused_gate_result_uses_a_full_prefill_and_says_so(self, directory: Path) -> None:
        with self.engine(directory, gate_result((0.0, 1.0, None), (1.0, 0.0, None))) as engine:
            prefill = engine.prefill(helpers.QUESTION, helpers.CHUNKS)
            assert prefill.reuse.computed == prefill.reuse.tokens
            assert any("refused" in note for note in prefill.reuse.notes)

    def test_an_engine_uses_the_gates_ratio_if_it_is_higher(self, directory: Path) -> None:
        with self.engine(directory, gate_result((0.3, 0.01, 1e9), (1.0, 0.0, 0.0))) as engine:
            prefill = engine.prefill(helpers.QUESTION, helpers.CHUNKS)
            assert prefill.reuse.ratio == 0.3
            assert any("raised" in note for note in prefill.reuse.notes)
            assert engine.prefill(helpers.QUESTION, helpers.CHUNKS, ratio=0.1).reuse.ratio == 0.1, (
                "an explicit ratio of the request has priority"
            )

    def test_an_engine_keeps_its_own_ratio_if_the_gates_is_lower(self, directory: Path) -> None:
        with self.engine(directory, gate_result((0.0, 0.01, 1e9), (1.0, 0.0, 0.0))) as engine:
            reuse = engine.prefill(helpers.QUESTION, helpers.CHUNKS).reuse
            assert (reuse.ratio, reuse.notes) == (0.1, ())

    def test_an_engine_raises_a_requests_ratio_to_keep_the_gates_deviation(self, directory: Path) -> None:
        with self.engine(directory, gate_result((0.0, 0.01, 1e9), (1.0, 0.0, 0.0))) as engine:
            usual = engine.prefill(helpers.QUESTION, helpers.CHUNKS)
        with self.engine(
            directory, gate_result((0.0, 0.01, usual.fused.remaining_deviation / 2), (1.0, 0.0, 0.0))
        ) as engine:
            guarded = engine.prefill(helpers.QUESTION, helpers.CHUNKS)
        assert guarded.fused.remaining_deviation <= usual.fused.remaining_deviation / 2
        assert guarded.reuse.ratio > usual.reuse.ratio
        assert any("guard" in note for note in guarded.reuse.notes)
