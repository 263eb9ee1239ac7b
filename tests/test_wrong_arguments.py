"""Public entry points say in a sentence what was wrong with an argument; what they return prints
short.
"""

from collections.abc import Callable
from typing import Any

import pytest

from ragkv import Answer, Chunk, Engine, Reuse, Timing
from ragkv.entries import EncodeReport
from ragkv.errors import InputError
from ragkv.rag import Corpus, Rag, RagAnswer, RagIngestReport
from ragkv.retrieval import Document, Hit, IngestReport, Passage
from tests.engine.helpers import engine_of
from tests.reader import READER

CALLS: dict[str, Callable[[Rag, Engine], Any]] = {
    "question must be a text, not None": lambda rag, _: rag.ask(None),  # type: ignore[arg-type]
    "The question is empty": lambda rag, _: rag.ask(" "),
    "query must be a text, not 3": lambda rag, _: rag.retrieve(3),  # type: ignore[arg-type]
    "k must be a whole number, not '3'": lambda rag, _: rag.ask("x", k="3"),  # type: ignore[arg-type]
    "k must be a whole number, not True": lambda rag, _: rag.ask("x", k=True),
    "document_ids must be a text or a list, not None": lambda rag, _: rag.corpus.delete(None),  # type: ignore[arg-type]
    "The text of document 'a' must be a text": lambda rag, _: rag.corpus.ingest(
        Document("a", None)  # type: ignore[arg-type]
    ),
    "chunks must be a list, not None": lambda _, engine: engine.entries.encode(None),  # type: ignore[arg-type]
    "session must be Session or None, not 's'": lambda _, engine: engine.answer([1], session="s"),  # type: ignore[arg-type]
    "max_new_tokens must be a whole number": lambda _, engine: engine.answer(
        [1], max_new_tokens=None
    ),  # type: ignore[typeddict-item]
    "title must be a text or None, not 5": lambda _, engine: engine.answer([1], title=5),  # type: ignore[typeddict-item]
    "stop must be a text, not 1": lambda _, engine: engine.answer([1], stop=["a", 1]),  # type: ignore[list-item]
    "ratio is True": lambda _, engine: engine.answer([1], ratio=True),
    "session must be Session, not None": lambda _, engine: engine.append(None, [1], [2]),  # type: ignore[arg-type]
    "config must be EngineConfig or None": lambda *_: Engine.from_pretrained(READER, {}),  # type: ignore[arg-type]
    "name must be a text or PathLike": lambda *_: Engine.from_pretrained(None),  # type: ignore[arg-type]
    "engine must be Engine, not None": lambda *_: Corpus(None, None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("said", CALLS)
def test_a_wrong_argument_is_named_with_what_it_must_be(said: str) -> None:
    with (
        engine_of() as engine,
        Rag(Corpus(engine, None)) as rag,
        pytest.raises(InputError, match=said),
    ):
        CALLS[said](rag, engine)


def test_what_holds_much_prints_short() -> None:
    many = tuple(map(str, range(10_000)))
    text = "word " * 10_000
    passage = Passage("id", "document", text, (0, len(text)))
    index = IngestReport(many, many, many, many, (passage,) * 1000, (passage,) * 3)
    answer = Answer(text, tuple(range(10_000)), "stop", Timing(), Reuse(notes=many))
    values = [
        index,
        answer,
        RagIngestReport(index, EncodeReport(1, 2, 3), 4),
        Chunk(tuple(range(10_000)), text),
    ]
    values += [RagAnswer(answer, (Hit(passage, 1.0, 1),) * 1000), Document("a", text)]
    assert all(
        (len(repr(value)) < 2_500 and "items" in repr(value)) or "..." in repr(value)
        for value in values
    )
    assert ", ...)" in repr(index) and "metadata={}" in repr(passage)
