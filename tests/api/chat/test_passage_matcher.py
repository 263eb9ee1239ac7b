"""Passages are found in any writing of them, the range is the prompt's own, and other texts are not found."""

import html
import json
import textwrap
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.api.chat.passage_matcher import MAX_FOUND, PassageMatcher, key_of

PASSAGE = 'The "old" harbour of Oró was built in 1832;\nits ropes & sails are <sold>\tas far as Irvburg.'
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
    before, after = 'Context: {"title": "Oró 7", "text": ', ', "score": 0.93} Question: who built it?'
    prompt = before + write(PASSAGE) + after
    (found,) = matcher_of(PASSAGE, OTHER).find(prompt)
    assert prompt[found.start : found.stop] in write(PASSAGE) and found.key == key_of(PASSAGE)
    assert len(write(PASSAGE)) - (found.stop - found.start) <= 15  # quotes, indentation and table cells around it
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
    matcher.discard([key_of(PASSAGE)])
    assert [one.key for one in matcher.find(PASSAGE + "\n" + OTHER)] == [key_of(OTHER)]
    assert matcher.chars == len(key_of(OTHER))


@given(st.text(max_size=300))
@settings(max_examples=200, deadline=None)
def test_a_text_without_the_passage_has_none(text: str) -> None:
    for found in matcher_of(PASSAGE, OTHER).find(text):
        raise AssertionError(f"{text[found.start : found.stop]!r} was taken for a passage")


@given(st.text(alphabet=st.characters(codec="utf-8"), min_size=40, max_size=200), st.text(max_size=50))
@settings(max_examples=200, deadline=None)
def test_any_passage_is_found_in_json_if_it_has_letters_enough(passage: str, around: str) -> None:
    if len(key_of(passage)) < 16:
        return
    prompt = json.dumps([around, passage, around])
    found = matcher_of(passage).find(prompt)
    assert found or key_of(passage) not in key_of("".join(json.loads(prompt)))


@pytest.mark.parametrize(
    "hostile",
    ["\\" * 400_000, "&" * 400_000, "&#1;" * 100_000, "\\u0041" * 60_000, "The old harbour " * 25_000, PASSAGE * 4_000],
    ids=["backslashes", "ampersands", "entities", "letters as escapes", "beginnings", "one passage"],
)
def test_a_hostile_prompt_costs_little_time_and_few_matches(hostile: str) -> None:
    matcher = matcher_of(
        *(f"The old harbour number {n} of the town of Oro was built by hand." for n in range(2000)), PASSAGE
    )
    matcher.find("x" * 100)
    began = time.process_time()
    found = matcher.find(hostile)
    assert len(found) <= MAX_FOUND
    assert time.process_time() - began < 5.0
