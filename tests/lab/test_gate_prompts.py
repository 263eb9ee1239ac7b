"""Prompts for the gate, made by retrieval, and the order of passages that an applied result names."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.errors import InputError
from ragkv.fusion.gate_result import GateResult, Point, SpeedUp, Tolerance
from ragkv.lab.gate import gate, save
from ragkv.lab.gate_prompts import gate_prompts, read_questions
from ragkv.retrieval import Document
from ragkv.retrieval.rag import Rag
from tests.cli.conftest import model_folder  # noqa: F401 - a fixture

WORDS = ("mill", "town", "paper", "rope", "quill")
TEXTS = [f"The {word} of Marl was founded by Ada in 1820. Who founded the {word}? A {word} of Ada." for word in WORDS]


@pytest.fixture
def rag(model_folder: Path, tmp_path: Path) -> Iterator[Rag]:  # noqa: F811
    config = EngineConfig(store=StoreConfig(directory=str(tmp_path)))
    with Engine.from_pretrained(model_folder, config) as engine, Rag(engine, None) as rag:
        rag.ingest([Document(str(number), text) for number, text in enumerate(TEXTS)])
        yield rag


def test_a_prompt_holds_other_passages_than_the_one_that_goes_on_behind_it(rag: Rag) -> None:
    prompts = gate_prompts(rag, k=3)
    assert len(prompts) >= len(TEXTS)
    for prompt in prompts:
        own = (*prompt.question, *prompt.following)
        best_first, in_order = ({chunk.token_ids for chunk in prompt.chunks[order]} for order in ("score", "document"))
        assert best_first == in_order
        for chunks in prompt.chunks.values():
            assert len(chunks) == 3
            assert all(own != chunk.token_ids[: len(own)] for chunk in chunks)


def test_both_orders_are_tried_and_the_result_says_what_prompts_it_had(rag: Rag) -> None:
    result = gate(rag.engine, probes=gate_prompts(rag, k=3)[:4], selectors=["none"])
    assert [point.order for point in result.points] == ["score", "document"]
    assert result.source == "retrieved passages"


def test_questions_are_read_from_lines_and_json_lines_and_their_answers_are_compared(rag: Rag, tmp_path: Path) -> None:
    plain, objects = tmp_path / "questions.txt", tmp_path / "questions.jsonl"
    plain.write_text("Who founded the mill?\n\nWho founded the town?\n")
    objects.write_text("".join(json.dumps({"question": line}) + "\n" for line in read_questions(plain)))
    questions = read_questions(plain)
    assert questions == read_questions(objects) == ["Who founded the mill?", "Who founded the town?"]
    prompts = gate_prompts(rag, 3, questions)
    assert [prompt.question for prompt in prompts] == [rag.engine.chunk(question).token_ids for question in questions]
    result = gate(rag.engine, probes=prompts, source="questions", selectors=["sensitivity"], ratios=[1.0])
    assert all(point.kl == pytest.approx(0.0, abs=1e-4) and point.agreement == 1.0 for point in result.points)
    assert result.source == "questions"


@pytest.mark.parametrize("text", ["", '{"answer": "Ada"}', "[1]", "{"])
def test_a_file_without_questions_says_what_it_should_hold(tmp_path: Path, text: str) -> None:
    (tmp_path / "questions.jsonl").write_text(text)
    with pytest.raises(InputError, match=r"questions\.jsonl"):
        read_questions(tmp_path / "questions.jsonl")


def test_a_corpus_of_two_passages_gives_no_prompts(rag: Rag) -> None:
    rag.delete([str(number) for number in range(2, len(TEXTS))])
    assert gate_prompts(rag) == []


@pytest.mark.parametrize("order", ["score", "document"])
def test_questions_that_name_no_order_have_the_one_that_was_applied(rag: Rag, order: str) -> None:
    speed = SpeedUp(3.0, 2.9, 3.1, 0.1, 0.3)
    point = Point("first-k", 0.1, order, 0.0, 0.0, 1.0, 1.0, None, speed, 3)
    save(rag.engine, GateResult(Tolerance(), (point,), (point,), "retrieved passages", 48, "a machine"))
    question = "the quill and the rope"
    assert rag.default_order == order
    assert rag.retrieve(question, 4) == rag.retrieve(question, 4, order="score" if order == "score" else "document")
    assert rag.retrieve(question, 4, order="score") != rag.retrieve(question, 4, order="document")
