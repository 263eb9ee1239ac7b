"""MapReduce and MapRerank (CacheBlend section 7.1, "Baselines") as runnables over a chat model's engine.

Both read every document alone. MapReduce has each summarised and asks over the summaries; MapRerank asks each and
takes the surest answer. What they do is in `rag/baselines.py`, which knows no LangChain; the benchmarks use that.
"""

from collections.abc import Callable
from typing import Any

from langchain_core.documents import Document
from langchain_core.runnables import Runnable, RunnableLambda

from ragkv.engine import Engine
from ragkv.rag.baselines import SUMMARY_PROMPT, MapResult, map_reduce, map_rerank
from ragkv.types import Chunk

from .chat import ChatRagKV


def map_reduce_chain(
    llm: ChatRagKV, *, summary_prompt: str = SUMMARY_PROMPT, summary_tokens: int = 64, **how: Any
) -> Runnable[dict[str, Any], str]:
    """Takes `{"context": [Document, ...], "question": ...}`. `how` goes to `Engine.answer`, `reuse="none"` for one."""

    def mapped(engine: Engine, question: str, chunks: list[Chunk]) -> MapResult:
        return map_reduce(
            engine, question, chunks, summary_prompt, summary_tokens, max_new_tokens=llm.max_tokens, **how
        )

    return _chain(llm, mapped, "map_reduce")


def map_rerank_chain(llm: ChatRagKV, **how: Any) -> Runnable[dict[str, Any], str]:
    """Takes `{"context": [Document, ...], "question": ...}`. `how` goes to `Engine.answer`, `reuse="none"` for one."""
    return _chain(llm, lambda *asked: map_rerank(*asked, max_new_tokens=llm.max_tokens, **how), "map_rerank")


def _chain(
    llm: ChatRagKV, mapped: Callable[[Engine, str, list[Chunk]], MapResult], name: str
) -> Runnable[dict[str, Any], str]:
    def answer(inputs: dict[str, Any]) -> str:
        documents: list[Document] = inputs["context"]
        chunks = [llm.shared.catalogue.chunk(one.page_content, one.metadata) for one in documents]
        return mapped(llm.shared.engine, inputs["question"], chunks).text

    return RunnableLambda(answer).with_config(run_name=name)
