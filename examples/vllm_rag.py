"""Questions over an ingested home, answered by vLLM's OpenAI server with ragkv's connector
(docs/vllm.md).

python examples/vllm_rag.py [--home corpus] [--url http://localhost:8000] [QUESTION ...]

Retrieval is ragkv's and runs here, without a model. The chain is LangChain's own with `ChatOpenAI`.
After every answer stand its sources, and what the connector reused of the prompt: the request gives
its report a name, by which a second request asks for it.
"""

import argparse
import json
import uuid
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

from ragkv.integrations.langchain import RagKVRetriever
from ragkv.retrieval import Index

QUESTIONS = ["Which famous scientist was born in Shrewsbury in 1809?", "What is the River Severn?"]

# `SYSTEM` is the system text behind which the corpus was ingested for this model (`prompt.system`).
SYSTEM = "Use the passages to answer the question in one short sentence."


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("question", nargs="*", default=QUESTIONS)
    parser.add_argument("--home", type=Path, default=Path("corpus"), help="of `ragkv ingest`")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--model", default="smollm2", help="the server's name of the model")
    parser.add_argument("-k", type=int, default=6, help="passages of a prompt")
    options = parser.parse_args()

    retriever = RagKVRetriever(index=Index(options.home / "index", read_only=True), k=options.k)
    llm = ChatOpenAI(
        model=options.model,
        base_url=f"{options.url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=64,
    )
    template = ChatPromptTemplate.from_messages(
        [("system", SYSTEM), ("human", "{passages}{question}")]
    )
    for question in options.question:
        found = retriever.invoke(question)
        in_order = sorted(found, key=lambda one: (one.metadata["source"], one.metadata["span"]))
        passages = "".join(one.page_content + "\n\n" for one in in_order)
        name = uuid.uuid4().hex
        # The salt lets this request be fused, and no other one find what it leaves in vLLM's prefix
        # cache.
        named = llm.bind(
            extra_body={"cache_salt": name, "kv_transfer_params": {"ragkv": {"name": name}}}
        )
        answer = (template | named | StrOutputParser()).invoke(
            {"passages": passages, "question": question}
        )
        print(f"{question}\n  {answer}\n  sources: {', '.join(sources(found))}")
        reuse = report_of(name, options.url, options.model).get("reuse", {})
        reused = reuse.get("exact", 0) + reuse.get("fused", 0)
        print(f"  reused {reused}, recomputed {reuse.get('recomputed', 0)} tokens of the passages")


def sources(found: list[Document]) -> list[str]:
    """The files of the passages, each once, best first."""
    return list(dict.fromkeys(Path(one.metadata["source"]).name for one in found))


def report_of(name: str, url: str, model: str) -> dict[str, Any]:
    """The connector's report of that name."""
    asking = {
        "kv_transfer_params": {"ragkv": {"report_of": name}},
        "model": model,
        "prompt": [0],
        "max_tokens": 1,
    }
    request = Request(
        f"{url}/v1/completions", json.dumps(asking).encode(), {"content-type": "application/json"}
    )
    with urlopen(request) as answer:
        found: dict[str, Any] = json.load(answer)["kv_transfer_params"]["ragkv"]["report"] or {}
    return found


if __name__ == "__main__":
    main()
