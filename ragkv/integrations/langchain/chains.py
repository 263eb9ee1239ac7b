"""Runnables over a chat model: a stuff chain whose documents are chunks, and MapReduce and MapRerank as baselines.

The two baselines (CacheBlend section 7.1, "Baselines") read each document alone. MapReduce summarises each and asks
over the summaries; MapRerank asks each and takes the surest answer. `retrieval/rag/baselines.py` has them, too.
"""

import functools
from collections.abc import Callable
from typing import Any, Unpack

from langchain_core.documents import Document
from langchain_core.language_models import LanguageModelLike
from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.prompts import BasePromptTemplate, PromptTemplate, format_document
from langchain_core.runnables import Runnable, RunnableBinding, RunnableLambda

from ragkv.errors import InputError
from ragkv.prompt import AnswerOptions
from ragkv.retrieval.rag.baselines import SUMMARY_PROMPT, MapResult, map_reduce, map_rerank

from .chat import ChatRagKV

_DOCUMENT_PROMPT = PromptTemplate.from_template("{page_content}")


def create_cached_documents_chain(
    llm: LanguageModelLike,
    prompt: BasePromptTemplate[Any],
    *,
    output_parser: BaseOutputParser[Any] | None = None,
    document_prompt: BasePromptTemplate[str] | None = None,
    document_separator: str = "\n\n",
    document_variable_name: str = "context",
) -> Runnable[dict[str, Any], Any]:
    """LangChain's `create_stuff_documents_chain` with the stored KV of the documents.

    It takes `{"context": [Document, ...], ...}`. Each document's `page_content` is a chunk wherever the prompt puts it;
    the text that `document_prompt` writes around it is computed. With another model than `ChatRagKV` it is a plain
    stuff chain.
    """
    if document_variable_name not in prompt.input_variables:
        raise InputError(
            f"The prompt has no variable {document_variable_name!r}, only {prompt.input_variables}: "
            "the documents would be lost."
        )
    parser = output_parser or StrOutputParser()

    def chain(inputs: dict[str, Any]) -> Runnable[Any, Any]:
        documents = inputs[document_variable_name]
        texts = [format_document(document, document_prompt or _DOCUMENT_PROMPT) for document in documents]
        filled = prompt.invoke({**inputs, document_variable_name: document_separator.join(texts)})
        model = llm.bind(documents=documents) if isinstance(_unbound(llm), ChatRagKV) else llm
        return RunnableLambda(lambda _: filled) | model | parser

    return RunnableLambda(chain).with_config(run_name="cached_documents_chain")


def map_reduce_chain(
    llm: ChatRagKV, *, summary_prompt: str = SUMMARY_PROMPT, summary_tokens: int = 64, **how: Unpack[AnswerOptions]
) -> Runnable[dict[str, Any], str]:
    """Takes `{"context": [Document, ...], "question": ...}`. `how` goes to `Engine.answer`, such as `reuse="none"`."""
    method = functools.partial(map_reduce, summary_prompt=summary_prompt, summary_tokens=summary_tokens)
    return _map_chain(llm, method, "map_reduce", how)


def map_rerank_chain(llm: ChatRagKV, **how: Unpack[AnswerOptions]) -> Runnable[dict[str, Any], str]:
    """Takes `{"context": [Document, ...], "question": ...}`. `how` goes to `Engine.answer`, such as `reuse="none"`."""
    return _map_chain(llm, map_rerank, "map_rerank", how)


def _map_chain(
    llm: ChatRagKV, method: Callable[..., MapResult], name: str, how: AnswerOptions
) -> Runnable[dict[str, Any], str]:
    def answer(inputs: dict[str, Any]) -> str:
        documents: list[Document] = inputs["context"]
        chunks = [llm.shared.catalogue.chunk(document.page_content, document.metadata) for document in documents]
        options: AnswerOptions = {"max_new_tokens": llm.max_tokens, **how}
        return method(llm.shared.engine, inputs["question"], chunks, **options).text

    return RunnableLambda(answer).with_config(run_name=name)


def _unbound(llm: Any) -> Any:
    while isinstance(llm, RunnableBinding):
        llm = llm.bound
    return llm
