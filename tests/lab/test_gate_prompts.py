"""Prompts for the gate, made by retrieval, and the order of passages that an applied
result names.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.errors import InputError
from ragkv.lab.gate import gate
from ragkv.lab.gate_prompts import gate_prompts, read_questions
from ragkv.rag import Corpus, Rag
from ragkv.retrieval import Document
from tests.cli.conftest import model_folder  # noqa: F401 - a fixture

WORDS = ("mill", "town", "paper", "rope", "quill")
TEXTS = [
    f"The {word} of Marl was founded by Ada in 1820. Who founded the {word}? A {word} of Ada."
    for word in WORDS
]


@pytest.fixture
def rag(model_folder: Path, tmp_path: Path) -> Iterator[Rag]:  # noqa: F811
    config = EngineConfig(store=StoreConfig(directory=str(tmp_path)))
    with Engine.from_pretrained(model_folder, config) as engine, Rag(Corpus(engine, None)) as rag:
        rag.corpus.ingest([Document(str(number), text) for number, text in enumerate(TEXTS)])
        yield rag


def test_a_prompt_holds_other_passages_than_the_one_that_goes_on_behind_it(rag: Rag) -> None:
    prompts = gate_prompts(rag, k=3)
    assert len(prompts) >= len(TEXTS)
    for prompt in prompts:
        own = (*prompt.question, *prompt.following)
        assert len(prompt.chunks) == 3
        assert all(own != chunk.token_ids[: len(own)] for chunk in prompt.chunks)


def test_of_documents_at_most_so_many_prompts_are_made(
    rag: Rag, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragkv.lab.gate_prompts.MOST_PROMPTS", 3)
    assert len(gate_prompts(rag, k=3)) == 3


def test_questions_are_read_from_lines_and_json_lines_and_their_answers_are_compared(
    rag: Rag, tmp_path: Path
) -> None:
    plain = tmp_path / "questions.txt"
    objects = tmp_path / "questions.jsonl"
    plain.write_text("Who founded the mill?\n\nWho founded the town?\n")
    objects.write_text(
        "".join(json.dumps({"question": line}) + "\n" for line in read_questions(plain))
    )
    questions = read_questions(plain)
    assert (
        questions == read_questions(objects) == ["Who founded the mill?", "Who founded the town?"]
    )
    prompts = gate_prompts(rag, 3, questions)
    assert [prompt.question for prompt in prompts] == [
        rag.engine.chunk(question).token_ids for question in questions
    ]
    result = gate(rag.engine, prompts, source="questions", selectors=["first-k"], ratios=[1.0])
    assert all(
        point.kl == pytest.approx(0.0, abs=1e-4) and point.agreement == 1.0
        for point in result.points
    )
    assert result.source == "questions"


@pytest.mark.parametrize("text", ["", '{"answer": "Ada"}', "[1]", "{"])
def test_a_file_without_questions_says_what_it_should_hold(tmp_path: Path, text: str) -> None:
    (tmp_path / "questions.jsonl").write_text(text)
    with pytest.raises(InputError, match=r"questions\.jsonl"):
        read_questions(tmp_path / "questions.jsonl")


def test_a_corpus_of_two_passages_gives_no_prompts(rag: Rag) -> None:
    rag.corpus.delete([str(number) for number in range(2, len(TEXTS))])
    assert gate_prompts(rag) == []
