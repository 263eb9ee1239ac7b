"""Passages have a limited number of tokens, a span in the document, and exactly the text of that
span.
"""

import itertools
import random
import re
import unicodedata

import pytest

from ragkv.config import CHUNK_TOKENS
from ragkv.errors import ConfigError
from ragkv.retrieval import Document, Splitter
from tests.retrieval.fakes import word_splitter
from tests.timing import assert_linear, processor_seconds

GUIDE = """# Guide

Intro words here.

## Install

Run the installer now.

```
# not a heading
make
```

### On Linux

Use the shell.

## Use

Ask it things.
"""


def random_text(seed: int) -> str:
    choose = random.Random(seed)
    marks = [" ", "  ", "\n", "\n\n", ". ", "! ", "\u3002", "\n# ", "\n```\n", ""]
    return "".join(
        choose.choice(("a", "bb", "\u6587\u5b57", "word")) + choose.choice(marks)
        for _ in range(300)
    )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("source", ["x.txt", "x.md"])
def test_every_passage_is_the_document_at_its_span_and_within_the_budget(
    seed: int, source: str
) -> None:
    text = random_text(seed)
    splitter = Splitter(len, tokens=20)  # a token is a character here
    passages = splitter.split(Document("d", text, source))
    for passage in passages:
        start, end = passage.span
        assert text[start:end] == passage.text == passage.text.strip()
        assert 0 < len(passage.text) <= 20
    covered = set(itertools.chain.from_iterable(range(*p.span) for p in passages))
    assert all(text[i].isspace() or text[i] == "`" for i in range(len(text)) if i not in covered)
    starts = [p.span[0] for p in passages]
    assert starts == sorted(starts)
    assert all(a.span[1] <= b.span[0] for a, b in itertools.pairwise(passages))


def test_a_short_document_is_one_passage() -> None:
    (passage,) = word_splitter(512).split(
        Document("d", "  One two.\n\nThree.  ", "d.txt", {"year": 1})
    )
    assert (passage.text, passage.span) == ("One two.\n\nThree.", (2, 18))
    assert (passage.document_id, passage.source, passage.metadata) == ("d", "d.txt", {"year": 1})


@pytest.mark.parametrize("note", [GUIDE, "a b\n\n" * 20, "# A\n# B\n# C\n" + "w " * 30])
def test_a_document_that_fits_stays_whole_and_one_word_more_is_cut(note: str) -> None:
    words = len(note.split())
    (passage,) = word_splitter(words).split(Document("d", f"\n{note}\n", "d.md"))
    assert passage.text == note.strip()
    assert len(word_splitter(words - 1).split(Document("d", note, "d.md"))) > 1


def test_passages_have_256_tokens_by_default() -> None:
    assert Splitter(len).tokens == CHUNK_TOKENS == 256


def test_a_blank_document_has_no_passages() -> None:
    assert word_splitter().split(Document("d", " \n ")) == []


def test_markdown_is_cut_at_its_headings_and_not_at_comments_in_code() -> None:
    passages = word_splitter(14).split(Document("d", GUIDE, "guide.md"))
    assert [p.text.split("\n")[0] for p in passages] == [
        "# Guide",
        "## Install",
        "### On Linux",
        "## Use",
    ]
    assert "# not a heading\nmake" in passages[1].text
    sections = [p.metadata["section"] for p in passages]
    assert sections == ["Guide", "Guide > Install", "Guide > Install > On Linux", "Guide > Use"]


def test_sentences_are_kept_whole_where_they_fit() -> None:
    passages = word_splitter(4).split(Document("d", "One two three. Four five six! Seven eight?"))
    assert [p.text for p in passages] == ["One two three.", "Four five six!", "Seven eight?"]


def test_a_passage_of_a_document_with_pages_has_its_page_number() -> None:
    document = Document("d", "one two\n\nthree four", page_starts=(0, 9))
    assert [p.metadata["page"] for p in word_splitter(2).split(document)] == [1, 2]


def test_pieces_that_count_more_together_than_apart_are_halved() -> None:
    def count(text: str) -> int:
        return len(text.split()) + (5 if len(text.split()) > 4 else 0)

    passages = Splitter(count, tokens=6).split(Document("d", "a b c d e f"))
    assert [count(p.text) <= 6 for p in passages] == [True] * len(passages)
    assert " ".join(p.text for p in passages) == "a b c d e f"


def test_passage_ids_differ_by_document_and_survive_edits_elsewhere() -> None:
    splitter = word_splitter(2)
    before = splitter.split(Document("d", "one two\n\nthree four\n\none two"))
    after = splitter.split(Document("d", "new words\n\none two\n\nthree four\n\none two"))
    other = splitter.split(Document("e", "one two"))
    assert [p.id for p in after[1:]] == [p.id for p in before]
    assert len({p.id for p in [*after, *other]}) == 5


@pytest.mark.parametrize(
    "unit",
    [
        "e\u0301",
        "\u0915\u093f\u0928\u0940",
        "\u0e19\u0e49\u0e33",
        "\u05e9\u05b8\u05dc\u05d5\u05b9\u05dd",
        "\U0001f469\u200d\U0001f467\u200d\U0001f466",
        "\U0001f44d\U0001f3fd\u2764\ufe0f",
    ],
)
def test_no_passage_begins_inside_a_character(unit: str) -> None:
    text = unit * 30 + " " + unit
    passages = Splitter(len, tokens=7).split(Document("d", text))
    assert "".join(passage.text for passage in passages) == text.replace(" ", "")
    assert not [
        p
        for p in passages
        if unicodedata.category(p.text[0])[0] == "M" or p.text[0] in "\u200d\U0001f3fd"
    ]
    assert not [passage for passage in passages if passage.text[-1] == "\u200d"]


@pytest.mark.parametrize("opening", ["```python", "```", "~~~ js", '``` {.c title="a b"}', "> ```"])
def test_no_passage_is_a_code_fence_alone(opening: str) -> None:
    closing = "".join(char for char in opening if char in "`~> ")
    text = f"# A\n\n{opening}\n" + "one two three four\n" * 4 + f"{closing}\n\nfive six\n\n~~~\n~~~"
    for tokens in (4, 5, 8):
        passages = word_splitter(tokens).split(Document("d", text, "d.md"))
        assert not [
            passage.text
            for passage in passages
            if not re.sub(r"(?m)^[> ]*[`~]{3}.*$", "", passage.text).strip()
        ]
        assert sum(passage.text.count("three") for passage in passages) == 4


def test_a_very_long_heading_is_cut_in_the_metadata_of_its_passages() -> None:
    document = Document("d", f"# {'long ' * 60_000}\n\n## Two ##\n\nword", "d.md")
    section = word_splitter().split(document)[-1].metadata["section"]
    assert (len(section) < 250, section.endswith("... > Two")) == (True, True)


HOSTILE = {
    "blanks": lambda n: "# " + " " * n + "x",
    "blanks behind": lambda n: "# x" + " " * n,
    "closed": lambda n: "# x" + " #" * n,
    "headings": lambda n: "# h\n\nx\n" * (n // 8),
    "lines": lambda n: "\n" * n + "x",
    "blank lines": lambda n: "x" + " \n" * n,
    "marks": lambda n: "e" + "\u0301" * n,
    "fences": lambda n: "```\n" * (n // 4),
    "one word": lambda n: "x" * n,
    "words": lambda n: "x " * (n // 2),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_splitting_takes_linear_time(name: str) -> None:
    def seconds(size: int) -> float:
        document = Document("d", HOSTILE[name](size), "d.md")
        splitter = Splitter(lambda text: len(text.split()) + len(text) // 4, tokens=64)
        return processor_seconds(lambda: splitter.split(document))

    seconds(10)  # imports
    assert_linear(seconds, 40_000)


def test_a_passage_of_no_token_is_refused() -> None:
    with pytest.raises(ConfigError):
        Splitter(len, 0)
