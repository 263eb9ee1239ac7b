"""`create_cached_documents_chain`: `create_stuff_documents_chain` by another name, and the model knows the chunks."""

from typing import Any

from langchain_core.language_models import LanguageModelLike
from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.prompts import BasePromptTemplate, PromptTemplate, format_document
from langchain_core.runnables import Runnable, RunnableBinding, RunnableLambda

from ragkv.errors import InputError

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
    """A chain that puts a list of documents into a prompt, as LangChain's own does, and reuses their KV.

    It takes `{"context": [Document, ...], ...}`. Each document's `page_content` is a chunk wherever the prompt puts it;
    what `document_prompt` writes around it is computed. With another model than `ChatRagKV` it is a plain stuff chain.
    """
    if document_variable_name not in prompt.input_variables:
        raise InputError(
            f"The prompt has no variable {document_variable_name!r}, only {prompt.input_variables}: "
            "the documents would be lost."
        )
    formatted_by = document_prompt or _DOCUMENT_PROMPT
    parser = output_parser or StrOutputParser()

    def chain(inputs: dict[str, Any]) -> Runnable[Any, Any]:
        documents = inputs[document_variable_name]
        text = document_separator.join(format_document(one, formatted_by) for one in documents)
        filled = prompt.invoke({**inputs, document_variable_name: text})
        model = llm.bind(documents=documents) if isinstance(_bare(llm), ChatRagKV) else llm
        return RunnableLambda(lambda _: filled) | model | parser

    return RunnableLambda(chain).with_config(run_name="cached_documents_chain")


def _bare(llm: Any) -> Any:
    while isinstance(llm, RunnableBinding):
        llm = llm.bound
    return llm
