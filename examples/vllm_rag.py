"""Questions over an ingested home, answered by vLLM's OpenAI server with ragkv's connector (docs/vllm.md).

python examples/vllm_rag.py [--home corpus] [--url http://localhost:8000] [QUESTION ...]

Retrieval is ragkv's and runs here, without a model. The chain is LangChain's own with `ChatOpenAI`. After every answer
stand its sources, and what the connector reused of the prompt, read from the server's metrics.
"""

import argparse
import re
from pathlib import Path
from urllib.request import urlopen

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

from ragkv.integrations.langchain import RagKVRetriever
from ragkv.retrieval import Index

QUESTIONS = ["What does Nesibissa do for a living?", "What does Verlab sell?", "In which city is Culfete held?"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="*", default=QUESTIONS)
    parser.add_argument("--home", type=Path, default=Path("corpus"), help="of `ragkv ingest`")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--model", default="reader", help="the server's name of the model")
    parser.add_argument("--separator", help="what stands behind each passage; left out: a space for the bundled reader")
    parser.add_argument("-k", type=int, default=12, help="passages of a prompt")
    options = parser.parse_args()
    separator = options.separator or (" " if options.model == "reader" else "\n\n")

    retriever = RagKVRetriever(index=Index(options.home / "index", read_only=True), k=options.k)
    llm = ChatOpenAI(model=options.model, base_url=f"{options.url}/v1", api_key="none", temperature=0, max_tokens=64)
    chain = ChatPromptTemplate.from_messages([("human", "{passages}{question}")]) | llm | StrOutputParser()
    for question in options.question:
        found = retriever.invoke(question)
        in_order = sorted(found, key=lambda one: (one.metadata["source"], one.metadata["span"]))
        passages = "".join(one.page_content + separator for one in in_order)
        before = counts(options.url)
        answer = chain.invoke({"passages": passages, "question": question})
        now = {name: round(count - before.get(name, 0)) for name, count in counts(options.url).items()}
        print(f"{question}\n  {answer}\n  sources: {', '.join(sources(found))}")
        print(f"  reused {now.get('reused', 0)}, recomputed {now.get('recomputed', 0)} tokens of the passages")


def sources(found: list[Document]) -> list[str]:
    """The files of the passages, each once, best first."""
    return list(dict.fromkeys(Path(one.metadata["source"]).name for one in found))


def counts(url: str) -> dict[str, float]:
    """The connector's counts of tokens, from vLLM's metrics."""
    with urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    return {name: float(value) for name, value in re.findall(r"^vllm:ragkv_tokens_(\w+?)_total\S* (\S+)$", text, re.M)}


if __name__ == "__main__":
    main()
