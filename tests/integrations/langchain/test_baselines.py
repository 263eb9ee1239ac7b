"""MapReduce and MapRerank read each document alone."""

from typing import Any

import pytest

from ragkv import Engine, RagKVError
from ragkv.integrations.langchain import ChatRagKV, map_reduce_chain, map_rerank_chain
from ragkv.retrieval.rag.baselines import map_reduce, map_rerank, surest

from .helpers import QUESTION, A, B, C, chat, documents, needs_reader


@pytest.fixture
def llm(tiny: str) -> ChatRagKV:
    return chat(tiny)


def engine(llm: ChatRagKV) -> Engine:
    return llm.shared.engine


def chunks(llm: ChatRagKV) -> list[Any]:
    return [engine(llm).chunk(one.page_content) for one in (A, B, C)]


def test_the_surest_answer_is_unknown_only_if_all_are_unknown() -> None:
    assert surest([(-0.1, " Unknown."), (-2.0, "paper"), (-1.0, "rope")]) == "rope"
    assert surest([(-0.2, "unknown"), (-0.1, "unknown")]) == "unknown"


def test_map_rerank_asks_each_chunk_alone_and_takes_the_surest_answer(llm: ChatRagKV) -> None:
    how: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 3, "reuse": "none"}
    mapped = map_rerank(engine(llm), QUESTION, chunks(llm), **how)
    alone = [engine(llm).answer(QUESTION, [chunk], **how).text for chunk in chunks(llm)]
    assert list(mapped.parts) == alone
    assert mapped.text in alone
    sure = [float(engine(llm).prefill(QUESTION, [c], reuse="none").logits.softmax(-1).max()) for c in chunks(llm)]
    assert mapped.text == alone[sure.index(max(sure))]


def test_map_reduce_asks_over_the_summaries_of_all_chunks(llm: ChatRagKV) -> None:
    how: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 3}
    mapped = map_reduce(engine(llm), QUESTION, chunks(llm), "Sum up: {question}", 5, **how)
    wanted = [
        engine(llm).answer(f"Sum up: {QUESTION}", [chunk], max_new_tokens=5, min_new_tokens=3).text.strip()
        for chunk in chunks(llm)
    ]
    assert list(mapped.parts) == wanted
    assert mapped.text == engine(llm).answer("\n\n".join((*filter(None, wanted), QUESTION)), **how).text
    assert mapped.first_token_s > 0
    assert mapped.prompt_tokens > sum(map(len, chunks(llm)))


@pytest.mark.parametrize("method", [map_reduce, map_rerank])
def test_both_methods_refuse_an_empty_list_of_chunks(method: Any, llm: ChatRagKV) -> None:
    with pytest.raises(RagKVError, match="no chunk"):
        method(engine(llm), QUESTION, [])


@needs_reader
def test_the_runnables_answer_a_question_that_one_document_answers() -> None:
    llm = chat("reader", min_new_tokens=None)
    inputs = {"context": documents(), "question": "What does Verlab sell?"}
    assert map_rerank_chain(llm).invoke(inputs).strip() == "pens"
    assert map_rerank_chain(llm, reuse="none").batch([inputs, inputs])[0].strip() == "pens"
    assert isinstance(map_reduce_chain(llm, summary_tokens=4).invoke(inputs), str)
