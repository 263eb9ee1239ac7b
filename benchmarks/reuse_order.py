"""Exact reuse by the order of passages against fusion, and both together: quality, first token and bytes.

    python -m benchmarks.reuse_order                    # 600 questions on 24 worlds with the bundled reader
    python -m benchmarks.reuse_order --quick            # 30 questions on 3 worlds
    python -m benchmarks.reuse_order --store-mib 64     # with a store that does not hold everything

A corpus of held-out worlds, each text a document of its own; the questions come one after another. Worlds are drawn by
Zipf's law, and then one of the world's questions, so popular texts are retrieved again and again, and some questions
are asked again. BM25 retrieves 6 passages for each. Every method has an engine and a store of its own on the same model
and gets the same questions in the same order; for each question the methods take turns. All entries of the passages are
there from the start; between two questions there is time to encode what was missed.

"exact" reuses only what is exact: each passage behind the same passages as before (`store.chained_entries`). "order"
is that of the passages: as in the corpus, which is what the reader was trained on, or that which reuses most. "both"
fuses what is behind the exact passages. "first token" is the median from the question on, search included. "computed"
is row-layers over those of a full recompute. "stored" is what the store holds at the end, "written" all that was put
there, both over the bytes of the passages' own entries; "read" are bytes a question. Intervals are 95 % bootstraps over
questions of the paired difference in EM to a full recompute in the order of the corpus.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import torch

from benchmarks import report
from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.lab.metrics import best, exact_match
from ragkv.retrieval import Document
from ragkv.retrieval.rag import Rag
from ragkv.retrieval.rag.rag import Order
from training.worlds import level, world

FIRST_SEED = 8_700_000_000_000  # far from the seeds of training and evaluation, and from those of other benchmarks
MAX_NEW_TOKENS = 12
CHUNK_TOKENS = 128  # the reader was trained on chunks of up to so many
RESAMPLES = 2000
MIB = 1024**2


@dataclass(frozen=True, eq=False)
class Method:
    """How every question is answered."""

    name: str
    how: dict[str, Any]
    order: Order = "document"
    chained_entries: int = 0


@dataclass(frozen=True)
class Asked:
    """A question and its answer."""

    question: str
    gold: str


@dataclass(frozen=True)
class Outcome:
    """One question with one method."""

    exact_match: float
    first_token_s: float  # retrieval included
    computed: float  # row-layers over a full recompute's
    exact_share: float  # of the prompt's tokens, reused exactly
    fused_share: float
    read_bytes: int


def main() -> None:
    parser = report.parser(__doc__, "30 questions on 3 worlds", threads=1)
    parser.add_argument("--worlds", type=int, default=24)
    parser.add_argument("--questions", type=int, default=600)
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of the worlds' popularity")
    parser.add_argument("--chained", type=int, default=16, help="chained entries of one chunk")
    parser.add_argument("--store-mib", type=int, default=8192, help="capacity of each method's store")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.05, 0.15])
    parser.add_argument("--k", type=int, default=6)
    parser.add_argument("--only", nargs="+", help="names of methods, without the full recompute; all if left out")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="start no further question after this")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    worlds, questions = (3, 30) if options.quick else (options.worlds, options.questions)
    documents, asked = question_stream(worlds, questions, options.zipf, options.seed)
    full, *others = methods(options.ratios, options.chained)
    chosen = [full, *(method for method in others if options.only is None or method.name in options.only)]
    outcomes, stores = measured(chosen, documents, asked, options.k, options.store_mib, options.limit_s)
    asked = asked[: len(outcomes["full recompute"])]
    results = summarized(outcomes, stores)
    results |= {"documents": len(documents), "questions": len(asked), "distinct": len(set(asked))}
    _print(results)
    print("written:", report.save("reuse_order", results))


def methods(ratios: Sequence[float], chained: int) -> list[Method]:
    """All ways to answer a question."""
    prefix = {"reuse": "prefix"}
    return [
        Method("full recompute", {"reuse": "none"}),
        Method("exact, corpus order", prefix, "document", chained),
        Method("exact, reuse order", prefix, "reuse", chained),
        *(Method(f"fusion {ratio:g}", {"ratio": ratio}) for ratio in ratios),
        *(Method(f"both {ratio:g}, corpus order", {"ratio": ratio}, "document", chained) for ratio in ratios),
        *(Method(f"both {ratio:g}, reuse order", {"ratio": ratio}, "reuse", chained) for ratio in ratios),
    ]


def question_stream(worlds: int, questions: int, zipf: float, seed: int) -> tuple[list[Document], list[Asked]]:
    """The corpus, and questions in the order in which they are asked."""
    random, spec = Random(seed), replace(level(3), names="heldout", questions=20)
    made = [world(FIRST_SEED + seed * 1_000_000 + number, spec) for number in range(worlds)]
    texts = [(number, place, text) for number, one in enumerate(made) for place, text in enumerate(one.chunks)]
    documents = [Document(f"{number:03}-{place:03}", text) for number, place, text in texts]
    fitting = [
        [Asked(own.question, own.answer) for own in one.questions if not own.history and own.type != "unanswerable"]
        for one in made
    ]
    popularity = [1 / (rank + 1) ** zipf for rank in range(worlds)]
    drawn = random.choices([own for own in fitting if own], popularity[: sum(map(bool, fitting))], k=questions)
    return documents, [random.choice(own) for own in drawn]


def measured(
    methods: Sequence[Method],
    documents: Sequence[Document],
    asked: Sequence[Asked],
    k: int,
    store_mib: int,
    limit_s: float,
) -> tuple[dict[str, list[Outcome]], dict[str, dict[str, int]]]:
    """Every question with every method, which alternate; the bytes of their stores."""
    outcomes: dict[str, list[Outcome]] = defaultdict(list)
    with ExitStack() as stack:
        engine = stack.enter_context(Engine.from_pretrained("reader"))
        rags = {method: stack.enter_context(_opened(engine, method, store_mib, stack)) for method in methods}
        begun = {}
        for method, rag in rags.items():
            rag.ingest(documents)
            begun[method] = rag.engine.stats().store.tiers[0]
            rag.ask("What is known?", k, order=method.order, **method.how)  # what happens once is not measured
            rag.engine.flush()
        until = time.perf_counter() + limit_s
        for number, question in enumerate(asked):
            if time.perf_counter() > until:
                break
            for method, rag in rags.items():
                outcomes[method.name].append(_answered(rag, method, question, k))
                rag.engine.flush()  # the time until the next question
            if number % 50 == 49:
                print(f"{number + 1} questions", flush=True)
        ended = {method: rag.engine.stats().store.tiers[0] for method, rag in rags.items()}
    stores = {
        method.name: {
            "own": begun[method].used_bytes,
            "stored": ended[method].used_bytes,
            "written": ended[method].written_bytes,
            "entries": ended[method].entries,
        }
        for method in methods
    }
    return outcomes, stores


def _opened(engine: Engine, method: Method, store_mib: int, stack: ExitStack) -> Rag:
    """An empty corpus whose engine has a store of its own."""
    store = StoreConfig(memory_bytes=store_mib * MIB, chained_entries=method.chained_entries)
    own = stack.enter_context(engine.with_config(EngineConfig(store=store)))
    return Rag(own, None, chunk_tokens=CHUNK_TOKENS)


def _answered(rag: Rag, method: Method, asked: Asked, k: int) -> Outcome:
    """One question with one method."""
    began = time.perf_counter()
    hits = rag.retrieve(asked.question, k, order=method.order)
    retrieval_s = time.perf_counter() - began
    chunks = [rag.chunk(hit.passage) for hit in hits]
    answer = rag.engine.answer(asked.question, chunks, max_new_tokens=MAX_NEW_TOKENS, **method.how)
    reuse = answer.reuse
    return Outcome(
        best(exact_match, answer.text, (asked.gold,)),
        retrieval_s + answer.timing.first_token_s,
        reuse.compute,
        reuse.exact / reuse.tokens,
        reuse.fused / reuse.tokens,
        sum(reuse.bytes_by_tier.values()),
    )


def summarized(outcomes: dict[str, list[Outcome]], stores: dict[str, dict[str, int]]) -> dict[str, Any]:
    """EM with the paired difference to a full recompute, first token, compute and bytes of each method."""
    full, rows = outcomes["full recompute"], dict[str, dict[str, Any]]()
    for name, found in outcomes.items():
        row: dict[str, Any] = defaultdict(float)
        for one in found:
            for field in ("exact_match", "computed", "exact_share", "fused_share", "read_bytes"):
                row[field] += getattr(one, field) / len(found)
        differences = np.array([one.exact_match - other.exact_match for one, other in zip(found, full, strict=True)])
        draws = np.random.default_rng(0).integers(len(found), size=(RESAMPLES, len(found)))
        low, high = np.quantile(differences[draws].mean(1), [0.025, 0.975])
        store = stores[name]
        rows[name] = dict(row) | {
            "minus_full": float(differences.mean()),
            "minus_full_95": (float(low), float(high)),
            "first_token_s": statistics.median(one.first_token_s for one in found),
            "sooner": statistics.median(
                other.first_token_s / one.first_token_s for one, other in zip(found, full, strict=True)
            ),
            "stored": store["stored"] / store["own"],
            "written": store["written"] / store["own"],
            "entries": store["entries"],
        }
    return {"methods": rows, "own_bytes": next(iter(stores.values()))["own"]}


def _print(results: dict[str, Any]) -> None:
    print(
        f"{results['questions']} questions ({results['distinct']} distinct), {results['documents']} documents, "
        f"entries of {results['own_bytes'] / MIB:.1f} MiB"
    )
    rows = [
        (
            name, row["exact_match"], "{:+.3f} ({:+.3f} to {:+.3f})".format(row["minus_full"], *row["minus_full_95"]),
            f"{row['first_token_s'] * 1e3:.1f} ms", f"{row['sooner']:.1f}x", row["computed"],
            f"{row['exact_share']:.0%}", f"{row['fused_share']:.0%}",
            f"{row['stored']:.1f}x", f"{row['written']:.1f}x", f"{row['read_bytes'] / MIB:.2f} MiB",
        )
        for name, row in results["methods"].items()
    ]  # fmt: skip
    headings = ("", "EM", "- full", "first token", "sooner", "computed", "exact", "fused", "stored", "written", "read")
    report.table(headings, rows)


if __name__ == "__main__":
    main()
