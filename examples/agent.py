"""A LangChain agent of three turns whose tool is the retriever: what is reused of each prompt, turn
after turn.

A small model cannot decide to search, and answers badly behind a description of tools. So
`SearchFirst` requires a call of the tool when a turn begins, and the tool takes the user's question
as its query. A model that calls tools by itself runs without the middleware: `--free`.

python examples/agent.py [--model PATH] [--docs FOLDER] [--free]
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import InjectedState

from ragkv.integrations.langchain import ChatRagKV, RagKVRetriever
from ragkv.retrieval import Document as Source
from ragkv.retrieval import Index, Splitter

QUESTIONS = [
    "Who was the architect of the flax mill?",
    "On which mountain does the Severn rise?",
    "How long is it?",
]


class SearchFirst(AgentMiddleware):
    """Requires a search at the beginning of every turn, and an answer behind its result."""

    def wrap_model_call(self, request: ModelRequest, handler: Callable[[ModelRequest], Any]) -> Any:
        begins = isinstance(request.messages[-1], HumanMessage)
        return handler(request.override(tool_choice="required" if begins else "none"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default="smollm2", help="smollm2, a model folder, a GGUF file or a hub id"
    )
    parser.add_argument("--docs", type=Path, default=Path(__file__).parent / "corpus")
    parser.add_argument(
        "--free", action="store_true", help="the model decides by itself when to search"
    )
    options = parser.parse_args()
    llm = ChatRagKV(model=options.model, max_tokens=128)
    retriever = ingest(llm, options.docs)
    for question, answer in turns(llm, retriever, QUESTIONS, free=options.free):
        kv = answer.response_metadata["kv_cache"]
        parts = ", ".join(
            f"{kv['reuse'][name]} {name}" for name in ("exact", "fused", "recomputed", "computed")
        )
        tokens = answer.usage_metadata["input_tokens"]
        reused = kv["reuse"]["exact"] + kv["reuse"]["fused"]
        print(f"{question}\n  {answer.text}\n  {reused} of {tokens} prompt tokens reused ({parts})")
        print(f"  first token after {1e3 * kv['timing']['first_token_s']:.0f} ms")


def ingest(llm: ChatRagKV, docs: Path) -> RagKVRetriever:
    """Index the files of a folder, and compute the KV of their passages once."""
    index = Index(None, splitter=Splitter(lambda text: len(llm.get_token_ids(text)), 128))
    index.writer.ingest(
        Source(file.name, file.read_text("utf-8").strip(), file.name)
        for file in sorted(docs.glob("*.md"))
    )
    llm.ingest(Document(page_content=passage.text) for passage in index.contents.passages())
    return RagKVRetriever(index=index, k=3)


def turns(
    llm: ChatRagKV, retriever: RagKVRetriever, questions: list[str], *, free: bool
) -> list[tuple]:
    """Each question with the last answer of its turn, in one conversation."""

    @tool(response_format="content_and_artifact")  # the artifact carries the documents to the model
    def search_documents(state: Annotated[dict, InjectedState]) -> tuple[str, list[Document]]:
        """Finds the passages for the user's question."""
        asked = [message for message in state["messages"] if isinstance(message, HumanMessage)]
        found = retriever.invoke(asked[-1].text)
        return "\n\n".join(document.page_content for document in found), found

    middleware = [] if free else [SearchFirst()]
    agent = create_agent(
        llm, [search_documents], middleware=middleware, checkpointer=InMemorySaver()
    )
    thread = {"configurable": {"thread_id": "example"}}
    asked = [agent.invoke({"messages": [HumanMessage(question)]}, thread) for question in questions]
    return list(zip(questions, (state["messages"][-1] for state in asked), strict=True))


if __name__ == "__main__":
    main()
