"""Metrics by examples computed by hand."""

import pytest

from examples.metrics import best, exact_match, normalized, rouge_l, token_f1


def test_the_normal_form_has_no_upper_case_punctuation_or_articles() -> None:
    assert normalized("The  Old-Bridge, of a Town!") == "oldbridge of town"


@pytest.mark.parametrize(
    ("answer", "gold", "exact", "f1", "rouge"),
    [
        ("Paris.", "paris", 1.0, 1.0, 1.0),
        ("the red house", "red house", 1.0, 1.0, 0.8),  # ROUGE-L keeps articles: 2 * 2 / (3 + 2)
        ("red big house", "red house", 0.0, 0.8, 0.8),
        ("house red", "red house", 0.0, 1.0, 0.5),  # only ROUGE-L depends on the order
        ("red red", "red", 0.0, 2 / 3, 2 / 3),
        ("blue", "red house", 0.0, 0.0, 0.0),
        ("", "", 1.0, 1.0, 1.0),
        ("", "red", 0.0, 0.0, 0.0),
        ("a b c d", "x b y d", 0.0, 4 / 7, 0.5),  # F1 drops the article: 2 * 2 / (3 + 4)
    ],
)
def test_metrics_equal_values_computed_by_hand(
    answer: str, gold: str, exact: float, f1: float, rouge: float
) -> None:
    assert exact_match(answer, gold) == exact
    assert token_f1(answer, gold) == pytest.approx(f1)
    assert rouge_l(answer, gold) == pytest.approx(rouge)


def test_the_best_of_several_gold_answers_counts() -> None:
    assert best(token_f1, "New York", ["Paris", "york"]) == pytest.approx(2 / 3)
