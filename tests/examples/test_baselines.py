"""MapReduce and MapRerank read each document alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.baselines import map_reduce, map_rerank, surest
from ragkv import Chunk, Engine
from tests.cli.conftest import model_folder  # noqa: F401 - a fixture

QUESTION = "Where does the founder of the mill live?"
TEXTS = (
    "The mill of Marl makes paper and rope.",
    "Ada Quill founded the mill in 1820.",
    "She lives in Irvburg with her sister.",
)


@pytest.fixture
def engine(model_folder: Path) -> Iterator[Engine]:  # noqa: F811
    with Engine.from_pretrained(model_folder) as engine:
        yield engine


@pytest.fixture
def chunks(engine: Engine) -> list[Chunk]:
    return [engine.chunk(text) for text in TEXTS]


def test_the_surest_answer_is_unknown_only_if_all_are_unknown() -> None:
    assert surest([(-0.1, " Unknown."), (-2.0, "paper"), (-1.0, "rope")]) == "rope"
    assert surest([(-0.2, "unknown"), (-0.1, "unknown")]) == "unknown"


def test_map_rerank_asks_each_chunk_alone_and_takes_the_surest_answer(
    engine: Engine, chunks: list[Chunk]
) -> None:
    how: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 3, "reuse": "none"}
    mapped = map_rerank(engine, QUESTION, chunks, **how)
    alone = [engine.answer(QUESTION, [chunk], **how).text for chunk in chunks]
    assert list(mapped.parts) == alone
    assert mapped.text in alone
    sure = [
        float(engine.prefill(QUESTION, [one], reuse="none").logits.softmax(-1).max())
        for one in chunks
    ]
    assert mapped.text == alone[sure.index(max(sure))]


def test_map_reduce_asks_over_the_summaries_of_all_chunks(
    engine: Engine, chunks: list[Chunk]
) -> None:
    how: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 3}
    mapped = map_reduce(engine, QUESTION, chunks, "Sum up: {question}", 5, **how)
    request = f"Sum up: {QUESTION}"
    wanted = [
        engine.answer(request, [one], max_new_tokens=5, min_new_tokens=3).text.strip()
        for one in chunks
    ]
    assert list(mapped.parts) == wanted
    assert mapped.text == engine.answer("\n\n".join((*filter(None, wanted), QUESTION)), **how).text
    assert mapped.first_token_s > 0
    assert mapped.prompt_tokens > sum(map(len, chunks))
