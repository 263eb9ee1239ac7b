"""Every question format is read."""

import json
from pathlib import Path

import pytest

quality_data = pytest.importorskip("benchmarks.quality_data")

from ragkv.errors import InputError  # noqa: E402


def test_every_question_format_is_read(tmp_path: Path) -> None:
    def contexts(name: str, text: str) -> list:
        (tmp_path / name).write_text(text)
        return quality_data.read(tmp_path / name)

    world = {"chunks": ["A.", "B."], "questions": [{"type": "local", "question": "q?", "answer": "a"}] * 2}
    (read,) = contexts("w.jsonl", json.dumps(world) + "\n")
    assert (read.chunks, len(read.questions), read.questions[0].golds) == (("A.", "B."), 2, ("a",))
    musique = [{"ctxs": [{"title": "T", "text": "x"}], "question": "q?", "answers": [["a"], ["b"]]}]
    (read,) = contexts("m.json", json.dumps(musique))
    assert (read.chunks, read.questions[0].golds) == (("T\nx\n\n",), ("a", "b"))
    said = "Answer the question based on the given passages."
    prompt = f"{said}\n\nThe following are given passages.\nPassage 1:\none\nPassage 2:\ntwo\n\n{said}"
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
