"""Multi-hop questions over a folder of documents: answers, their sources, and the tokens that were
reused.

python examples/multihop_qa.py [--model PATH] [--docs FOLDER] [QUESTION ...]
"""

import argparse
import tempfile
from pathlib import Path

from ragkv import Answer, Engine, EngineConfig, StoreConfig
from ragkv.rag import Corpus, Rag
from ragkv.retrieval import resolve_embedder

HERE = Path(__file__).parent
QUESTIONS = {
    # bridge -> its engineer -> his birth
    "bridge": "Where was the engineer born who built the bridge at Buildwas?",
    "comparison": "Which has the longer span, the Iron Bridge or the bridge at Buildwas?",
    "compositional": "Who made the chains of the bridge across the Menai Strait?",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", nargs="*")
    parser.add_argument(
        "--model", default="smollm2", help="smollm2, a model folder, a GGUF file or a hub id"
    )
    parser.add_argument("--docs", type=Path, default=HERE / "corpus")
    parser.add_argument("-k", type=int, default=6, help="passages per question")
    options = parser.parse_args()
    questions = {f"question {n}": text for n, text in enumerate(options.questions, 1)} or QUESTIONS

    with tempfile.TemporaryDirectory() as home:
        config = EngineConfig(store=StoreConfig(directory=f"{home}/kv"))
        with (
            Engine.from_pretrained(options.model, config) as engine,
            Rag(
                Corpus(engine, f"{home}/index", chunk_tokens=128, embedder=resolve_embedder())
            ) as rag,
        ):
            ingested = rag.corpus.ingest(options.docs)
            print(
                f"{len(rag.index.contents.document_ids())} documents, {ingested.kv.encoded} chunks encoded\n"
            )
            for kind, question in questions.items():
                # In document order, so that "she" and "that company" follow the name that they
                # refer to.
                found = rag.ask(question, options.k, order="document", max_new_tokens=32)
                print(f"{kind}: {question}\n  {found.answer.text.strip()}")
                print(f"  sources: {', '.join(sources(found.answer)) or 'not found word for word'}")
                print(f"  {reused(found.answer)}\n")


def sources(answer: Answer) -> list[str]:
    """Where the answer occurs word for word: document and character offsets."""
    return [f"{Path(one.source).name}:{one.start}-{one.end}" for one in answer.citations]


def reused(answer: Answer) -> str:
    reuse = answer.reuse
    timing = answer.timing
    return (
        f"{reuse.tokens} tokens: {reuse.exact} exact, {reuse.fused} fused, {reuse.recomputed} "
        "recomputed, "
        f"{reuse.computed} computed; first token after {1e3 * timing.first_token_s:.0f} ms"
    )


if __name__ == "__main__":
    main()
