"""The quality benchmark's shortcuts do not change answers, and every question format is read."""

import json
from pathlib import Path

import pytest

quality_data = pytest.importorskip("benchmarks.quality_data")
quality_run = pytest.importorskip("benchmarks.quality_run")

from ragkv import Engine, EngineConfig, FusionConfig  # noqa: E402
from ragkv.errors import InputError  # noqa: E402

PROTOTYPE = Path(__file__).resolve().parents[3] / "shared" / "data" / "models" / "reader-prototype"


@pytest.mark.skipif(not (PROTOTYPE / "config.json").exists(), reason="the reader prototype is not in ../shared")
@pytest.mark.parametrize("selector", ["hkvd", "sensitivity", "attention"])
def test_answers_from_shared_spans_equal_those_of_whole_requests(selector: str) -> None:
    contexts = quality_data.read(PROTOTYPE / "worlds.jsonl", questions=12)
    config = EngineConfig(fusion=FusionConfig(selector=selector))  # chunks are scored when they are stored, if ever
    with Engine.from_pretrained(PROTOTYPE, config) as engine:
        for number, context in enumerate(contexts):
            asker = quality_run.Asker(engine, context, number)
            found = asker.outcomes(quality_run.Method("m", 0.15, selector))
            for question, outcome in zip(context.questions, found, strict=True):
                answer = engine.answer(
                    asker.tail(question), asker.chunks, ratio=0.15, selector=selector, max_new_tokens=12
                )
                assert outcome.answer == answer.text.strip()
                assert outcome.prefill_compute == pytest.approx(answer.reuse.compute)


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


def test_an_answer_ends_at_its_end_token_with_any_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    question = quality_data.Question("local", "What is the job of Lodwin?", ("pilot",))
    context = quality_data.Context(("Lodwin works as a pilot.", "Ostmax sells ovens."), (question,))
    with Engine.from_pretrained("reader") as engine:
        asker = quality_run.Asker(engine, context, 0)
        ids, full = asker.tail(question), asker._full
        _, (first, *_) = asker.answer(full, ids, full.length)
        monkeypatch.setattr(asker, "_end_tokens", {first})
        for draft in ((), (first,), (first, first)):
            assert asker.answer(full, ids, full.length, draft)[1] == (first,)
