"""Makes prompts for the quality gate by retrieval, from questions, or from a corpus without
questions.

Without questions, a piece of a passage is the question that finds the chunks of the prompt. The
text that follows the piece in its passage gives the next tokens. The passage itself is left out of
the prompt, because the tokens could be copied from it.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from ragkv.errors import InputError
from ragkv.lab.gate import NEXT_TOKENS, Probe
from ragkv.rag.rag import DEFAULT_K, Rag

MOST_PROMPTS = 200  # made of documents, at most; questions are all used
# Chunks of a prompt, at least: the first tokens of its first one are computed.
LEAST_CHUNKS = 2


def gate_prompts(rag: Rag, k: int = DEFAULT_K, questions: Sequence[str] = ()) -> list[Probe]:
    """Prompts of `k` retrieved passages: one a question, else `MOST_PROMPTS` at most, evenly spread
    over the corpus.

    Questions that find fewer than two passages are left out; a tiny corpus gives no prompts.
    """
    if questions:
        found = ((question, rag.retrieve(question, k)) for question in questions)
        return [
            Probe(tuple(rag.chunks_of(hits)), rag.engine.token_ids(question))
            for question, hits in found
            if len(hits) >= LEAST_CHUNKS
        ]
    probes = list(_of_documents(rag, k))
    step = max(1.0, len(probes) / MOST_PROMPTS)
    return [probes[int(number * step)] for number in range(min(MOST_PROMPTS, len(probes)))]


def read_questions(file: Path) -> list[str]:
    """The questions of a file: one a line, or JSON lines with the field `question`. Raises
    `InputError`.
    """
    try:
        lines = [
            line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()
        ]
        if file.suffix == ".jsonl":
            lines = [json.loads(line)["question"] for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"No questions can be read from {file}: {error!r}.") from error
    if not lines or not all(isinstance(line, str) for line in lines):
        raise InputError(
            f"{file} has no questions: give one a line, or JSON lines with the field question."
        )
    return lines


def _of_documents(rag: Rag, k: int) -> Iterator[Probe]:
    passages = rag.index.contents.passages()
    step = max(1, -(-len(passages) // MOST_PROMPTS))
    chosen = passages[::step]
    # of a passage: a small corpus gives several each
    pieces = max(1, -(-MOST_PROMPTS // max(1, len(chosen))))
    for passage in chosen:
        chunk = rag.chunk(passage)
        starts = range(0, max(1, len(chunk) - 2 * NEXT_TOKENS + 1), NEXT_TOKENS)
        for start in starts[:pieces]:
            text = chunk.token_ids[start : start + 2 * NEXT_TOKENS]
            query = (
                rag.engine.tokenizer.decode(list(text[:NEXT_TOKENS]))
                if rag.engine.tokenizer
                else passage.text
            )
            # the best first, of which the passage itself goes
            found = rag.index.search(query, k + 1)
            hits = [hit for hit in found if hit.passage.text != passage.text][:k]
            if len(hits) >= LEAST_CHUNKS:
                yield Probe.of(tuple(rag.chunks_of(rag.in_order(hits))), text)
