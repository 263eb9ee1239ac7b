"""The benchmark on published question sets: formats, prompts, resumption, and the report's form."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

papers_quality = pytest.importorskip("benchmarks.papers_quality")

from benchmarks import papers_report, papers_tasks, quality_data  # noqa: E402
from benchmarks.papers_methods import ALONE, EXPECTED, Asker, methods  # noqa: E402
from ragkv import Engine  # noqa: E402
from ragkv.errors import InputError  # noqa: E402
from tests.cli.conftest import model_folder  # noqa: E402, F401 - a fixture

PAIRS = (
    ("Marl", "Ada founded the mill of Marl. "),
    ("Rope", "The mill makes rope."),
    ("Quill", "Quill was a town."),
)


def longbench(name: str = "2wikimqa", **changes: Any) -> dict[str, Any]:
    context = "\n\n".join(
        f"Passage {number}:\n{title}\n{text}" for number, (title, text) in enumerate(PAIRS, 1)
    )
    made = {
        "input": "Who founded the mill?",
        "context": context,
        "answers": ["Ada", "Ada Quill"],
        "length": 20,
    }
    return made | {"dataset": name, "language": "en", "all_classes": None, "_id": "1"} | changes


def musique(**changes: Any) -> dict[str, Any]:
    paragraphs = [
        {"idx": number, "title": title, "paragraph_text": text, "is_supporting": not number}
        for number, (title, text) in enumerate(PAIRS)
    ]
    made = {
        "id": "2hop",
        "paragraphs": paragraphs,
        "question": "Who founded the mill?",
        "answer": "Ada",
    }
    return made | {"answer_aliases": ["Ada Quill"], "answerable": True} | changes


def lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_every_published_form_is_read(tmp_path: Path) -> None:
    (context,) = quality_data.read(lines(tmp_path / "2wikimqa_e.jsonl", longbench("2wikimqa_e")))
    assert context.chunks == tuple(f"{title}\n{text.strip()}" for title, text in PAIRS)
    (question,) = context.questions
    assert (question.type, question.text, question.golds) == (
        "2wikimqa",
        "Who founded the mill?",
        ("Ada", "Ada Quill"),
    )
    hotpotqa = {
        "_id": "1",
        "question": "Who founded the mill?",
        "answer": "Ada",
        "supporting_facts": [["Marl", 0]],
    }
    hotpotqa["context"] = [[title, [text, " More."]] for title, text in PAIRS]
    (tmp_path / "dev.json").write_text(json.dumps([hotpotqa]))
    (context,) = quality_data.read(tmp_path / "dev.json")
    assert context.chunks[1] == "Rope\nThe mill makes rope. More."
    assert (context.questions[0].type, context.questions[0].golds) == ("hotpotqa", ("Ada",))
    (context,) = quality_data.read(
        lines(tmp_path / "m.jsonl", musique(answerable=False), musique())
    )
    assert context.chunks[0] == "Marl\nAda founded the mill of Marl."
    assert context.questions[0].golds == ("Ada", "Ada Quill")


def test_every_question_format_is_read(tmp_path: Path) -> None:
    def contexts(name: str, text: str) -> list:
        (tmp_path / name).write_text(text)
        return quality_data.read(tmp_path / name)

    world = {
        "chunks": ["A.", "B."],
        "questions": [{"type": "local", "question": "q?", "answer": "a"}] * 2,
    }
    (read,) = contexts("w.jsonl", json.dumps(world) + "\n")
    assert (read.chunks, len(read.questions), read.questions[0].golds) == (("A.", "B."), 2, ("a",))
    musique = [{"ctxs": [{"title": "T", "text": "x"}], "question": "q?", "answers": [["a"], ["b"]]}]
    (read,) = contexts("m.json", json.dumps(musique))
    assert (read.chunks, read.questions[0].golds) == (("T\nx\n\n",), ("a", "b"))
    said = "Answer the question based on the given passages."
    prompt = (
        f"{said}\n\nThe following are given passages.\nPassage 1:\none\nPassage 2:\ntwo\n\n{said}"
    )
    prompt += "\n\nQuestion: q?\nAnswer:"
    (read,) = contexts("l.json", json.dumps({"0": {"origin_prompt": prompt, "gold": "['no']"}}))
    assert read.chunks == ("one", "two")
    assert (read.questions[0].text, read.questions[0].golds) == ("q?", ("no",))
    with pytest.raises(InputError, match="none of the forms of 2wikimqa, samsum, multi_news"):
        contexts("l.json", json.dumps({"0": {"origin_prompt": "Who?", "gold": "no"}}))


def test_at_most_the_given_number_of_questions_is_kept() -> None:
    question = quality_data.Question("local", "q?", ("a",))
    contexts = [quality_data.Context(("x",), (question,) * 3)] * 3
    assert [len(c.questions) for c in quality_data.limited(contexts, 5)] == [3, 2]


def test_a_summary_has_means_intervals_and_paired_differences() -> None:
    def row(number: int, full: float, reuse: float) -> dict[str, Any]:
        methods = {
            name: {
                "score": score,
                "first_token_s": seconds * (1 + number),
                "compute": 1.0,
                "missed": 0,
                "stored": "",
            }
            for name, score, seconds in (
                (papers_report.BASE, full, 0.4),
                ("full reuse", reuse, 0.1),
            )
        }
        return {
            "set": "a",
            "number": number,
            "cut": number == 0,
            "chunks": 2,
            "prompt_tokens": 9,
            "methods": methods,
        }

    rows = [row(0, 1.0, 0.5), row(1, 0.0, 0.0), row(2, 0.5, 0.0), {"set": "a", "number": 3}]
    found = papers_report.summarized(rows)
    assert (found["questions"], found["skipped"], found["cut"], found["prompt_tokens"]) == (
        3,
        1,
        1,
        9,
    )
    full, reuse = found["methods"].values()
    assert (full["score"], reuse["score"]) == (0.5, pytest.approx(1 / 6))
    assert full["minus_full_95"] == [0.0, 0.0]
    assert reuse["minus_full"] == pytest.approx(-1 / 3)
    assert reuse["minus_full_95"] == [-0.5, 0.0]  # of three paired differences -0.5, 0, -0.5
    assert full["score_95"] == [0.0, 1.0]
    assert (full["first_token_ms"], reuse["speedup"]) == (pytest.approx(800), pytest.approx(4.0))


# Prompts


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[Engine]:  # noqa: F811
    with Engine.from_pretrained(model_folder) as engine:
        yield engine


def preparer(engine: Engine, count: int = 6, tokens: int = 512, name: str = "2wikimqa") -> Any:
    return papers_tasks.Preparer(engine, papers_tasks.TASKS[name], count, tokens)


def context_of(*texts: str, question: str = "rope") -> Any:
    return quality_data.Context(texts, (quality_data.Question("2wikimqa", question, ("Ada",)),))


def test_long_passages_are_cut(engine: Engine) -> None:
    texts = ("the mill of marl. ada makes rope. the town makes paper.", "quill")
    found = preparer(engine, count=2, tokens=5).prepared(context_of(*texts, question="ada quill ?"))
    assert [chunk.text for chunk in found.chunks] == ["ada makes rope.", "quill"]


def test_a_question_gets_the_retrieved_chunks_in_the_order_of_the_context(engine: Engine) -> None:
    texts = ("the mill of ada", "paper", "the town of marl", "quill makes rope", "1820")
    found = preparer(engine, count=2).prepared(
        context_of(*texts, question="who makes rope in town ?")
    )
    assert [chunk.text.strip() for chunk in found.chunks] == [texts[2], texts[3]]


# Whole runs


def options(folder: Path, out: Path, *arguments: str) -> Any:
    sets = [
        lines(
            out.parent / "2wikimqa.jsonl",
            longbench(),
            longbench(input="Who makes rope?"),
            longbench(),
        ),
        lines(out.parent / "musique.jsonl", musique()),
    ]
    given = [
        "--model",
        str(folder),
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--ratios",
        ".15",
        "--out",
        str(out),
    ]
    return papers_quality._options([*map(str, sets), *given, *arguments])


def test_a_run_writes_the_table_of_every_method_and_goes_on_after_a_kill(
    model_folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    out = tmp_path / "report.md"
    papers_quality.run(options(model_folder, out, "--map"))
    text = out.read_text()
    for said in (
        "## 2wikimqa",
        "## musique",
        "3 questions.",
        "| method | F1 | 95 % |",
        "- model: ",
        "- torch: ",
    ):
        assert said in text
    names = [
        line.split(" | ")[0].removeprefix("| ")
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    expected = [
        "full recompute",
        "prefix caching",
        "full reuse (PromptCache)",
        "nothing recomputed (ours)",
        "attention 0.15 (ours)",
        "HKVD 0.15 (CacheBlend as printed)",
        "HKVD, gradual 0.15 (CacheBlend as printed)",
    ]
    expected += ["MapReduce", "MapRerank"]
    assert names == ["method", *expected] * 2
    saved = json.loads(out.with_suffix(".json").read_text())
    assert saved["sets"]["2wikimqa"]["questions"] == 3
    methods = saved["sets"]["2wikimqa"]["methods"]
    assert methods["full recompute"]["compute"] == 1.0
    reused = methods["full reuse (PromptCache)"]["compute"]
    assert reused < methods["HKVD 0.15 (CacheBlend as printed)"]["compute"] < 1.0
    assert all(
        method["missed_chunks"] == 0 and method["first_token_ms"] > 0 for method in methods.values()
    )
    rows = out.with_suffix(".jsonl")
    kept = rows.read_bytes().splitlines(keepends=True)
    # what a kill in the middle of a line leaves
    rows.write_bytes(b"".join(kept[:-1]) + kept[-1][:20])
    papers_quality.run(options(model_folder, out, "--map"))
    again = rows.read_bytes().splitlines(keepends=True)
    assert (
        again[:-1] == kept[:-1] and len(again) == len(kept) and "Unfinished" not in out.read_text()
    )
    with pytest.raises(InputError, match=r"chunks was 6, is 2"):
        papers_quality.run(options(model_folder, out, "--map", "--chunks", "2"))


def test_each_row_reuses_the_kv_that_its_method_stores(
    model_folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    given = options(model_folder, tmp_path / "report.md", "--map", "--selectors", "attention")
    given.selectors = ["attention", "first-k", "hkvd", "hkvd-gradual"]
    made = {method.name: method for method in methods(given, papers_tasks.QUESTIONS)}
    assert {name: method.stored for name, method in made.items()} == {
        "full recompute": "",
        "prefix caching": "",
        "full reuse (PromptCache)": ALONE,
        "nothing recomputed (ours)": EXPECTED,
        "attention 0.15 (ours)": EXPECTED,
        "first-k 0.15 (ours)": EXPECTED,
        "HKVD 0.15 (CacheBlend as printed)": ALONE,
        "HKVD, gradual 0.15 (CacheBlend as printed)": ALONE,
        "MapReduce": "",
        "MapRerank": "",
    }
    with (
        Engine.from_pretrained(str(model_folder)) as base,
        Asker(base, papers_tasks.QUESTIONS, given, None) as asker,
    ):
        identities = {name: e.entries.encoder.identity for name, e in asker.engines.items()}
        assert (identities[ALONE].neutral, identities[ALONE].codec) == ("", "raw")
        assert identities[EXPECTED].codec == "int8"
        question = quality_data.Question("musique", "Who founded the mill?", ("Ada",))
        context = quality_data.Context(tuple(text for _, text in PAIRS), (question,))
        results = papers_report.Results(tmp_path / "rows.jsonl", {})
        (row,) = asker.missing("musique", [context], results)
    found = {name: method["stored"] for name, method in row["methods"].items()}
    assert found == {name: method.stored for name, method in made.items()}
    assert row["methods"]["prefix caching"]["compute"] < 1.0, "an earlier prompt began like it"
