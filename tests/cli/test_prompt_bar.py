"""The bars of `ragkv ask --explain`: lengths by tokens, marks that need no colours, lines that fit."""

from pathlib import Path

from ragkv.cli.ask import prompt_bars
from ragkv.types import PromptSpan

from .conftest import Run

SOURCES = ("/a/very/long/path/to/the/folder/of/the/documents/marl.md", "mill.txt", "new.txt")
SPANS = (
    PromptSpan("prefix", 0, 1, "exact"),
    PromptSpan("chunk", 1, 80, "exact", chunk=0),
    PromptSpan("chunk", 81, 40, "fused", tuple(range(10)), chunk=1),
    PromptSpan("chunk", 121, 20, "computed", chunk=2, why="no usable KV was stored"),
    PromptSpan("question", 141, 6, "computed"),
    PromptSpan("template", 147, 3, "computed"),
)


def lines(width: int) -> list[str]:
    return [line.plain for line in prompt_bars(SPANS, SOURCES, width)]


def test_each_segment_has_its_tokens_and_a_bar_of_their_fates() -> None:
    legend, *rows = lines(118)
    assert " ".join(legend.split()) == "prompt of 150 tokens: === exact --- fused ### recomputed +++ computed"
    said = [row.split() for row in rows]
    assert said[0] == ["prefix", "1", "="]
    assert said[1] == ["[1]", "…the/documents/marl.md", "80", "=" * 80]
    assert said[2] == ["[2]", "mill.txt", "40", "-" * 30 + "#" * 10]
    assert said[3] == ["[3]", "new.txt", "20", "+" * 20]
    assert rows[4].strip() == "not reused: no usable KV was stored"
    assert said[5] == ["question", "and", "template", "9", "+" * 9]
    assert len(rows) == 6


def test_at_80_columns_every_line_fits_and_the_scale_is_said() -> None:
    shown = lines(80)
    assert max(map(len, shown)) <= 80
    assert shown[-1] == "one mark is about 1.9 tokens"
    assert shown[1].split()[-1] == "="  # one token has a mark
    assert abs(shown[3].count("-") - 30 / 1.9) < 1 and abs(shown[3].count("#") - 10 / 1.9) < 1


def test_ask_with_explain_shows_the_bars_of_its_prompt(run: Run, documents: Path) -> None:
    run("ingest", documents)
    shown = run("ask", "Who founded Marl?", "--explain", "--max-new-tokens", "1")
    assert shown.code == 0, shown.err
    assert "=== exact" in shown.out and "[2] " in shown.out and "question and template" in shown.out
    assert "=== exact" not in run("ask", "Who founded Marl?", "--max-new-tokens", "1").out
