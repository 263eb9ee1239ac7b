"""Prompts for the quality gate, made by retrieval: of questions, or of a corpus whose questions are not known.

Of these a piece of a passage is the question that finds the chunks of the prompt, and what follows it in that passage
are the next tokens. The passage itself is left out, or they could be copied from it.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from ragkv.errors import InputError
from ragkv.lab.gate import MOST_PROMPTS, NEXT_TOKENS, Probe, spread
from ragkv.retrieval import Hit
from ragkv.retrieval.rag.rag import DEFAULT_K, Order, Rag
from ragkv.types import Chunk

ORDERS: tuple[Order, ...] = ("score", "document")
LEAST_CHUNKS = 2  # A prompt has at least so many chunks: the first one directly follows the prefix, so it is exact.


def gate_prompts(
    rag: Rag, k: int = DEFAULT_K, questions: Sequence[str] = (), orders: Sequence[Order] = ORDERS
) -> list[Probe]:
    """Prompts of `k` retrieved passages: one a question, else two hundred at most, evenly spread over the corpus.

    Questions that find fewer than two passages are left out; a tiny corpus gives no prompts.
    """
    return list(_asking(rag, k, questions, orders)) if questions else spread(_prompts(rag, k, orders))


def read_questions(file: Path) -> list[str]:
    """The questions of a file: one a line, or JSON lines with the field `question`. Raises `InputError`."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        if file.suffix == ".jsonl":
            lines = [json.loads(line)["question"] for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"No questions can be read from {file}: {error!r}.") from error
    if not lines or not all(isinstance(line, str) for line in lines):
        raise InputError(f"{file} has no questions: give one a line, or JSON lines with the field question.")
    return lines


def _asking(rag: Rag, k: int, questions: Sequence[str], orders: Sequence[Order]) -> Iterator[Probe]:
    for question in questions:
        hits = rag.retrieve(question, k, order="score")
        if len(hits) >= LEAST_CHUNKS:
            yield Probe(_ordered(rag, hits, orders), rag.engine.intake.encode(question))


def _ordered(rag: Rag, hits: Sequence[Hit], orders: Sequence[Order]) -> dict[str | None, tuple[Chunk, ...]]:
    """The chunks of `hits`, the best first, in each order."""
    return {order: tuple(rag.chunk(hit.passage) for hit in rag.in_order(hits, order)) for order in orders}


def _prompts(rag: Rag, k: int, orders: Sequence[Order]) -> Iterator[Probe]:
    passages = rag.index.passages()
    step = max(1, -(-len(passages) // MOST_PROMPTS))
    chosen = passages[::step]
    pieces = max(1, -(-MOST_PROMPTS // max(1, len(chosen))))  # of a passage: a small corpus gives several each
    for passage in chosen:
        chunk = rag.chunk(passage)
        starts = range(0, max(1, len(chunk) - 2 * NEXT_TOKENS + 1), NEXT_TOKENS)
        for start in starts[:pieces]:
            text = chunk.token_ids[start : start + 2 * NEXT_TOKENS]
            query = rag.engine.tokenizer.decode(list(text[:NEXT_TOKENS])) if rag.engine.tokenizer else passage.text
            found = rag.retrieve(query, k + 1, order="score")
            hits = [hit for hit in found if hit.passage.text != passage.text][:k]
            if len(hits) >= LEAST_CHUNKS:
                yield Probe.of(_ordered(rag, hits, orders), text)


__all__ = ["gate_prompts", "read_questions"]
