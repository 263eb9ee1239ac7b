"""Which model is worth asking: right answers, times and memory of each, over the same questions.

    python -m benchmarks.models --data FOLDER --model smollm2 qwen2.5-coder --questions 30
    python -m benchmarks.models --data FOLDER --model smollm2 qwen2.5-coder --timed 3

FOLDER has `xquad.en.json`. The questions are those of `examples/questions.jsonl` that begin a
conversation, and the test half of XQuAD. Each is asked twice over the same four passages: with
everything computed, and with stored KV of each passage. An answer is right if it has the words of
a gold answer. With `--timed` only so many questions of XQuAD are asked, for their times: run it on
a quiet machine. Rows are appended to `--out`; the same command goes on where a killed run stopped.
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks import report, sets
from benchmarks.real import NO_DATA
from benchmarks.real_judge import located
from benchmarks.real_sets import Asked, questions
from benchmarks.rows import Row, Rows, markdown
from ragkv import Answer, Engine, EngineConfig
from ragkv.config import ControllerConfig, PromptConfig
from ragkv.rag import Corpus, Rag

EXAMPLES = Path(__file__).parents[1] / "examples"
SYSTEM = "Use the passages to answer the question in one short sentence."
PASSAGES = 4
ANSWER_TOKENS = 32
PAGE_TOKENS = 650  # of a page of 500 English words


def main() -> None:
    options = _options()
    if options.data is None:
        report.skip(NO_DATA)
    torch.set_num_threads(options.threads)
    rows = Rows(options.out)
    for name in options.model:
        label = {"model": name, "threads": options.threads, "timed": bool(options.timed)}
        known = {row["question"] for row in rows.all if label.items() <= row.items()}
        config = EngineConfig(
            prompt=PromptConfig(system=SYSTEM),
            controller=ControllerConfig(measure=False),
            weights=options.weights,
        )
        with (
            tempfile.TemporaryDirectory() as folder,
            Engine.from_pretrained(located(name), config) as engine,
            Rag(Corpus(engine, Path(folder), chunk_tokens=256)) as rag,
        ):
            for one in _asked(rag, options):
                if one.key not in known:
                    rows.add([{**label, **_answered(engine, one)}])
    _show(rows.all, options)


def _asked(rag: Rag, options: argparse.Namespace) -> Iterator[Asked]:
    """The demo's questions over what retrieval finds, then those of XQuAD."""
    if not options.timed:
        rag.corpus.ingest(EXAMPLES / "corpus", encode=False)
        for line in (EXAMPLES / "questions.jsonl").read_text("utf-8").splitlines():
            asked = json.loads(line)
            if "before" not in asked:
                hits = rag.retrieve(asked["question"], k=PASSAGES)
                passages = tuple(hit.passage.text for hit in hits)
                yield Asked(
                    f"demo: {asked['question']}",
                    passages,
                    asked["question"],
                    tuple(asked["answers"]),
                )
    count = options.timed or options.questions
    for one in questions("xquad", options.data, "test", count):
        yield Asked(one.key, _with_the_answer(one), one.question, one.golds)


def _with_the_answer(asked: Asked) -> tuple[str, ...]:
    """Four of a question's passages; the last one has a gold answer."""
    right = next(text for text in asked.passages if any(gold in text for gold in asked.golds))
    others = [text for text in asked.passages if text != right]
    return (*others[: PASSAGES - 1], right)


def _answered(engine: Engine, asked: Asked) -> Row:
    """A question in full and from stored KV, with the seconds that its KV took."""
    chunks = [engine.chunk(text) for text in asked.passages]
    row: Row = {"question": asked.key, "chunk_tokens": sum(len(one.token_ids) for one in chunks)}
    for way in ("full", "warm"):
        began = time.perf_counter()
        if way == "warm":
            engine.entries.encode(chunks)
            engine.flush()
            row["encode_s"] = time.perf_counter() - began
        answer = engine.answer(
            asked.question,
            chunks,
            reuse="none" if way == "full" else "fused",
            max_new_tokens=ANSWER_TOKENS,
        )
        row[way] = _said(answer, asked)
    engine.entries.delete(chunks)
    stats = engine.stats()
    row["dtype"] = stats.dtype
    row["kv_bytes"] = stats.kv_bytes_per_token
    row["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return row


def _said(answer: Answer, asked: Asked) -> Row:
    text = answer.text.lower()
    tokens = len(answer.token_ids)
    return {
        "right": any(gold.lower() in text for gold in asked.golds),
        "text": answer.text,
        "prompt": answer.reuse.tokens,
        "first_s": answer.timing.first_token_s,
        "token_s": answer.timing.decode_s / (tokens - 1) if tokens > 1 else None,
    }


def _show(rows: Sequence[Row], options: argparse.Namespace) -> None:
    found = []
    for name in options.model:
        own = [row for row in rows if row["model"] == name and row["threads"] == options.threads]
        judged = [row for row in own if not row["timed"]]
        timed = [row for row in own if row["timed"]] or own
        cells = [name, own[-1]["dtype"]] if own else [name, ""]
        for demo in (True, False):
            group = [row for row in judged if row["question"].startswith("demo") == demo]
            for way in ("full", "warm"):
                cells.append(f"{sum(row[way]['right'] for row in group)} of {len(group)}")
        if timed:
            cells += [
                f"{len(timed)}",
                f"{statistics.median(row['full']['prompt'] for row in timed):.0f}",
                f"{statistics.median(row['full']['first_s'] for row in timed):.2f}",
                f"{statistics.median(row['warm']['first_s'] for row in timed):.2f}",
                f"{1 / statistics.median(_token_seconds(timed)):.1f}",
                f"{PAGE_TOKENS * statistics.median(_encode_seconds(timed)):.1f}",
                f"{max(row['peak_bytes'] for row in timed) / 1e9:.1f}",
            ]
        found.append(cells)
    heads = (
        *("model", "dtype", "demo: full", "warm", "XQuAD: full", "warm", "timed", "prompt tokens"),
        *("first token full, s", "warm, s", "tokens/s", "KV of a page, s", "memory, GB"),
    )
    print(markdown(heads, found))


def _token_seconds(rows: Sequence[Row]) -> list[float]:
    return [row[way]["token_s"] for row in rows for way in ("full", "warm") if row[way]["token_s"]]


def _encode_seconds(rows: Sequence[Row]) -> list[float]:
    """Seconds of KV a token."""
    return [row["encode_s"] / row["chunk_tokens"] for row in rows]


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, "two questions", threads=1)
    parser.add_argument(
        "--data", type=Path, default=sets.questions(), help="the folder with xquad.en.json"
    )
    parser.add_argument("--model", nargs="+", default=["smollm2"])
    parser.add_argument("--weights", default="plain", choices=["plain", "int8"])
    parser.add_argument("--questions", type=int, default=30, help="of XQuAD")
    parser.add_argument("--timed", type=int, default=0, help="questions of XQuAD, for times alone")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "models.jsonl")
    options = parser.parse_args()
    if options.quick:
        options.questions = 2
    return options


if __name__ == "__main__":
    main()
