"""Twenty documents in twelve scripts are found by questions in other writings of their words."""

import json
from pathlib import Path

import pytest

from ragkv.retrieval import Document, Index, Splitter

SET = json.loads((Path(__file__).parent / "languages.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def index() -> Index:
    made = Index(None, splitter=Splitter(len))
    made.writer.ingest([Document(**one) for one in SET["documents"]])
    return made


@pytest.mark.parametrize(("question", "wanted"), SET["questions"])
def test_a_question_finds_its_document_first(index: Index, question: str, wanted: str) -> None:
    assert index.search(question, 1)[0].passage.document_id == wanted
