"""The demo: a real model answers questions over the example articles, each four ways, all measured
in the same run.

All four are the same engine, and each begins where its users would:

- full: everything is computed;
- prefix: exact reuse. An earlier question began with the same passage, and had others behind it;
- cold: fused, but no passage has stored KV yet; it is stored after the answer;
- warm: fused, with stored KV of each passage, in an order that was never asked.

The last question continues a conversation, so that its history is reused too.
"""

import difflib
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.cli import output
from ragkv.cli.options import EngineOptions
from ragkv.cli.output import console
from ragkv.config import ReuseMode
from ragkv.errors import InputError, RagKVError
from ragkv.runtime import examples
from ragkv.types import Answer, Chunk

if TYPE_CHECKING:
    from ragkv.rag import Rag

_NEW_TOKENS = 32
# `_PASSAGES` of `_CHUNK_TOKENS` are read as well as passages of 128 tokens, which homes of smollm2
# have (docs/research/log.md). But prompts of 400 tokens cost so small a model no more than fusing
# them.
_PASSAGES = 4
_CHUNK_TOKENS = 256
_WAYS: dict[str, ReuseMode] = {"full": "none", "prefix": "prefix", "cold": "fused", "warm": "fused"}

Answers = dict[str, Answer]  # the answers to one question, by way


def run(
    model: Annotated[
        str, typer.Option(help="A name, a folder, a GGUF file or a hub id.")
    ] = "smollm2",
    count: Annotated[
        int | None, typer.Option("--questions", min=1, help="Only so many of the questions.")
    ] = None,
) -> None:
    """Answer questions over the example articles four ways: full, exact prefix, fused cold, fused
    warm.
    """
    if (folder := examples()) is None:
        raise InputError(
            "The example corpus is not part of this installation. Run the demo in a checkout."
        )
    lines = (folder / "questions.jsonl").read_text("utf-8").splitlines()
    questions = [json.loads(line) for line in lines if line][:count]
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ragkv-demo-")))
        rag = _opened(home, model, stack)
        documents = rag.corpus.ingest(folder / "corpus", encode=False).index.added
        stats = rag.engine.stats()
        console.print(
            f"{len(documents)} articles, {rag.index.contents.stats().passages} passages. KV: "
            f"{output.size(stats.kv_bytes_per_token)} per token ({model}, {stats.layers} layers, "
            f"{stats.dtype}).\n"
            f"{'':8}first token    answer\n"
        )
        answered: list[Answers] = []
        with output.progress("answering the questions four ways") as on_question:
            for number, question in enumerate(questions, 1):
                answered.append(_ask(rag, question))
                on_question(number, len(questions))
    console.print(_summary(questions, answered))


def _opened(home: Path, model: str, stack: ExitStack) -> "Rag":
    """An empty corpus in `home`, without an embedder, which the demo's questions do not need."""
    with output.working("loading the model"), output.quiet("ragkv.retrieval"):
        from ragkv.engine import Engine
        from ragkv.model.loading import quiet_transformers
        from ragkv.rag import Corpus, Rag

        quiet_transformers()
        engine = stack.enter_context(
            Engine.from_pretrained(model, EngineOptions(home, model).config())
        )
        return stack.enter_context(Rag(Corpus(engine, home / "index", chunk_tokens=_CHUNK_TOKENS)))


def _ask(rag: "Rag", question: dict[str, Any]) -> Answers:
    """Answer one question and print it; of a follow-up, the questions before it are not timed."""
    turns = (*question.get("before", ()), question["question"])
    hits = rag.retrieve(turns[0], k=_PASSAGES)
    chunks = rag.chunks_of(hits)
    console.print(" ... ".join(turns))
    answers: Answers = {}
    for way, reuse in _WAYS.items():
        _prepare(rag, way, chunks)
        answer = answers[way] = _answer(rag, turns, chunks, reuse)
        rag.engine.flush()
        text = " ".join(answer.text.split())
        shown = text if way == "full" or answer.text != answers["full"].text else "(the same)"
        times = (
            f"{output.milliseconds(answer.timing.first_token_s):>11} "
            f"{output.milliseconds(_whole_s(answer)):>9}"
        )
        console.print(
            f"  {way:6} {times}  {'right' if _is_right(question, answer) else 'WRONG'}  {shown}"
        )
    sources = dict.fromkeys(Path(hit.passage.source).name for hit in hits)
    reuse_ = answers["warm"].reuse
    console.print(
        f"  warm: {reuse_.tokens} tokens, {output.counts(reuse_)}; {', '.join(sources)}\n"
    )
    return answers


def _prepare(rag: "Rag", way: str, chunks: list[Chunk]) -> None:
    """Store what each way begins with, and nothing else."""
    rag.engine.entries.delete(chunks)
    if way == "prefix":
        rag.engine.prefill("What is this about?", [chunks[0], *chunks[:0:-1]], reuse="prefix")
    elif way == "warm":
        rag.engine.entries.encode(chunks)


def _answer(rag: "Rag", turns: Sequence[str], chunks: list[Chunk], reuse: ReuseMode) -> Answer:
    """The answer to the last turn. The chunks are given with the first one."""
    session = rag.engine.session("demo") if len(turns) > 1 else None
    for number, turn in enumerate(turns):
        given = chunks if number == 0 else []
        answer = rag.engine.answer(turn, given, session, reuse=reuse, max_new_tokens=_NEW_TOKENS)
    if session is not None:
        session.delete()
    return answer


def _summary(questions: Sequence[dict[str, Any]], answered: Sequence[Answers]) -> str:
    """The last lines. Times are medians of the questions without a conversation."""
    asked = list(zip(questions, answered, strict=True))
    alone = [answers for question, answers in asked if "before" not in question]

    def by_way(figure: Callable[[str], float]) -> dict[str, float]:
        return {way: figure(way) for way in _WAYS}

    right = by_way(
        lambda way: sum(_is_right(question, answers[way]) for question, answers in asked)
    )
    same = by_way(
        lambda way: statistics.mean(_alike(one[way].text, one["full"].text) for one in answered)
    )
    whole = by_way(lambda way: statistics.median(_whole_s(answers[way]) for answers in alone))
    first = by_way(
        lambda way: statistics.median(answers[way].timing.first_token_s for answers in alone)
    )
    counted = [
        " · ".join(f"{way} {value:.3g}" for way, value in figures.items())
        for figures in (right, same)
    ]
    return (
        f"Right, of {len(asked)} questions: {counted[0]}.\n"
        f"Words as by full recompute (mean ratio): {counted[1]}.\n"
        f"Median whole answer: {_times(whole)}.\n"
        f"Median first token: {_times(first)}: warm {first['full'] / first['warm']:.1f}x as fast "
        "as full."
    )


def _times(seconds: dict[str, float]) -> str:
    """The times of the four ways, in one line."""
    return " · ".join(f"{way} {output.milliseconds(value)}" for way, value in seconds.items())


def _alike(one: str, other: str) -> float:
    """The share of the words of two texts that both have, in the same order."""
    return difflib.SequenceMatcher(None, one.split(), other.split(), autojunk=False).ratio()


def _is_right(question: dict[str, Any], answer: Answer) -> bool:
    """Whether an answer holds one of the expected words."""
    return any(word.lower() in answer.text.lower() for word in question["answers"])


def _whole_s(answer: Answer) -> float:
    """Seconds to the last token."""
    return answer.timing.first_token_s + answer.timing.decode_s


if __name__ == "__main__":
    try:
        typer.run(run)
    except RagKVError as error:
        output.print_error(error)
        sys.exit(1)
