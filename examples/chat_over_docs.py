"""A conversation over a folder of documents that retrieves in every turn and continues beyond its
context window.

The history's KV is reused from turn to turn. If a prompt would overflow the context, the engine
drops the documents of past turns, the oldest first, and goes on with the KV of the rest. The
default `--context` is small enough to show that.

    python examples/chat_over_docs.py [--model PATH] [--docs FOLDER] [--turns N | --interactive]
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from ragkv import Engine, EngineConfig
from ragkv.config import SessionConfig
from ragkv.model.loading import load
from ragkv.rag import Corpus, Rag

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default="smollm2", help="smollm2, a model folder, a GGUF file or a hub id"
    )
    parser.add_argument("--docs", type=Path, default=HERE / "corpus")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--context", type=int, default=768, help="tokens; 0: the model's own")
    parser.add_argument("-k", type=int, default=3, help="passages per turn")
    parser.add_argument("--interactive", action="store_true")
    options = parser.parse_args()

    model, tokenizer = load(options.model, "cpu", "auto")
    if options.context:
        model.config.max_position_embeddings = options.context
    config = EngineConfig(session=SessionConfig(discard="keep-dialogue"))
    computed = 0
    with (
        Engine(model, tokenizer, config) as engine,
        Rag(Corpus(engine, None, chunk_tokens=128)) as rag,
    ):
        rag.corpus.ingest(options.docs)
        session = engine.session("chat")
        for number, question in enumerate(
            typed() if options.interactive else prepared(options.turns), 1
        ):
            answer = rag.ask(
                question, options.k, order="document", session=session, max_new_tokens=32
            ).answer
            computed += answer.reuse.computed + answer.reuse.recomputed
            print(f"{number}. {question}\n   {answer.text.strip()}")
            reused = (
                f"{answer.reuse.tokens} tokens, {answer.reuse.exact + answer.reuse.fused} "
                "of them reused"
            )
            print(
                f"   {reused}; the history has {len(session.token_ids)} now",
                *answer.reuse.notes,
                sep="; ",
            )
    print(
        f"\n{computed} tokens were computed in total, in a window of "
        f"{model.config.max_position_embeddings}."
    )


def prepared(turns: int) -> Iterator[str]:
    """The example questions, one after the other."""
    lines = (HERE / "questions.jsonl").read_text("utf-8").splitlines()
    records = [json.loads(line) for line in lines if line]
    questions = [record["question"] for record in records if "before" not in record]
    for turn in range(turns):
        yield questions[turn % len(questions)]


def typed() -> Iterator[str]:
    """The questions that the user types, until an empty line."""
    while question := input("> ").strip():
        yield question


if __name__ == "__main__":
    main()
