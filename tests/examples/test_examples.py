"""The examples run unchanged and print what is expected. Each runs in its own process, on the
reader and its world.
"""

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.reader import READER

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
WORLD = ROOT / "tests" / "world"
READER_ON_ITS_WORLD = ("--model", READER, "--docs", WORLD / "corpus")
SHOWN = [
    path
    for path in sorted(EXAMPLES.glob("*.py"))
    if path.stem not in ("plain_transformers", "demo", "metrics")
]


def run(name: str, *arguments: str | Path) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2_000:]
    return ran.stdout


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.stem)
def test_an_example_has_at_most_100_lines(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= 100


def test_multi_hop_questions_are_answered_with_sources_and_a_report() -> None:
    asked = {
        "What does the sponsor of Halfair sell?": "ovens",  # fair -> its sponsor -> what it sells
        "Which company was founded earlier, Verlab or Gatdyne?": "Gatdyne",
        "What is the founding year of the sponsor of Morfair?": "1922",
    }
    output = run("multihop_qa", *READER_ON_ITS_WORLD, "-k", "10", *asked)
    for number, answer in enumerate(asked.values(), 1):
        assert re.search(
            rf"question {number}: .*\n  {answer}\n  sources: \S+\.md:\d+-\d+", output
        ), output
    assert len(re.findall(r"\d+ exact, \d+ fused, \d+ recomputed, \d+ computed", output)) == 3


def test_a_conversation_continues_beyond_its_context_window_and_reuses_its_history() -> None:
    output = run("chat_over_docs", *READER_ON_ITS_WORLD, "--turns", "8", "--context", "768")
    assert len(re.findall(r"^\d+\. ", output, re.MULTILINE)) == 8
    assert "history truncated" in output
    turns = re.findall(r"(\d+) tokens, (\d+) of them reused; the history has (\d+) now(.*)", output)
    assert sum(int(tokens) for tokens, *_ in turns) > 768, "it never exceeded its window"
    # All KV of the history is reused, but for what was dropped or recomputed. Whether passages are
    # fused as well is the controller's decision, which depends on the machine.
    for (_, _, history, _), (_, reused, _, notes) in pairwise(turns):
        lost = re.findall(r"(\d+) of \d+ (?:tokens dropped|history tokens)", notes)
        assert int(reused) >= int(history) - sum(map(int, lost)), notes


def test_a_chain_gives_the_same_answers_after_the_one_line_change() -> None:
    asked = ("What does Nesibissa do for a living?", "What does Verlab sell?")
    output = run("langchain_rag", *READER_ON_ITS_WORLD, "--ratio", "1", "-k", "12", *asked)
    pairs = re.findall(r"before: (.*)  \(\d+ ms\)\n  after:  (.*)  \(\d+ ms\)", output)
    assert [before for before, _ in pairs] == ["dancer", "pens"]
    assert all(before == after for before, after in pairs)


def test_an_agent_of_three_turns_reuses_its_chunks_and_its_history() -> None:
    pytest.importorskip("langchain", reason="needs langchain (extra agents)")
    output = run("agent", *READER_ON_ITS_WORLD)
    found = re.findall(
        r"(\d+) of (\d+) prompt tokens reused \((\d+) exact, (\d+) fused, \d+ recomputed", output
    )
    assert len(found) == 3, output
    counts = [tuple(map(int, one)) for one in found]
    for earlier, (reused, tokens, exact, fused) in zip(
        [(0, 0, 0, 0), *counts], counts, strict=False
    ):
        assert reused == exact + fused and tokens > earlier[1], "the history is part of the prompt"
        # Whether passages are fused is the controller's decision, which depends on the machine.
        assert exact > earlier[2] or earlier[1] == 0, "each turn reuses the turns before it"


def test_an_evaluation_reports_every_metric_for_every_method(tmp_path: Path) -> None:
    chunks = [path.read_text("utf-8").strip() for path in sorted((WORLD / "corpus").glob("*.md"))]
    asked = {"question": "What does Verlab sell?", "contexts": chunks, "answers": ["pens"]}
    (tmp_path / "q.jsonl").write_text(json.dumps(asked) + "\n", "utf-8")
    methods = ("full prefill", "fused", "MapRerank")
    plot = tmp_path / "plot.png"
    how = ("--model", READER, "--system", "", "-k", "3", "--methods", *methods, "--plot", plot)
    output = run("evaluate", tmp_path / "q.jsonl", *how)
    for method in methods:
        assert re.search(
            rf"{method}  1\.000  1\.000    1\.000     1\.000 +\d+\.\d+ +1$", output, re.MULTILINE
        ), output
    assert plot.stat().st_size > 5_000


def test_the_demo_finds_all_that_it_imports() -> None:
    assert "--questions" in run("demo", "--help")
