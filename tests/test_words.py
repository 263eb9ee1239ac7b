"""The project's own words for things stay out of code and docs: the field has a word for each of them.

A word counts in prose and as a part of identifiers (`seat`, `_seat`, `free_seats`, `DecodeSeat`), not inside a longer
word (`seating`).
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("ragkv", "tests", "benchmarks", "training", "examples", "docs")
SUFFIXES = {".py", ".md", ".js", ".html", ".css", ".toml", ".yaml"}

# Each word that does not belong here (a regex, matched without regard to case), and what to write instead.
PRIVATE_WORDS = {
    "teams?": "OpenMP thread pool",
    "lanes?": "priority thread pool",
    "houses?": "helpers, fixtures",
    "heed(s|ed)?": "apply_gate_result, observe",
    "verdicts?": "gate result",
    "demands?": "prefetch hint",
    "climb(s|ed|ing)?": "promote",
    "holes?": "cache miss, gap",
    "distant": "remote",
    "seat(s|ed)?": "decode slot",
    "flights?": "single-flight, claim",
    "studied": "training sample",
    "beside": "next to, with",
    "editions?": "version, content digest",
    "rooms?": "package, space, headroom, max_new_tokens",
    "whoever": "the caller, the thread, the request",
    "lessons?": "training sample",
}
# Phrases in which a word is the field's own, or plain English.
ALLOWED_PHRASES = {
    "single[- _]?flight": "the field's term for sharing one computation among callers",
    "flight:": "the prefix of claims in Redis, which replicas of different releases share",
    "[`'\"]edition[`'\"]": "a field in Redis that data written so far has",
    "make_room": "a public method of sessions",
    '"(verdict|lessons)"': "keys in the JSON output of the command line",
    "on[- ]demand": "plain English",
    '"team"': "a tenant's name",
    "red (big )?house|house red": "texts whose overlap the metrics measure",
}
# Files that may use the words.
ALLOWED_FILES = {
    "tests/test_words.py": "lists the words",
    "training/templates.py": "sentences of the worlds: another word would change the trained weights",
    "examples/corpus": "prose that the example questions are about",
    "ragkv/lab/gate_corpus.py": "prose that the gate measures a model on",
}
# Words that continue a sentence: a test name that begins with one cannot be read without its class or its neighbour.
CONTINUATIONS = re.compile(
    "and|or|of|nor|but|than|that|which|who|whom|whose|by|is|are|was|were|be|been|has|have|had|does|do|did|can|may|also"
)


@cache
def texts() -> dict[str, str]:
    """The files to check and their contents."""
    files = [ROOT / "README.md", *(file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*")))]
    paths = {file.relative_to(ROOT).as_posix(): file for file in files if file.suffix in SUFFIXES}
    allowed = tuple(ALLOWED_FILES)
    return {path: file.read_text(encoding="utf-8") for path, file in paths.items() if not path.startswith(allowed)}


def occurrences(word: str, text: str) -> list[int]:
    """The numbers of the lines that hold the word outside the allowed phrases."""
    camel_case = word[0].upper() + word[1:]
    pattern = re.compile(rf"(?<![A-Za-z])(?i:{word})(?![A-Za-z])|(?<=[a-z])({camel_case})(?![a-z])")
    allowed = re.compile("|".join(ALLOWED_PHRASES), re.IGNORECASE)
    if not pattern.search(text):
        return []
    lines = enumerate(text.split("\n"), start=1)
    return [number for number, line in lines if pattern.search(allowed.sub("", line))]


@pytest.mark.parametrize("word", PRIVATE_WORDS)
def test_a_private_word_is_used_nowhere(word: str) -> None:
    found = [f"{path}:{number}" for path, text in texts().items() for number in occurrences(word, text)]
    assert found == [], f"instead of {word!r} write: {PRIVATE_WORDS[word]}"


def test_no_file_holds_the_marks_of_a_merge_conflict() -> None:
    marks = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)
    assert [path for path, text in texts().items() if marks.search(text)] == []


def test_no_test_name_begins_in_the_middle_of_a_sentence() -> None:
    names = [
        f"{path}: {node.name}"
        for path, text in texts().items()
        if path.startswith("tests/") and path.endswith(".py")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        if CONTINUATIONS.fullmatch(node.name.split("_")[1])
    ]
    assert names == []


def test_a_word_is_found_in_prose_and_in_identifiers_but_not_inside_other_words() -> None:
    text = "a seat\nfree_seats = 1\nclass DecodeSeat:\nSEATS\nseating"
    assert occurrences("seats?", text) == [1, 2, 3, 4]


def test_a_word_is_allowed_inside_an_allowed_phrase() -> None:
    assert occurrences("flights?", "a single-flight\nSingleFlight\nin flight") == [3]
