"""The demo: a real model answers questions over the example articles, each four ways, all measured in the same run.

Full recompute and exact-prefix reuse are the same engine with one setting changed. Cold is a question whose passages
have no stored KV: it is computed during the request and stored afterwards. Warm is the same question again. The last
question continues a conversation, so that its history is reused too.
"""

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragkv.config import PromptConfig, ReuseMode
from ragkv.errors import InputError
from ragkv.runtime import examples
from ragkv.types import Answer, Chunk, Reuse

from . import output
from .options import EngineOptions
from .output import console

if TYPE_CHECKING:
    from ragkv.retrieval.rag import Rag

_NEW_TOKENS = 40
_PASSAGES, _CHUNK_TOKENS = 4, 128  # A small model reads few and short passages best, and needs a plain instruction:
_SYSTEM = "Use the passages to answer the question in one short sentence."
_COUNTED = ("right", "same_words")  # The summary gives these in a line each.
_WAYS: dict[str, ReuseMode] = {"full": "none", "prefix": "prefix", "cold": "fused", "warm": "fused"}


@dataclass(frozen=True, slots=True)
class Way:
    """One answer to a question: what it says, and how long it took."""

    text: str
    right: bool  # it holds the expected word
    same_words: float  # token F1 against the answer by full recompute; 1.0 if it says the same
    first_token_s: float
    answer_s: float  # to the last token


@dataclass(frozen=True, slots=True)
class Result:
    """A question of the demo and its answers: "full", "prefix", "cold" and "warm"."""

    turns: tuple[str, ...]  # the question, behind earlier ones of its conversation
    ways: dict[str, Way]
    reuse: Reuse  # of the warm answer
    sources: tuple[str, ...]  # documents of its passages


def run(model: str, count: int | None, as_json: bool) -> None:
    """Run the demo with the first `count` questions (`None`: all) and print it."""
    if (folder := examples()) is None:
        raise InputError("The example corpus is not part of this installation. Run the demo in a checkout.")
    lines = (folder / "questions.jsonl").read_text("utf-8").splitlines()
    questions = [json.loads(line) for line in lines if line][:count]
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragkv-demo-")))
        rag = _opened(home, model, stack)
        show: Callable[[str], None] = (lambda _: None) if as_json else console.print
        documents = rag.ingest(folder / "corpus", encode=False).index.added
        stats = rag.engine.stats()
        show(
            f"{len(documents)} articles, {rag.index.stats().passages} passages. KV: "
            f"{output.size(stats.kv_bytes_per_token)} per token ({model}, {stats.layers} layers, {stats.dtype}).\n"
            f"{'':8}first token    answer\n"
        )
        results = []
        with output.progress("answering the questions four ways") as on_question:
            for number, question in enumerate(questions, 1):
                results.append(_ask(rag, question))
                show(_describe(results[-1]))
                on_question(number, len(questions))
        summary = _summary(results)
        show(_describe_summary(summary))
    if as_json:
        output.print_json({"questions": results, "summary": summary})


def _opened(home: Path, model: str, stack: ExitStack) -> "Rag":
    """An empty corpus in `home`, without an embedder, which the demo's questions do not need."""
    with output.working("loading the model"), output.quiet("ragkv.retrieval"):
        from ragkv.engine import Engine
        from ragkv.model.loading import quiet_transformers
        from ragkv.retrieval.rag import Rag

        quiet_transformers()
        config = replace(EngineOptions(home, model).config(), prompt=PromptConfig(system=_SYSTEM))
        engine = stack.enter_context(Engine.from_pretrained(model, config))
        return stack.enter_context(Rag(engine, home / "index", chunk_tokens=_CHUNK_TOKENS))


def _ask(rag: "Rag", question: dict[str, Any]) -> Result:
    from ragkv.lab.metrics import token_f1

    turns = (*question.get("before", ()), question["question"])
    hits = rag.retrieve(turns[0], k=_PASSAGES)
    chunks = [rag.chunk(hit.passage) for hit in hits]
    rag.engine.delete(chunks)  # an earlier question may have stored them
    answers = {}
    for way, reuse in _WAYS.items():
        answers[way] = _answer(rag, turns, chunks, reuse)
        rag.engine.flush()
    ways = {
        way: Way(
            text=" ".join(answer.text.split()),
            right=any(word.lower() in answer.text.lower() for word in question["answers"]),
            same_words=token_f1(answer.text, answers["full"].text),
            first_token_s=answer.timing.first_token_s,
            answer_s=answer.timing.first_token_s + answer.timing.decode_s,
        )
        for way, answer in answers.items()
    }
    sources = dict.fromkeys(Path(hit.passage.source).name for hit in hits)
    return Result(turns, ways, answers["warm"].reuse, tuple(sources))


def _answer(rag: "Rag", turns: Sequence[str], chunks: list[Chunk], reuse: ReuseMode) -> Answer:
    """The answer to the last turn. The chunks are given with the first one."""
    session = rag.engine.session("demo") if len(turns) > 1 else None
    for number, turn in enumerate(turns):
        given = chunks if number == 0 else []
        answer = rag.engine.answer(turn, given, session, reuse=reuse, max_new_tokens=_NEW_TOKENS)
    if session is not None:
        session.delete()
    return answer


def _describe(result: Result) -> str:
    """One question; of a follow-up, the questions before it are not timed."""
    lines = [" ... ".join(result.turns)]
    for way, one in result.ways.items():
        shown = one.text if way == "full" or one.same_words < 1.0 else "(the same)"
        times = f"{output.milliseconds(one.first_token_s):>11} {output.milliseconds(one.answer_s):>9}"
        lines.append(f"  {way:6} {times}  {'right' if one.right else 'WRONG'}  {shown}")
    lines.append(f"  warm: {result.reuse.tokens} tokens, {output.counts(result.reuse)}; {', '.join(result.sources)}\n")
    return "\n".join(lines)


def _summary(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Each figure by way. Times are medians of questions without a conversation."""
    columns = {way: [one.ways[way] for one in results] for way in _WAYS}
    timed = {way: [one.ways[way] for one in results if len(one.turns) == 1] for way in _WAYS}
    return {
        "questions": {way: len(column) for way, column in columns.items()},
        "right": {way: sum(one.right for one in column) for way, column in columns.items()},
        "same_words": {way: statistics.mean(one.same_words for one in column) for way, column in columns.items()},
        "answer_median_s": {way: statistics.median(one.answer_s for one in column) for way, column in timed.items()},
        "ttft_median_s": {way: statistics.median(one.first_token_s for one in column) for way, column in timed.items()},
    }


def _describe_summary(summary: dict[str, dict[str, float]]) -> str:
    right, same = (" · ".join(f"{way} {value:.3g}" for way, value in summary[name].items()) for name in _COUNTED)
    first = summary["ttft_median_s"]
    return (
        f"Right, of {summary['questions']['full']} questions: {right}. Words as by full recompute (mean F1): {same}.\n"
        f"Median whole answer: {output.times(summary['answer_median_s'])}.\n"
        f"Median first token: {output.times(first)}: warm {first['full'] / first['warm']:.1f}x as fast as full."
    )
