"""The demo: ingests the example corpus and answers its questions four ways, all measured in the same run.

Cold is a question whose chunks have no stored entries: their KV is computed during the request and stored afterwards.
Warm is the same question again. Full recompute and exact-prefix reuse are the same engine with one setting changed.
"""

import json
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragkv.config import ReuseMode
from ragkv.errors import InputError
from ragkv.types import Answer, Chunk, Reuse

from . import output
from .options import EngineOptions
from .output import console

if TYPE_CHECKING:
    from ragkv.retrieval.rag import Rag

# The examples lie here in an installation, and there in a checkout.
_EXAMPLES = (Path(__file__).parents[1] / "examples", Path(__file__).parents[2] / "examples")
_NEW_TOKENS = 24
_PASSAGES = 12  # Each question gets so many passages: the whole example corpus.


@dataclass(frozen=True, slots=True)
class Result:
    """The answers to one question of the demo: "full", "prefix", "cold" and "warm"."""

    kind: str
    before: tuple[str, ...]  # earlier questions of the conversation
    question: str
    gold: str
    answer: str  # warm and fused
    sources: tuple[str, ...]  # of it
    reuse: Reuse  # of it
    right: dict[str, bool]  # by the way of answering
    ttft_s: dict[str, float]  # the same; medians


def run(model: str, repeats: int, count: int | None, as_json: bool) -> None:
    """Run the demo with the first `count` questions (`None`: all) and print it."""
    examples = next((folder for folder in _EXAMPLES if (folder / "questions.jsonl").is_file()), None)
    if examples is None:
        raise InputError("The example corpus is not part of this installation. Run the demo in a checkout.")
    lines = (examples / "questions.jsonl").read_text("utf-8").splitlines()
    questions = [json.loads(line) for line in lines if line][:count]
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragkv-demo-")))
        rag = stack.enter_context(EngineOptions(home, model).rag())
        show: Callable[[str], None] = (lambda _: None) if as_json else console.print
        show(_ingest(rag, examples / "corpus"))
        results = []
        with output.progress("answering the questions four ways") as on_question:
            for number, question in enumerate(questions, 1):
                results.append(_ask(rag, question, repeats))
                show(_describe(results[-1]))
                on_question(number, len(questions))
        summary = _summary(results)
        show(_describe_summary(summary, model))
    if as_json:
        output.print_json({"questions": results, "summary": summary})


def _ingest(rag: "Rag", corpus: Path) -> str:
    with output.progress("encoding KV") as on_encode:
        report = rag.ingest(corpus, on_encode=on_encode)
    stats = rag.engine.stats()
    disk = stats.store.tiers[-1]
    return (
        f"Ingested {len(rag.index.document_ids())} documents: {report.kv.encoded} chunks encoded, "
        f"{disk.entries} entries of {output.size(disk.used_bytes or 0)} on disk "
        f"({output.size(stats.kv_bytes_per_token)} per token, {stats.architecture}, {stats.layers} layers).\n"
    )


def _ask(rag: "Rag", question: dict[str, Any], repeats: int) -> Result:
    gold, before = question["answer"], [turn[0] for turn in question.get("history", [])]
    turns = [*before, question["question"]]
    chunks = [rag.chunk(hit.passage) for hit in rag.retrieve(turns[0], k=_PASSAGES, order="document")]
    rag.engine.delete(chunks)
    cold = _timed(rag, turns, chunks, "fused", 1)
    rag.engine.flush()
    warm = _timed(rag, turns, chunks, "fused", repeats)
    full, prefix = (_timed(rag, turns, chunks, reuse, repeats) for reuse in ("none", "prefix"))
    found = {"full": full, "prefix": prefix, "cold": cold, "warm": warm}
    answer, _ = warm
    return Result(
        kind=question["type"],
        before=tuple(before),
        question=question["question"],
        gold=gold,
        answer=answer.text.strip(),
        sources=tuple(sorted({Path(citation.source).name for citation in answer.citations})),
        reuse=answer.reuse,
        right={way: _same(answer.text, gold) for way, (answer, _) in found.items()},
        ttft_s={way: seconds for way, (_, seconds) in found.items()},
    )


def _timed(rag: "Rag", turns: list[str], chunks: list[Chunk], reuse: ReuseMode, repeats: int) -> tuple[Answer, float]:
    """The answer to the last turn, and its median TTFT. The chunks are given with the first turn."""
    answers = []
    for _ in range(repeats):
        session = rag.engine.session("demo") if len(turns) > 1 else None
        for number, turn in enumerate(turns):
            given = chunks if number == 0 else []
            answer = rag.engine.answer(turn, given, session, reuse=reuse, max_new_tokens=_NEW_TOKENS)
        answers.append(answer)
        if session is not None:
            session.delete()
    return answers[-1], statistics.median(answer.timing.first_token_s for answer in answers)


def _same(answer: str, gold: str) -> bool:
    return " ".join(answer.lower().split()).strip(" .") == " ".join(gold.lower().split()).strip(" .")


def _describe(result: Result) -> str:
    """One question. Of a follow-up the question before it is not timed; its history counts as exact tokens."""
    correctness = "right" if result.right["warm"] else f"WRONG, gold: {result.gold}"
    question, indent, times = " ... ".join((*result.before, result.question)), " " * 12, result.ttft_s
    return (
        f"{result.kind:>10}  {question}\n"
        f"{indent}{result.answer}  ({correctness})  sources: {', '.join(result.sources) or 'none word for word'}\n"
        f"{indent}first token: {output.times(times)} = {times['full'] / times['warm']:.1f}x\n"
        f"{indent}{result.reuse.tokens} tokens: {output.counts(result.reuse)}\n"
    )


def _summary(results: list[Result]) -> dict[str, Any]:
    single = [one.ttft_s for one in results if not one.before]  # a conversation's history is computed in each run
    medians = {way: statistics.median(times[way] for times in single) for way in single[0]}
    return {
        "questions": len(results),
        "right": {way: sum(one.right[way] for one in results) for way in results[0].right},
        "ttft_median_s": medians,
        "speedup": medians["full"] / medians["warm"],
    }


def _describe_summary(summary: dict[str, Any], model: str) -> str:
    right = summary["right"]
    return (
        f"{right['warm']} of {summary['questions']} right from fused entries, {right['cold']} cold, "
        f"{right['full']} by full recompute (model: {model}).\n"
        f"Median first token: {output.times(summary['ttft_median_s'])}: warm {summary['speedup']:.1f}x as fast as full."
    )
