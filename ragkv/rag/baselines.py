"""MapReduce and MapRerank: every chunk is read alone (CacheBlend section 7.1, "Baselines").

They avoid the question of fusion: no chunk sees another. So nothing is lost by reuse, and nothing can be joined over
chunks but what the answers or summaries carry.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ragkv.engine import Engine
from ragkv.errors import InputError
from ragkv.types import Chunk

SUMMARY_PROMPT = "Summarise what the text says that helps to answer this question: {question}"


@dataclass(frozen=True, slots=True)
class Mapped:
    """An answer by way of parts."""

    text: str
    parts: tuple[str, ...]  # a summary or an answer a chunk
    first_token_s: float  # from the call to the first token of the answer
    prompt_tokens: int  # read in all prompts together


def map_reduce(
    engine: Engine,
    question: str,
    chunks: Sequence[Chunk],
    summary_prompt: str = SUMMARY_PROMPT,
    summary_tokens: int = 64,
    **how: Any,
) -> Mapped:
    """Have each chunk summarised, then ask over the summaries, all within one prompt. `how` is for `Engine.answer`."""
    began = time.perf_counter()
    asked = summary_prompt.format(question=question)
    summaries = [engine.answer(asked, [chunk], **{**how, "max_new_tokens": summary_tokens}) for chunk in _some(chunks)]
    texts = tuple(summary.text.strip() for summary in summaries)
    mapped_s = time.perf_counter() - began
    answer = engine.answer("\n\n".join((*filter(None, texts), question)), **how)
    tokens = answer.reuse.tokens + sum(summary.reuse.tokens for summary in summaries)
    return Mapped(answer.text, texts, mapped_s + answer.timing.first_token_s, tokens)


def map_rerank(engine: Engine, question: str, chunks: Sequence[Chunk], **how: Any) -> Mapped:
    """Ask each chunk alone and take the surest answer. `how` is for `Engine.answer`.

    Sure is who gives its first token the highest probability, "unknown" only if all say so.
    """
    began, answers, tokens = time.perf_counter(), [], 0
    for chunk in _some(chunks):
        logits = engine.prefill(question, [chunk], **_fusion(how)).logits
        answer = engine.answer(question, [chunk], **how)
        answers.append((float(logits.log_softmax(-1).max()), answer.text))
        tokens += answer.reuse.tokens
    return Mapped(surest(answers), tuple(text for _, text in answers), time.perf_counter() - began, tokens)


def surest(answers: Iterable[tuple[float, str]]) -> str:
    """Of log-probabilities and answers the likeliest answer that is not "unknown", if there is one."""
    listed = list(answers)
    known = [pair for pair in listed if pair[1].strip().lower().strip(".") != "unknown"]
    return max(known or listed)[1]


def _fusion(how: dict[str, Any]) -> dict[str, Any]:
    return {name: how[name] for name in ("ratio", "selector", "reuse") if name in how}


def _some(chunks: Sequence[Chunk]) -> Sequence[Chunk]:
    if not chunks:
        raise InputError("There is no chunk to read; give at least one.")
    return chunks
