"""What `python -m benchmarks` tells: nothing skips in silence, and every row of the papers' page is
accounted for.
"""

import re
from pathlib import Path

import pytest

pytest.importorskip("benchmarks.figures")
from benchmarks import __main__ as run_all
from benchmarks import report, sets
from benchmarks.figures import FIGURES
from benchmarks.papers_rows import PAGE, Outcome, rows_of, told

PAGE_OF_ROWS = """
| section | what | command |
|---|---|---|
| 1 | told | `real`, `figures "a 1"` |
| 2 | nothing is said | |
| 3 | a reason | none: it needs a GPU |
| 4 | unknown | `no_such` |

| here | close to it |
|---|---|
| no command column | |
"""


def test_every_command_of_the_papers_page_is_a_benchmark_or_a_figure() -> None:
    rows = rows_of(PAGE.read_text(encoding="utf-8"))
    assert len(rows) > 40
    commands = {command for row in rows for command in row.commands}
    assert {name for name, _ in commands} <= set(run_all.names())
    assert {figure for name, figure in commands if name == "figures"} <= set(FIGURES)
    assert [row.part for row in rows if not row.commands and not row.reason] == []


def test_every_command_is_run_and_takes_quick() -> None:
    texts = {path.stem: path.read_text("utf-8") for path in Path(run_all.HERE).glob("*.py")}
    commands = {name for name, text in texts.items() if '__name__ == "__main__"' in text}
    assert commands - run_all.TOOLS == set(run_all.names()) - set(run_all.PACKAGES)
    own = re.compile(r"\bArgumentParser\(")
    parsers = re.compile(r"\b(report\.|sets\.)?parser\(\s*__doc__")
    for name in commands - run_all.TOOLS:
        assert parsers.search(texts[name]), f"{name}: its options have --quick from report.parser"
        assert not own.search(texts[name]), name


def test_a_row_is_told_by_a_result_or_a_reason_and_by_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("benchmarks.papers_rows.RESULTS", tmp_path)
    rows = rows_of(PAGE_OF_ROWS)
    outcomes = {"real": (Outcome.SKIPPED, "no data"), "figures": (Outcome.RAN, "")}
    found = list(told(rows, outcomes))
    assert [row.is_told for row in found] == [False, False, True, False]
    assert found[0].line == "1: real skipped (no data); figures a 1 gave no table"
    (tmp_path / "figures.json").write_text('{"results": {"a 1": {"rows": []}}}')
    assert next(told(rows, outcomes)).is_told
    failed = {**outcomes, "real": (Outcome.FAILED, "it broke")}
    assert next(told(rows, failed)).line == "1: real failed (it broke); figures a 1 ran"


def test_a_benchmark_without_its_data_says_why_and_has_a_status_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        report.skip("no sets")
    assert ended.value.code == report.SKIPPED
    assert capsys.readouterr().err == "skipped: no sets\n"
    run = run_all.Run("real", Outcome.SKIPPED, 1.0, "no sets")
    assert list(run_all.summary([run])) == ["skipped  real, 1 s: no sets"]


def test_a_benchmark_s_end_is_told_by_its_status_and_its_last_words() -> None:
    run = run_all.run("vllm_server", ["--no-such-option"])
    assert (run.outcome, run.name) == (Outcome.FAILED, "vllm_server")
    assert "unrecognized arguments: --no-such-option" in run.reason


def test_the_run_of_all_fails_if_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", "--only", "real", "ttft"])
    outcomes = {"real": Outcome.RAN, "ttft": Outcome.SKIPPED}
    monkeypatch.setattr(
        run_all, "run", lambda name, _: run_all.Run(name, outcomes[name], 0.0, "why")
    )
    assert run_all.main() == 0
    outcomes["ttft"] = Outcome.FAILED
    assert run_all.main() == 1


def test_no_benchmark_asks_for_a_folder_that_it_could_find_itself() -> None:
    """`--data` has a default wherever it is given, so that `make bench` finds the sets."""
    for path in Path(run_all.HERE).glob("*.py"):
        for option in re.findall(r'add_argument\(\s*"--data",[^)]*\)', path.read_text()):
            assert "required" not in option, path.name


def test_sets_are_found_where_the_environment_says_and_told_apart_by_their_digest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BENCHMARK_DATA", str(tmp_path))
    assert sets.questions() is None and sets.papers_sets() == [] and sets.traces() == []
    (tmp_path / "qa").mkdir()
    (tmp_path / "qa" / "xquad.en.json").write_text("{}")
    (tmp_path / "qa" / "musique.jsonl").write_text("{}")
    assert sets.questions() == tmp_path / "qa"
    assert sets.papers_sets() == [str(tmp_path / "qa" / "musique.jsonl")]
    monkeypatch.setattr("sys.argv", ["sets", "--check"])
    with pytest.raises(SystemExit) as ended:
        sets.main()
    assert ended.value.code == 1
    told_lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in told_lines if "xquad" in line]
    assert "another: 2 bytes" in line and "github.com/google-deepmind/xquad" in line
    (line,) = [line for line in told_lines if "qa/musique.jsonl" in line]
    assert "never read here" in line and " yes " in line
