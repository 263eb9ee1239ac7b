"""Published question sets: their formats, and what is said of bad input."""

import json
from pathlib import Path
from typing import Any

import pytest

from ragkv.errors import InputError

quality_data = pytest.importorskip("benchmarks.quality_data")

PAIRS = (("Marl", "Ada founded the mill of Marl. "), ("Rope", "The mill makes rope."), ("Quill", "Quill was a town."))


def longbench(name: str = "2wikimqa", **changes: Any) -> dict[str, Any]:
    context = "\n\n".join(f"Passage {number}:\n{title}\n{text}" for number, (title, text) in enumerate(PAIRS, 1))
    made = {"input": "Who founded the mill?", "context": context, "answers": ["Ada", "Ada Quill"], "length": 20}
    return made | {"dataset": name, "language": "en", "all_classes": None, "_id": "1"} | changes


def hotpotqa(**changes: Any) -> dict[str, Any]:
    made = {"_id": "1", "question": "Who founded the mill?", "answer": "Ada", "supporting_facts": [["Marl", 0]]}
    return made | {"context": [[title, [text, " More."]] for title, text in PAIRS]} | changes


def musique(**changes: Any) -> dict[str, Any]:
    paragraphs = [
        {"idx": number, "title": title, "paragraph_text": text, "is_supporting": not number}
        for number, (title, text) in enumerate(PAIRS)
    ]
    made = {"id": "2hop", "paragraphs": paragraphs, "question": "Who founded the mill?", "answer": "Ada"}
    return made | {"answer_aliases": ["Ada Quill"], "answerable": True} | changes


def lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path: Path, text: str) -> list[Any]:
    path.write_text(text)
    found: list[Any] = quality_data.read(path)
    return found


def refused(path: Path, text: str) -> str:
    with pytest.raises(InputError) as caught:
        read(path, text)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_longbench_is_cut_at_its_passages(tmp_path: Path) -> None:
    (context,) = quality_data.read(lines(tmp_path / "2wikimqa_e.jsonl", longbench("2wikimqa_e")))
    assert context.chunks == tuple(f"{title}\n{text.strip()}" for title, text in PAIRS)
    (question,) = context.questions
    assert (question.type, question.text, question.golds) == ("2wikimqa", "Who founded the mill?", ("Ada", "Ada Quill"))


def test_longbench_dialogues_are_cut_at_their_examples(tmp_path: Path) -> None:
    examples = "Dialogue: Ada: hello\nBen: Dialogue: again\nSummary: Ada greets.\nDialogue: Ben: rope\nSummary: Rope."
    record = longbench("samsum", context=examples, input="Dialogue: Ada: bye\nSummary: ")
    (context,) = quality_data.read(lines(tmp_path / "samsum.jsonl", record))
    assert [chunk.split("\n")[0] for chunk in context.chunks] == ["Dialogue: Ada: hello", "Dialogue: Ben: rope"]
    assert context.questions[0].text == "Dialogue: Ada: bye\nSummary:"


def test_a_context_without_passages_stays_whole(tmp_path: Path) -> None:
    (context,) = quality_data.read(lines(tmp_path / "qasper.jsonl", longbench("qasper", context="One long text.")))
    assert context.chunks == ("One long text.",)


@pytest.mark.parametrize("as_columns", [False, True])
def test_hotpotqa_is_read_as_published_and_as_columns(tmp_path: Path, as_columns: bool) -> None:
    titles, sentences = [title for title, _ in PAIRS], [[text, " More."] for _, text in PAIRS]
    changes = {"context": {"title": titles, "sentences": sentences}} if as_columns else {}
    (context,) = read(tmp_path / "dev.json", json.dumps([hotpotqa(**changes)]))
    assert context.chunks[1] == "Rope\nThe mill makes rope. More."
    assert (context.questions[0].type, context.questions[0].golds) == ("hotpotqa", ("Ada",))
    (context,) = read(tmp_path / "dev.json", json.dumps([hotpotqa(evidences=[])]))
    assert context.questions[0].type == "2wikimqa"


def test_musique_has_aliases_and_leaves_unanswerable_questions_out(tmp_path: Path) -> None:
    (context,) = quality_data.read(lines(tmp_path / "m.jsonl", musique(answerable=False), musique()))
    assert context.chunks[0] == "Marl\nAda founded the mill of Marl."
    assert context.questions[0].golds == ("Ada", "Ada Quill")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_an_empty_file_is_named(tmp_path: Path, name: str) -> None:
    assert refused(tmp_path / name, " \n").endswith("is empty.")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.json cannot be read"):
        quality_data.read(tmp_path / "gone.json")


@pytest.mark.parametrize("field", ["input", "answers", "dataset"])
def test_a_missing_field_is_named_with_its_line(tmp_path: Path, field: str) -> None:
    record = longbench()
    del record[field]
    text = json.dumps(longbench()) + "\n\n" + json.dumps(record)
    assert f"line 3: the field '{field}' is missing" in refused(tmp_path / "a.jsonl", text)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (longbench(answers="Ada"), "the field 'answers' must be a list"),
        (longbench(input=None), "the record cannot be read"),
        (musique(paragraphs=[{"title": "T"}]), "the field 'paragraph_text' is missing"),
        (musique(paragraphs=["T"]), "the record cannot be read"),
        (hotpotqa(context=[["T", ["a"]], ["T"]]), "the record cannot be read"),
        ({"question": "Who?", "answers": ["Ada"]}, "it has none of the fields 'contexts', 'documents', 'chunks'"),
        ([1], "a record must be an object with fields"),
    ],
)
def test_a_wrong_record_is_named_with_its_field(tmp_path: Path, record: Any, said: str) -> None:
    assert f"record 2: {said}" in refused(tmp_path / "a.json", json.dumps([longbench(), record]))
    assert f"line 1: {said}" in refused(tmp_path / "a.jsonl", json.dumps(record))


def test_wrong_json_is_named_with_its_line(tmp_path: Path) -> None:
    assert "line 2, column 2: this is not JSON" in refused(tmp_path / "a.jsonl", json.dumps(longbench()) + "\n{'a'}")
    assert "line 2, column 1" in refused(tmp_path / "a.json", "[\n")
    assert "named *.jsonl" in refused(tmp_path / "a.json", json.dumps(musique()) + "\n" + json.dumps(musique()))


def test_a_file_without_an_answerable_question_is_named(tmp_path: Path) -> None:
    text = json.dumps(musique(answerable=False))
    assert "has no question with an answer" in refused(tmp_path / "a.jsonl", text)
