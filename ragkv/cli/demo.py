"""The demo: the example corpus ingested, its questions answered four ways, every time measured in the same run.

Cold is a question whose chunks have no entries yet: they are computed in place and encoded afterwards. Warm is the same
question again. Full recompute and exact-prefix reuse are the same engine with one setting changed.
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
from ragkv.types import Answer, Chunk

from . import output
from .output import console
from .workplace import Workplace

if TYPE_CHECKING:
    from ragkv.rag import Rag

_PLACES = (Path(__file__).parents[1] / "examples", Path(__file__).parents[2] / "examples")  # installed; a checkout
_NEW_TOKENS = 24
_SHAPE_RUNS = 2
_K = 12  # passages a question: the whole example world


@dataclass(frozen=True, slots=True)
class Asked:
    """One question of the demo and what came of it."""

    kind: str
    before: tuple[str, ...]  # earlier questions of the conversation
    question: str
    gold: str
    answer: str  # warm and fused
    right: bool
    sources: tuple[str, ...]
    full_s: float  # TTFT, full recompute
    prefix_s: float  # TTFT, exact-prefix reuse
    cold_s: float  # TTFT, fused, entries missing
    warm_s: float  # TTFT, fused, entries there
    full_right: bool
    cold_right: bool
    reuse: Any  # of the warm answer


def run(model: str, home: Path | None, repeats: int, shape: str | None, as_json: bool) -> None:
    """Run the demo and print it."""
    examples = next((place for place in _PLACES if (place / "questions.jsonl").is_file()), None)
    if examples is None:
        raise InputError("The example corpus is not part of this installation; run the demo in a checkout.")
    questions = [json.loads(line) for line in (examples / "questions.jsonl").read_text("utf-8").splitlines() if line]
    with ExitStack() as stack:
        if home is None:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragkv-demo-")))
        rag = stack.enter_context(Workplace(home, model, None, None, None, exact_history=True).rag())
        say: Callable[[str], None] = (lambda _: None) if as_json else console.print
        say(_ingest(rag, examples / "corpus"))
        results = []
        for asked in questions:
            results.append(_ask(rag, asked, repeats))
            say(_lines(results[-1]))
        summary = _summary(results)
        say(_closing(summary, model))
    timed = _time_shape(shape, say) if shape else None
    if as_json:
        output.print_json({"questions": results, "summary": summary, "shape": timed})


def _ingest(rag: "Rag", corpus: Path) -> str:
    from ragkv.retrieval import load_documents

    with output.progress("encoding KV") as on_encode:
        done = rag.ingest(load_documents(corpus), on_encode=on_encode)
    stats = rag.engine.stats()
    disk = stats.store.tiers[-1]
    return (
        f"Ingested {len(rag.index.document_ids())} documents: {done.kv.encoded} chunks encoded, "
        f"{disk.entries} entries of {output.size(disk.used_bytes)} on disk "
        f"({output.size(stats.kv_bytes_per_token)} per token, {stats.architecture}, {stats.layers} layers).\n"
    )


def _ask(rag: "Rag", asked: dict[str, Any], repeats: int) -> Asked:
    gold, before = asked["answer"], [turn[0] for turn in asked.get("history", [])]
    turns = [*before, asked["question"]]
    hits = rag.retrieve(turns[0], k=_K, order="document")
    chunks = [rag.chunk(hit.passage) for hit in hits]
    rag.engine.delete(chunks)
    cold = _timed(rag, turns, chunks, "fused", 1)
    rag.engine.flush()
    warm, full = (_timed(rag, turns, chunks, mode, repeats) for mode in ("fused", "none"))
    prefix = _timed(rag, turns, chunks, "prefix", repeats)
    cited = sorted({Path(citation.source).name for citation in warm[0].citations})
    return Asked(
        kind=asked["type"],
        before=tuple(before),
        question=asked["question"],
        gold=gold,
        answer=warm[0].text.strip(),
        right=_same(warm[0].text, gold),
        sources=tuple(cited),
        full_s=full[1],
        prefix_s=prefix[1],
        cold_s=cold[1],
        warm_s=warm[1],
        full_right=_same(full[0].text, gold),
        cold_right=_same(cold[0].text, gold),
        reuse=warm[0].reuse,
    )


def _timed(rag: "Rag", turns: list[str], chunks: list[Chunk], reuse: ReuseMode, repeats: int) -> tuple[Answer, float]:
    """The last turn's answer and median TTFT; the chunks are given with the first turn."""
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


def _time_shape(shape: str, say: Callable[[str], None]) -> dict[str, float]:
    """TTFT of a real architecture's shape, six chunks of 512 tokens; random weights, so no answers."""
    import torch

    from ragkv.engine import Engine
    from ragkv.model.shapes import random_model

    say(f"\nThe same at a real size: {shape}, random weights (they do not change time), 6 chunks of 512 tokens + 32.")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 30_000, (6 * 512 + 32,), generator=generator).tolist()
    chunks, question = [ids[at : at + 512] for at in range(0, 6 * 512, 512)], ids[6 * 512 :]
    ways: dict[str, dict[str, Any]] = {
        "full": {"reuse": "none"},
        "prefix": {"reuse": "prefix"},
        "warm": {},
        "reuse alone": {"ratio": 0.0},
    }
    with Engine(random_model(shape)) as engine, output.progress("encoding KV") as on_encode:
        engine.warm(chunks, on_encode)
        times = {
            name: statistics.median(
                engine.prefill(question, chunks, **how).timing.first_token_s for _ in range(_SHAPE_RUNS)
            )
            for name, how in ways.items()
        }
    say(
        f"First token: full {output.milliseconds(times['full'])}, exact prefix {output.milliseconds(times['prefix'])}, "
        f"warm {output.milliseconds(times['warm'])} = {times['full'] / times['warm']:.1f}x, nothing recomputed "
        f"{output.milliseconds(times['reuse alone'])} = {times['full'] / times['reuse alone']:.1f}x."
    )
    return times


def _same(answer: str, gold: str) -> bool:
    return " ".join(answer.lower().split()).strip(" .") == " ".join(gold.lower().split()).strip(" .")


def _lines(asked: Asked) -> str:
    verdict = "right" if asked.right else f"WRONG, gold: {asked.gold}"
    times = " · ".join(
        f"{name} {output.milliseconds(seconds)}"
        for name, seconds in (
            ("full", asked.full_s),
            ("prefix", asked.prefix_s),
            ("cold", asked.cold_s),
            ("warm", asked.warm_s),
        )
    )
    question = " ... ".join((*asked.before, asked.question))
    return (
        f"{asked.kind:>10}  {question}\n"
        f"            {asked.answer}  ({verdict})  sources: {', '.join(asked.sources) or 'none word for word'}\n"
        f"            first token: {times} = {asked.full_s / asked.warm_s:.1f}x\n"
        f"            {asked.reuse.tokens} tokens: {output.counts(asked.reuse)}\n"
    )


def _summary(results: list[Asked]) -> dict[str, Any]:
    single = [asked for asked in results if not asked.before]  # history is computed every turn, not yet stored

    def median(name: str) -> float:
        return float(statistics.median(getattr(asked, name) for asked in single))

    return {
        "questions": len(results),
        "right_warm": sum(asked.right for asked in results),
        "right_cold": sum(asked.cold_right for asked in results),
        "right_full": sum(asked.full_right for asked in results),
        "ttft_median_s": {name: median(f"{name}_s") for name in ("full", "prefix", "cold", "warm")},
        "speedup_median": statistics.median(asked.full_s / asked.warm_s for asked in single),
    }


def _closing(summary: dict[str, Any], model: str) -> str:
    total, times = summary["questions"], summary["ttft_median_s"]
    return (
        f"{summary['right_warm']} of {total} right from fused entries, {summary['right_cold']} cold, "
        f"{summary['right_full']} by full recompute (model: {model}).\n"
        f"Median first token: full {output.milliseconds(times['full'])}, exact prefix "
        f"{output.milliseconds(times['prefix'])}, cold {output.milliseconds(times['cold'])}, warm "
        f"{output.milliseconds(times['warm'])}: {summary['speedup_median']:.1f}x faster than full, measured here now."
    )
