"""Quality end to end on harder worlds: retrieve, fuse, answer, with the retriever's misses told apart.

    python -m benchmarks.harder --model runs/harder/export
    python -m benchmarks.harder --model runs/harder/export --quick

Questions about dates that decide, lists, counts, three hops, tables as text and namesakes (`training/harder.py`), on
corpora of several worlds whose documents are shuffled. BM25 retrieves `--k` chunks for each question, so all other
chunks of a prompt are what a real retriever takes for related. Chunks are encoded document by document, and stand in a
prompt in the order of the corpus. The bundled reader never read such worlds; `training.train --start` makes a reader
that did.

"found" is the share of questions all of whose supporting chunks were retrieved. A miss is the retriever's fault, so the
columns of types, "EM" and "gap closed" are with misses mended: supporting chunks take the place of the worst hits. "end
to end" is the exact match with what was retrieved. "compute" is row-layers beyond full reuse over those of recomputing
all fused tokens. Intervals are 95 % bootstraps over questions and ignore that some share a world. Scores, learned or
not, are made behind the chunk's own document.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks import lens, quality, report
from benchmarks.quality_data import Context, Question
from benchmarks.quality_run import Method
from ragkv import Engine, EngineConfig
from ragkv.retrieval import Document, Index, Splitter
from training import questions as training_questions
from training.harder import TYPES, Corpus, corpus

FIRST_SEED = 8_800_000_000_000  # far from the seeds of training and of other benchmarks


@dataclass(frozen=True)
class Asked:
    """A question behind the chunks that were retrieved for it, and behind the same with misses mended."""

    retrieved: Context
    mended: Context

    @property
    def found(self) -> bool:
        """Whether all supporting chunks were retrieved."""
        return self.retrieved == self.mended


def main() -> None:
    options = _options()
    began = time.perf_counter()
    outcomes = quality.joined(report.over_processes(_part, options))
    asked = _asked(options)
    results = summarized(asked, outcomes)
    _print(results)
    name = f"harder-{options.tag or Path(options.model).name}{'-quick' if options.quick else ''}"
    print("written:", report.save(name, results), f"{time.perf_counter() - began:.0f} s")


def retrieved(made: Corpus, k: int) -> list[Asked]:
    """Every question of a corpus with its `k` best chunks, in the order of the corpus."""
    with Index(None, splitter=Splitter(len, 10_000)) as index:
        index.ingest(Document(str(number), chunk) for number, chunk in enumerate(made.chunks))
        asked = []
        for question in made.questions:
            hits = [int(hit.passage.document_id) for hit in index.search(question.question, k)]
            missed = [number for number in question.support if number not in hits]
            others = [number for number in hits if number not in question.support]
            dropped = others[max(0, len(others) - len(missed)) :]
            kept = [number for number in hits if number not in dropped]
            asked.append(Asked(_context(made, question, hits), _context(made, question, [*kept, *missed])))
    return asked


def _context(made: Corpus, question: training_questions.Question, numbers: Iterable[int]) -> Context:
    own = Question(question.type, question.question, (question.answer,), guess=question.guess)
    return Context(tuple(made.chunks[number] for number in sorted(numbers)), (own,))


def _asked(options: argparse.Namespace) -> list[Asked]:
    """At most `--each` questions of a type, from all corpora, in random order."""
    random, by_type = Random(options.seed), defaultdict[str, list[Asked]](list)
    for made in _corpora(options):
        for one in retrieved(made, options.k):
            by_type[one.mended.questions[0].type].append(one)
    return [one for kind in TYPES for one in random.sample(by_type[kind], min(options.each, len(by_type[kind])))]


def _corpora(options: argparse.Namespace) -> list[Corpus]:
    first = FIRST_SEED + options.seed * 1000
    return [corpus(first + number, options.worlds, "heldout") for number in range(options.corpora)]


def _part(options: argparse.Namespace, part: int) -> quality.Outcomes:
    """One process's share of the questions."""
    torch.set_num_threads(options.threads)
    asked = _asked(options)
    contexts = {2 * number: one.mended for number, one in enumerate(asked)}
    contexts |= {2 * number + 1: one.retrieved for number, one in enumerate(asked) if not one.found}
    own = dict(list(contexts.items())[part :: options.workers])
    with Engine.from_pretrained(options.model, EngineConfig(dtype="float32")) as engine:
        for made in _corpora(options):
            for document in made.documents:
                chunks = [engine.chunk(text) for text in document]
                engine.warm(chunks)
                if "variance" in options.selectors:
                    lens.variances_of(engine).measured([chunk.token_ids for chunk in chunks])
        return quality.measured(engine, own, methods(options), map_rerank=False)[0]


def methods(options: argparse.Namespace) -> list[Method]:
    """All methods of the table."""
    return [
        Method("full prefill", reuse="none"),
        Method("full reuse", 0.0, "none"),
        *(Method(f"{name} {ratio:g}", ratio, name) for ratio in options.ratios for name in options.selectors),
    ]


def summarized(asked: Sequence[Asked], outcomes: quality.Outcomes) -> dict[str, Any]:
    """Quality with misses mended, and end to end."""
    mended = {name: [o for o in those if o.context % 2 == 0] for name, those in outcomes.items()}
    results = quality.summarized(mended, statistics.fmean(one.mended.questions[0].guess for one in asked))
    for name, those in outcomes.items():
        as_retrieved = {o.context // 2: o.exact for o in sorted(those, key=lambda o: o.context)}  # an odd one replaces
        results["methods"][name]["end_to_end"] = statistics.fmean(as_retrieved.values())
    shares = defaultdict[str, list[bool]](list)
    for one in asked:
        shares[one.mended.questions[0].type].append(one.found)
    return results | {
        "found": statistics.fmean(one.found for one in asked),
        "found_by_type": {kind: statistics.fmean(those) for kind, those in shares.items()},
        "chunks": statistics.fmean(len(one.retrieved.chunks) for one in asked),
    }


def _print(results: dict[str, Any]) -> None:
    print(
        f"{results['questions']} questions over {results['chunks']:.1f} chunks each, everything found for "
        f"{results['found']:.0%}, guess floor {results['guess']:.2f}\n"
    )
    kinds = [kind for kind in TYPES if kind in results["found_by_type"]]
    rows = [("found", *(f"{results['found_by_type'][kind]:.2f}" for kind in kinds), "", "", "", "", "", "")]
    for name, row in results["methods"].items():
        low, high = row["gap_closed_95"] or (float("nan"), float("nan"))
        rows.append(
            (
                name, *(f"{row['types'].get(kind, float('nan')):.2f}" for kind in kinds), f"{row['exact']:.3f}",
                "-".join(f"{v:.3f}" for v in row["exact_95"]), f"{row['gap_closed']:.2f} ({low:.2f} to {high:.2f})",
                f"{row['kl']:.3f}", f"{row['compute']:.3f}", f"{row['end_to_end']:.3f}",
            )
        )  # fmt: skip
    report.table(("method", *kinds, "EM", "95 %", "gap closed", "KL", "compute", "end to end"), rows)


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="ten questions a type on one corpus, one ratio", threads=1)
    parser.add_argument("--model", default="reader", help="a folder that `training.train --start` wrote")
    parser.add_argument("--corpora", type=int, default=12)
    parser.add_argument("--worlds", type=int, default=8, help="of a corpus")
    parser.add_argument("--each", type=int, default=300, help="maximum number of questions per type")
    parser.add_argument("--k", type=int, default=8, help="chunks to retrieve")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--selectors", nargs="+", default=["hkvd", "hkvd-gradual", "variance", "sensitivity"])
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.05, 0.1, 0.15])
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--tag", default="", help="the results' name")
    options = parser.parse_args()
    if options.quick:
        options.corpora, options.each, options.ratios = 1, 10, [0.15]
    return options


if __name__ == "__main__":
    main()
