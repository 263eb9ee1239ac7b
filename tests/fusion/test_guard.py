"""The guard, and the gate result it uses."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ragkv import Engine, EngineConfig, FusionConfig, StoreConfig
from ragkv.fusion import Candidates, raised_ratio
from ragkv.fusion.gate_result import GateResult, Point, Tolerance
from ragkv.fusion.selectors import remaining_deviation
from ragkv.lab.gate import save
from tests import tiny_models
from tests.fusion import helpers

SCORES = torch.tensor([4.0, 3.0, 2.0, 1.0])
FOUR = Candidates(torch.arange(4), torch.arange(4), SCORES)


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


def gate_result(
    selector: str = "sensitivity",
    ratio: float = 0.1,
    *,
    left: float | None = None,
    agreement: float = 1.0,
) -> GateResult:
    """One setting was tried and confirmed, or refused below an agreement of .98."""
    point = Point(selector, ratio, 0.0, 0.0, agreement, agreement, 3.0, 0.1, 0.3, left, 3)
    return GateResult(Tolerance(), (point,), (point,), "consecutive chunks", "a machine")


class TestEngine:
    def engine(self, directory: Path, applied: GateResult, ratio: float = 0.15) -> Engine:
        """A new engine on a store at which `applied` was kept for engines of the default ratio."""
        store = StoreConfig(directory=str(directory))
        config = EngineConfig(store=store, fusion=FusionConfig(selector="sensitivity", floor_tokens=0))
        with Engine(tiny_models.model("llama"), config=config) as engine:
            engine.warm(helpers.CHUNKS)
            save(engine, applied)
        return Engine(
            tiny_models.model("llama"),
            config=replace(config, fusion=FusionConfig(selector="sensitivity", floor_tokens=0, ratio=ratio)),
        )

    def test_an_engine_with_a_refused_gate_result_uses_a_full_prefill_and_says_so(self, tmp_path: Path) -> None:
        with self.engine(tmp_path, gate_result(agreement=0.5)) as engine:
            prefill = engine.prefill(helpers.QUESTION, helpers.CHUNKS)
            assert prefill.reuse.computed == prefill.reuse.tokens
            assert any("full recompute: no setting stays within" in note for note in prefill.reuse.notes)
            assert engine.prefill(helpers.QUESTION, helpers.CHUNKS, ratio=0.1).reuse.fused > 0, "named by the request"
            assert engine.prefill(helpers.QUESTION, helpers.CHUNKS, selector="first-k").reuse.fused > 0

    def test_a_new_engine_uses_the_gates_selector_and_ratio_where_a_request_names_none(self, tmp_path: Path) -> None:
        with self.engine(tmp_path, gate_result("first-k", 0.3)) as engine:
            reuse = engine.prefill(helpers.QUESTION, helpers.CHUNKS).reuse
            assert (reuse.selector, reuse.ratio) == ("first-k", 0.3)
            assert reuse.notes == ("quality gate: first-k and ratio 0.3",)

    def test_the_gates_ratio_is_used_if_it_is_lower_too(self, tmp_path: Path) -> None:
        with self.engine(tmp_path, gate_result(ratio=0.05)) as engine:
            assert engine.prefill(helpers.QUESTION, helpers.CHUNKS).reuse.ratio == 0.05

    def test_what_a_request_names_has_priority_over_the_gates_setting(self, tmp_path: Path) -> None:
        with self.engine(tmp_path, gate_result("first-k", 0.3)) as engine:
            reuse = engine.prefill(helpers.QUESTION, helpers.CHUNKS, ratio=0.1).reuse
            assert (reuse.selector, reuse.ratio, reuse.notes) == ("first-k", 0.1, ("quality gate: first-k",))
            reuse = engine.prefill(helpers.QUESTION, helpers.CHUNKS, selector="random").reuse
            assert (reuse.selector, reuse.ratio, reuse.notes) == ("random", 0.15, ())
            reuse = engine.prefill(helpers.QUESTION, helpers.CHUNKS, selector="first-k").reuse
            assert (reuse.selector, reuse.ratio) == ("first-k", 0.3)

    def test_an_engine_whose_settings_name_another_ratio_keeps_its_own(self, tmp_path: Path) -> None:
        with self.engine(tmp_path, gate_result("first-k", 0.3), ratio=0.1) as engine:
            reuse = engine.prefill(helpers.QUESTION, helpers.CHUNKS).reuse
            assert (reuse.selector, reuse.ratio, reuse.notes) == ("sensitivity", 0.1, ())

    def test_an_engine_raises_a_requests_ratio_to_keep_the_gates_deviation(self, tmp_path: Path) -> None:
        with self.engine(tmp_path, gate_result(left=1e9)) as engine:
            usual = engine.prefill(helpers.QUESTION, helpers.CHUNKS)
        assert usual.fused.remaining_deviation is not None
        with self.engine(tmp_path, gate_result(left=usual.fused.remaining_deviation / 2)) as engine:
            guarded = engine.prefill(helpers.QUESTION, helpers.CHUNKS)
        assert guarded.fused.remaining_deviation is not None
        assert guarded.fused.remaining_deviation <= usual.fused.remaining_deviation / 2
        assert guarded.reuse.ratio > usual.reuse.ratio
        assert any("guard" in note for note in guarded.reuse.notes)
