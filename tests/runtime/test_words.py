"""Words have one form in all their writings, and stand where they stood."""

import unicodedata

import pytest

from ragkv.runtime.words import normal, words
from tests.timing import assert_linear, processor_seconds


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("caf\u00e9", "cafe\u0301"),
        ("\ufb01nd", "FIND"),
        ("Stra\u00dfe", "STRASSE"),
        ("\u0130zmir", "izmir"),
        ("\uff2b\uff36", "kv"),
        ("\u0645\u064f\u062d\u064e\u0645\u0651\u062f", "\u0645\u062d\u0645\u062f"),
        ("\uff76\uff9e", "\u30ac"),
        ("co\u00adoperate", "cooperate"),
        ("\ud55c", "\u1112\u1161\u11ab"),
        ("\u03bf\u03b4\u03cc\u03c2", "\u039f\u0394\u039f\u0301\u03a3"),
        ("\u05e9\u05b8\u05dc\u05d5\u05b9\u05dd", "\u05e9\u05dc\u05d5\u05dd"),
        ("\u0958\u0932\u092e", "\u0915\u093c\u0932\u092e"),
        ("\u0e19\u0e49\u0e33", "\u0e19\u0e4d\u0e49\u0e32"),
    ],
)
def test_writings_of_a_word_have_one_form(one: str, other: str) -> None:
    assert normal(one) == normal(other)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("don't e-mail foo_bar 3.14", ["don", "t", "e", "mail", "foo_bar", "3", "14"]),
        ("_an_ __init__ ___ \u2014 _\u00fcber_ein_", ["an", "init", "\u00fcber_ein"]),
        ("\u0e19\u0e49\u0e33 \u0e19\u0e4d\u0e49\u0e32", ["\u0e19\u0e49\u0e4d\u0e32"] * 2),
        (
            "\u0939\u093f\u0928\u094d\u0926\u0940 \u09ac\u09be\u0982\u09b2\u09be",
            ["\u0939\u093f\u0928\u094d\u0926\u0940", "\u09ac\u09be\u0982\u09b2\u09be"],
        ),
        ("\u0915\u093f \u0915\u0940", ["\u0915\u093f", "\u0915\u0940"]),
        (
            "\u5317\u4eacx \u0e40\u0e21\u0e37\u0e2d",
            ["\u5317", "\u4eac", "x", "\u0e40", "\u0e21\u0e37", "\u0e2d"],
        ),
        ("\u3042\u3002\u3044", ["\u3042", "\u3044"]),
        ("**bold**\nline \U0001f600", ["bold", "line"]),
        ("", []),
    ],
)
def test_a_text_is_cut_into_words(text: str, expected: list[str]) -> None:
    assert [word.text for word in words(text)] == expected


def test_a_word_says_where_it_stands_in_the_original() -> None:
    text = unicodedata.normalize("NFD", "Der \ufb01nale Stra\u00dfe-Caf\u00e9 \u6771\u30ab\u3099")
    assert all(normal(text[word.start : word.end]) == word.text for word in words(text))
    assert [text[word.start : word.end] for word in words(text)][-2:] == ["\u6771", "\u30ab\u3099"]


@pytest.mark.parametrize(
    "unit", ["a", "\u4e2d", "\u0301", "a\u200d", "\u0e01\u0e33", "-", "a ", "_", "\u00e9_"]
)
def test_words_take_linear_time(unit: str) -> None:
    def seconds(size: int) -> float:
        return processor_seconds(lambda: list(words(unit * size)))

    assert_linear(seconds, 60_000)
