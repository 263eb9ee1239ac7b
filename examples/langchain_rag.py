"""An ordinary LangChain chain before and after a change of its `llm =` line, with the time to first
token of both.

python examples/langchain_rag.py [--model PATH] [--docs FOLDER] [--ratio R] [QUESTION ...]
"""

import argparse
import statistics
import time
from pathlib import Path

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from plain_transformers import PlainTransformers

from ragkv.integrations.langchain import ChatRagKV, RagKVRetriever
from ragkv.model.loading import load
from ragkv.retrieval import Document as Source
from ragkv.retrieval import Index, Splitter

HERE = Path(__file__).parent
QUESTIONS = [
    "Which famous scientist was born in Shrewsbury in 1809?",
    "On which mountain does the Severn rise?",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument(
        "--model", default="smollm2", help="smollm2, a model folder, a GGUF file or a hub id"
    )
    parser.add_argument("--docs", type=Path, default=HERE / "corpus")
    parser.add_argument("-k", type=int, default=4, help="passages of a prompt")
    parser.add_argument(
        "--ratio", type=float, help="recompute ratio; 1 recomputes everything, as transformers does"
    )
    options = parser.parse_args()

    model, tokenizer = load(options.model, "cpu", "auto")
    index = Index(None, splitter=Splitter(lambda text: len(tokenizer.tokenize(text)), 128))
    files = [path for path in sorted(options.docs.iterdir()) if path.suffix in (".md", ".txt")]
    index.writer.ingest(
        Source(file.name, file.read_text("utf-8").strip(), file.name) for file in files
    )
    retriever = RagKVRetriever(index=index, k=options.k)

    llm = PlainTransformers(net=model, tokenizer=tokenizer)  # before
    before = chain(retriever, llm)
    chunks = [passage.text for passage in index.contents.passages()]
    llm = ChatRagKV(model=options.model, ratio=options.ratio, max_tokens=64, corpus=chunks)  # after
    after = chain(retriever, llm)

    for question in options.questions:
        (answer, was), (again, now) = timed(before, question), timed(after, question)
        print(
            f"{question}\n  before: {answer}  ({1e3 * was:.0f} ms)\n  after:  {again}  "
            f"({1e3 * now:.0f} ms)"
        )


def chain(retriever: Runnable, llm: Runnable) -> Runnable:
    prompt = ChatPromptTemplate.from_messages([("human", "{context}\n\n{question}")])
    return (
        {"context": retriever | joined, "question": RunnablePassthrough()}
        | prompt
        | llm
        | StrOutputParser()
    )


def joined(documents: list[Document]) -> str:
    in_order = sorted(documents, key=lambda one: (one.metadata["source"], one.metadata["span"]))
    return "\n\n".join(one.page_content for one in in_order)


def timed(asked: Runnable, question: str, runs: int = 3) -> tuple[str, float]:
    """The answer, and the median time to its first piece, retrieval included; one unmeasured run
    first.
    """
    seconds = []
    for _ in range(runs + 1):
        began = time.perf_counter()
        pieces = asked.stream(question)
        first = next(pieces)
        seconds.append(time.perf_counter() - began)
        answer = (first + "".join(pieces)).strip()
    return answer, statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
