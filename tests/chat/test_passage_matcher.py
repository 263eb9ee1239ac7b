"""Passages are found in any writing of them, the range is the prompt's own, and other texts are not
found.
"""

import html
import json
import textwrap
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.chat.passage_matcher import MAX_FOUND, WINDOW, PassageMatcher, key_of
from ragkv.runtime.words import words

PASSAGE = (
    'The "old" harbour of Oró was built in 1832;\nits ropes & sails are <sold>\tas far as Irvburg.'
)
OTHER = "The mill stands on the hill behind the chapel, and its wheel has not turned since the war."


def matcher_of(*passages: str) -> PassageMatcher:
    matcher = PassageMatcher()
    matcher.add(passages)
    return matcher


WRITINGS = {
    "plain": lambda text: text,
    "json": json.dumps,
    "json without escapes of letters": lambda text: json.dumps(text, ensure_ascii=False),
    "html": html.escape,
    "indented": lambda text: textwrap.indent(text, "    "),
    "quoted": lambda text: textwrap.indent(text, "> "),
    "one line": lambda text: " ".join(text.split()),
    "wrapped": lambda text: "\n".join(textwrap.wrap(text, 20, break_on_hyphens=False)),
    "table": lambda text: "| 1 | " + text.replace("\n", "<br>") + " | 0.93 |",
    "windows": lambda text: text.replace("\n", "\r\n"),
}


@pytest.mark.parametrize("write", WRITINGS.values(), ids=WRITINGS)
def test_a_passage_is_found_in_every_writing_and_nothing_around_it_is(write) -> None:  # type: ignore[no-untyped-def]
    before = 'Context: {"title": "Oró 7", "text": '
    after = ', "score": 0.93} Question: who built it?'
    prompt = before + write(PASSAGE) + after
    (found,) = matcher_of(PASSAGE, OTHER).find(prompt)
    assert prompt[found.start : found.stop] in write(PASSAGE) and found.key == key_of(PASSAGE)
    # quotes, indentation and table cells around it
    assert len(write(PASSAGE)) - (found.stop - found.start) <= 15
    assert found.word_for_word == (prompt[found.start : found.stop] == PASSAGE)


def test_a_passage_is_not_found_inside_a_longer_word() -> None:
    matcher = matcher_of("harbour of Oro was built")
    assert matcher.find("The harbour of Oro was builtin") == []
    assert matcher.find("Theharbour of Oro was built") == []
    assert len(matcher.find("The harbour of Oro was built.")) == 1
    assert len(matcher.find(r'{"text": "x\nharbour of Oro was built\n"}')) == 1  # \n is no letter


def test_backslashes_of_a_plain_text_are_no_escapes() -> None:
    passage = r"The macro \nabla and \theta are defined in \bf letters here."
    (found,) = matcher_of(passage).find(f"See {passage} there")
    assert found.word_for_word
    (found,) = matcher_of(passage).find(json.dumps({"text": passage}))
    assert not found.word_for_word


def test_a_forgotten_passage_is_not_found() -> None:
    matcher = matcher_of(PASSAGE, OTHER)
    matcher.forget([key_of(PASSAGE)])
    assert [one.key for one in matcher.find(PASSAGE + "\n" + OTHER)] == [key_of(OTHER)]
    assert matcher.chars == len(key_of(OTHER))


@pytest.mark.parametrize(
    ("passage", "written"),
    [
        (
            "\u5317\u4eac\u7684\u8001\u949f\u697c\u5efa\u4e8e\u660e\u671d",
            "\u8bf7\u770b{}\u548c\u5176\u4ed6",
        ),
        (
            "\u0e19\u0e49\u0e33\u0e15\u0e01\u0e2d\u0e22\u0e39\u0e48\u0e43\u0e19\u0e1b\u0e48\u0e32\u0e17\u0e32\u0e07\u0e40\u0e2b\u0e19\u0e37\u0e2d",
            "\u0e14\u0e39{}\u0e04\u0e23\u0e31\u0e1a",
        ),
        (
            "\u0930\u093e\u091c\u093e \u0915\u093e \u092c\u0917\u0940\u091a\u093e "
            "\u0928\u0926\u0940",
            "\u0926\u0947\u0916\u094b {}\u0964",
        ),
        ("Die Stra\u00dfe am alten M\u00fchlbach", "**{}**"),
    ],
)
def test_a_passage_is_found_in_every_script_and_normal_form(passage: str, written: str) -> None:
    for text in (passage, unicodedata.normalize("NFD", passage), passage.upper()):
        prompt = written.format(text)
        (found,) = matcher_of(passage).find(prompt)
        assert (found.text, found.word_for_word) == (text, text == passage)
        (found,) = matcher_of(passage).find(json.dumps(prompt))
        assert json.loads(f'"{found.text}"') == text


def naive(prompt: str, known: list[str]) -> list[str]:
    """Leftmost, longest, whole words: tries every passage at every word."""
    there = [word.text for word in words(prompt)]
    found = []
    at = 0
    keys = sorted({key for key in map(key_of, known) if len(key) >= WINDOW}, key=len, reverse=True)
    while at < len(there):
        rest = "".join(f"{word}\n" for word in there[at:])
        key = next((key for key in keys if rest.startswith(key)), "")
        found += [key] if key else []
        at += max(1, key.count("\n"))
    return found


@settings(max_examples=150)
@given(st.data())
def test_it_finds_what_an_exhaustive_search_finds(data: st.DataObject) -> None:
    text = st.text(alphabet="ab \n\U0001d4b3", min_size=WINDOW, max_size=WINDOW + 8)
    corpus = data.draw(st.lists(text, min_size=1, max_size=6))
    parts = data.draw(
        st.lists(
            st.one_of(st.sampled_from(corpus), st.text(alphabet="ab \n", max_size=9)), max_size=8
        )
    )
    prompt = "".join(parts)
    assert [one.key for one in matcher_of(*corpus).find(prompt)] == naive(prompt, corpus)


def test_threads_can_add_and_find_at_the_same_time() -> None:
    corpus = [f"The mill number {n} of Marl makes paper." for n in range(400)]
    matcher = matcher_of(corpus[0])
    with ThreadPoolExecutor(8) as pool:
        adding = [pool.submit(matcher.add, [text]) for text in corpus]
        assert all(
            pool.map(lambda _: matcher.find(f"x {corpus[0]} y")[0].text == corpus[0], range(200))
        )
        for done in adding:
            done.result()
    assert {match.text for text in corpus for match in matcher.find(text)} == set(corpus)


@given(st.text(max_size=300))
@settings(max_examples=200)
def test_a_text_without_the_passage_has_none(text: str) -> None:
    for found in matcher_of(PASSAGE, OTHER).find(text):
        raise AssertionError(f"{text[found.start : found.stop]!r} was taken for a passage")


@given(
    st.text(alphabet=st.characters(codec="utf-8"), min_size=40, max_size=200), st.text(max_size=50)
)
@settings(max_examples=200)
def test_any_passage_is_found_in_json_if_it_has_letters_enough(passage: str, around: str) -> None:
    if len(key_of(passage)) < 16:
        return
    prompt = json.dumps([around, passage, around])
    found = matcher_of(passage).find(prompt)
    assert found or key_of(passage) not in key_of("".join(json.loads(prompt)))


@pytest.mark.parametrize(
    "hostile",
    [
        "\\" * 400_000,
        "&" * 400_000,
        "&#1;" * 100_000,
        "\\u0041" * 60_000,
        "The old harbour " * 25_000,
        PASSAGE * 4_000,
    ],
    ids=[
        "backslashes",
        "ampersands",
        "entities",
        "letters as escapes",
        "beginnings",
        "one passage",
    ],
)
def test_a_hostile_prompt_costs_little_time_and_few_matches(hostile: str) -> None:
    matcher = matcher_of(
        *(f"The old harbour number {n} of the town of Oro was built by hand." for n in range(2000)),
        PASSAGE,
    )
    matcher.find("x" * 100)
    began = time.process_time()
    found = matcher.find(hostile)
    assert len(found) <= MAX_FOUND
    assert time.process_time() - began < 5.0
