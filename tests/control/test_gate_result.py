"""The search for the fastest setting within the tolerance, on made-up measurements, and the file of
its result.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragkv import FusionConfig
from ragkv.control.gate_result import GateResult, Point, Tolerance, candidates, load, save
from tests.store.entries import IDENTITY

TOLERANCE = Tolerance()


def point(
    selector: str, ratio: float, times: float, agreement: float = 0.99, **given: Any
) -> Point:
    """A setting that is `times` as fast as full recompute; `agreement` is also its bound."""
    point = Point(selector, ratio, 0.0, 0.01, agreement, agreement, times, 0.1 / times, 0.1, 12)
    return replace(point, **given)


def result(*points: Point, confirmations: tuple[Point, ...] = ()) -> GateResult:
    return GateResult(TOLERANCE, points, confirmations, "retrieved passages", "a machine")


class TestCandidates:
    def test_the_fastest_of_the_settings_that_keep_the_tolerance_comes_first(self) -> None:
        slow = point("hkvd", 0.1, 2.0)
        fast = point("first-k", 0.1, 4.0)
        wrong = point("first-k", 0.05, 9.0, agreement=0.97)
        assert candidates([slow, wrong, fast], TOLERANCE) == [fast, slow]

    def test_the_bounds_count_not_the_means(self) -> None:
        lucky = point("first-k", 0.1, 4.0, agreement_bound=0.97)
        diverging = point("hkvd", 0.1, 4.0, kl_bound=0.06)
        assert candidates([lucky, diverging], TOLERANCE) == []

    def test_a_ratio_counts_only_if_the_mean_of_every_higher_one_keeps_the_tolerance(self) -> None:
        by_chance = point("hkvd", 0.1, 5.0)
        wrong = point("hkvd", 0.2, 4.0, 0.9)
        right = point("hkvd", 0.3, 3.0)
        assert candidates([by_chance, wrong, right], TOLERANCE) == [right]
        unsure = replace(wrong, agreement=0.99)
        assert candidates([by_chance, unsure, right], TOLERANCE) == [by_chance, right]

    def test_selectors_are_judged_apart(self) -> None:
        right = point("hkvd", 0.1, 5.0)
        wrong = point("first-k", 0.2, 4.0, 0.9)
        assert candidates([right, wrong], TOLERANCE) == [right]


class TestAnswer:
    def test_the_answer_is_the_first_setting_that_other_prompts_confirm(self) -> None:
        fast = point("first-k", 0.05, 5.0)
        sound = point("first-k", 0.1, 4.0)
        refuted = replace(fast, agreement_bound=0.95)
        confirmed = replace(sound, agreement=0.991, agreement_bound=0.984)
        found = result(fast, sound, confirmations=(refuted, confirmed))
        assert found.answer is confirmed
        assert str(found) == (
            "first-k at .10: 4.0x sooner first token than full recompute, agreement .991 (at "
            "least .984) on "
            "12 prompts that did not choose it; nothing faster stays within 2 %"
        )

    def test_without_a_setting_within_the_tolerance_the_sentence_says_so_and_names_the_closest(
        self,
    ) -> None:
        found = result(point("hkvd", 0.1, 5.0, 0.5), point("hkvd", 0.5, 2.0, 0.9))
        assert found.answer is None
        assert str(found).startswith(
            "full recompute: no setting stays within 2 % of it on 12 prompts; the closest, hkvd"
        )
        assert "at .50" in str(found)

    def test_settings_within_the_tolerance_that_are_slower_are_no_answer(self) -> None:
        found = result(point("hkvd", 0.5, 0.9))
        assert found.answer is None and "is faster" in str(found)

    def test_if_other_prompts_refute_every_candidate_the_sentence_says_so(self) -> None:
        fast = point("hkvd", 0.1, 5.0)
        found = result(fast, confirmations=(replace(fast, agreement_bound=0.9),))
        assert found.answer is None and "on 12 other prompts" in str(found)


class TestFile:
    def test_a_saved_result_is_read_by_engines_of_that_identity_and_those_settings(
        self, tmp_path: Path
    ) -> None:
        saved = result(point("hkvd", 0.1, 5.0), confirmations=(point("hkvd", 0.1, 4.9),))
        save(saved, tmp_path, IDENTITY, FusionConfig())
        assert load(tmp_path, IDENTITY, FusionConfig()) == saved
        assert load(tmp_path, IDENTITY, FusionConfig(selector="first-k")) is None, (
            "it names a selector of its own"
        )
        assert load(tmp_path, IDENTITY, FusionConfig(ratio=0.3)) is None
        assert load(tmp_path, replace(IDENTITY, weights="others"), FusionConfig()) is None

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}'])
    def test_an_unreadable_file_counts_as_no_result(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "gate.json").write_text(text)
        assert load(tmp_path, IDENTITY, FusionConfig()) is None

    def test_the_result_of_a_selector_that_is_not_there_counts_as_none(
        self, tmp_path: Path
    ) -> None:
        saved = result(point("gone", 0.1, 5.0), confirmations=(point("gone", 0.1, 4.9),))
        save(saved, tmp_path, IDENTITY, FusionConfig())
        assert load(tmp_path, IDENTITY, FusionConfig()) is None
