"""Citations name the places where chunks contain the answer."""

import pytest

from ragkv import Chunk, Citation, Text
from ragkv.prompt import cite


def chunk(text: str, source: str = "") -> Chunk:
    return Chunk((1,), text, {"source": source} if source else {})


@pytest.mark.parametrize(
    ("answer", "text", "found"),
    [
        ("Paris", "It is Paris, in fact.", "Paris"),
        ("paris.", "PARIS is large.", "PARIS"),
        (" Paris ", "Paris", "Paris"),
        ("Par", "Paris", None),
        ("aris", "Paris", None),
        ("C++ (1998)", "In C++ (1998) it was", "C++ (1998)"),
        ("a.c", "abc", None),
        ("étés", "des étés chauds", "étés"),
        ("Paris", "", None),
        ("", "Paris", None),
        (".", "A. B.", None),
        ("Ada Quill", "by Ada\nQuill in 1820", "Ada\nQuill"),
        ("Ada Quill", "by **Ada** Quill", "Ada** Quill"),
        ("\u6771\u4eac", "\u9996\u90fd\u306f\u6771\u4eac\u3067\u3059\u3002", "\u6771\u4eac"),
        (
            "\u0e40\u0e21\u0e37\u0e2d\u0e07",
            "\u0e40\u0e1b\u0e47\u0e19\u0e40\u0e21\u0e37\u0e2d\u0e07",
            "\u0e40\u0e21\u0e37\u0e2d\u0e07",
        ),
        ("STRASSE", "Die Stra\u00dfe.", "Stra\u00dfe"),
        ("1", "11 of 1", "1"),
    ],
)
def test_an_answer_is_matched_by_whole_words_in_any_case(
    answer: str, text: str, found: str | None
) -> None:
    cited = cite(answer, [chunk(text)])
    assert [text[c.start : c.end] for c in cited] == ([] if found is None else [found])


def test_every_chunk_that_says_it_is_cited_once_with_its_source() -> None:
    chunks = [chunk("wool"), chunk("flax and flax", "a.md"), chunk("Flax", "b.md")]
    assert cite("flax", chunks) == (Citation(1, 0, 4, "a.md"), Citation(2, 0, 4, "b.md"))


def test_a_number_in_brackets_names_a_chunk() -> None:
    chunks = [chunk("one", "a"), chunk("two", "b")]
    assert cite("Because so [2].", chunks) == (Citation(1, 0, 3, "b"),)
    assert cite("one [1][2][9][0]", chunks) == (Citation(0, 0, 3, "a"), Citation(1, 0, 3, "b"))


def test_text_between_chunks_is_not_cited_and_has_no_number() -> None:
    head = Text((), "Flax:", opening=True)
    chunks = [head, chunk("wool", "a"), Text((), "flax"), chunk("flax", "b")]
    assert cite("Because so [2].", chunks) == cite("flax", chunks) == (Citation(1, 0, 4, "b"),)
    assert cite("Because so [3].", chunks) == ()


@pytest.mark.parametrize(
    ("answer", "text", "cited"),
    [
        ("No.", "There is no mill, no bridge and no inn.", False),
        ("No", "No mill stands there. No, not one.", False),
        ("The", "The Mill of The Hill, the oldest", False),
        ("It is", "Today it is a museum.", False),
        ("I", "as I said", False),
        ("Li", "It was built by Li in 1820.", True),
        ("the UN", "said the UN in May", True),
        ("of the mill", "the owner of the mill", True),
        ("in 7", "built in 7 years", True),
        ("\u4e0d", "\u4ed6\u4e0d\u53bb", False),  # "not"
        ("\uc11c\uc6b8", "\uc11c\uc6b8 \ud0d1", True),  # Seoul
    ],
)
def test_common_words_alone_cite_nothing(answer: str, text: str, cited: bool) -> None:
    assert bool(cite(answer, [chunk(text)])) == cited


def test_a_chunk_that_an_answer_of_common_words_names_is_cited() -> None:
    text = "There is no mill."
    assert cite("No [1].", [chunk(text), chunk(text)]) == (Citation(0, 0, len(text), ""),)


def test_an_answer_that_repeats_one_digit_in_brackets_names_no_chunk() -> None:
    """Python converts no number of over 4,300 digits."""
    digits = "0" * 5000
    assert cite(f"[{digits}1] so [2]", [chunk("one"), chunk("two", "b")]) == (
        Citation(1, 0, 3, "b"),
    )
