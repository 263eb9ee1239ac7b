"""What others do: MapReduce and MapRerank (CacheBlend section 7.1, "Baselines").

MapReduce and MapRerank need no fusion, because no chunk attends to another one. So reuse loses
nothing, but facts of several chunks can only be combined through the summaries or answers.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Unpack, cast

from ragkv.engine import Engine
from ragkv.errors import InputError
from ragkv.prompt import AnswerOptions, PrefillOptions
from ragkv.types import Chunk

SUMMARY_PROMPT = "Summarise what the text says that helps to answer this question: {question}"


@dataclass(frozen=True, slots=True)
class MapResult:
    """An answer that was made from one part for each chunk."""

    text: str
    parts: tuple[str, ...]  # the summary or the answer of each chunk
    first_token_s: float  # from the call to the first token of the answer
    prompt_tokens: int  # of all prompts together


def map_reduce(
    engine: Engine,
    question: str,
    chunks: Sequence[Chunk],
    summary_prompt: str = SUMMARY_PROMPT,
    summary_tokens: int = 64,
    **how: Unpack[AnswerOptions],
) -> MapResult:
    """Summarise each chunk, then ask over all summaries in one prompt. `how` is for
    `Engine.answer`.
    """
    began = time.perf_counter()
    request = summary_prompt.format(question=question)
    limited: AnswerOptions = {**how, "max_new_tokens": summary_tokens}
    summaries = [engine.answer(request, [chunk], **limited) for chunk in _not_empty(chunks)]
    texts = tuple(summary.text.strip() for summary in summaries)
    mapped_s = time.perf_counter() - began
    answer = engine.answer("\n\n".join((*filter(None, texts), question)), **how)
    tokens = answer.reuse.tokens + sum(summary.reuse.tokens for summary in summaries)
    return MapResult(answer.text, texts, mapped_s + answer.timing.first_token_s, tokens)


def map_rerank(
    engine: Engine, question: str, chunks: Sequence[Chunk], **how: Unpack[AnswerOptions]
) -> MapResult:
    """Ask the question of each chunk alone and take the surest answer. `how` is for
    `Engine.answer`.

    The surest answer has the highest probability of its first token. "unknown" wins only if all
    answers are "unknown".
    """
    began = time.perf_counter()
    answers = []
    tokens = 0
    for chunk in _not_empty(chunks):
        logits = engine.prefill(question, [chunk], **_prefill_options(how)).logits
        answer = engine.answer(question, [chunk], **how)
        answers.append((float(logits.log_softmax(-1).max()), answer.text))
        tokens += answer.reuse.tokens
    return MapResult(
        surest(answers), tuple(text for _, text in answers), time.perf_counter() - began, tokens
    )


def surest(answers: Iterable[tuple[float, str]]) -> str:
    """The answer with the highest log-probability that is not "unknown"; "unknown" if there is no
    other.
    """
    pairs = list(answers)
    known = [pair for pair in pairs if pair[1].strip().lower().strip(".") != "unknown"]
    return max(known or pairs)[1]


def _prefill_options(how: AnswerOptions) -> PrefillOptions:
    return cast(
        "PrefillOptions",
        {name: how[name] for name in ("ratio", "selector", "reuse") if name in how},
    )


def _not_empty(chunks: Sequence[Chunk]) -> Sequence[Chunk]:
    if not chunks:
        raise InputError("There is no chunk to read. Give at least one.")
    return chunks
