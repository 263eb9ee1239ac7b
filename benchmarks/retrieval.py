"""How often a search finds a passage that answers, and what the embedder costs.

    python -m benchmarks.retrieval --data FOLDER [--quick]

Three question sets, each over one index of the passages of its first questions, cut at 200 words:

- `xquad` and `musique`, the test halves: a passage counts if it has a gold answer.
- `mtrag`: the last question of a conversation, searched alone and with the question before it, as
  `Rag.retrieve` does. A passage counts if it is one of those that the set's authors gave for it.

Printed is the share of questions with such a passage among the first 1, 4, 6 and 10, by words
(`bm25`), by vectors (`dense`) and by both (`hybrid`), and the processor's time for a search.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.real import NO_DATA
from benchmarks.real_sets import half_of, questions
from benchmarks.sets import questions as sets_folder
from ragkv.rag.follow_ups import follow_up
from ragkv.retrieval import Document, Embedder, Hit, Index, Splitter, resolve_embedder
from ragkv.runtime.words import words

FIRST = (1, 4, 6, 10)
RETRIEVERS = ("bm25", "dense", "hybrid")
PASSAGE_WORDS = 200  # about 256 tokens
ASKED = 200  # of the questions that can be answered, at most
HEADINGS = ("set", "searched with", "by", "n", *(f"at {k}" for k in FIRST), "ms a search")


@dataclass(frozen=True)
class Query:
    """A question, and whether a passage answers it."""

    text: str
    before: str  # the question before it in its conversation; "" if there is none
    answers: Callable[[Hit], bool]


def main() -> None:
    options = _options()
    if options.data is None:
        report.skip(NO_DATA)
    embedder = resolve_embedder()
    began = time.process_time()
    if embedder is not None:
        embedder.load()
    loaded_s = time.process_time() - began
    rows = [row for name in options.sets for row in measured(name, options, embedder)]
    report.table(HEADINGS, [list(row.values()) for row in rows])
    name = "none" if embedder is None else embedder.name
    print(f"\nembedder: {name}, loaded in {loaded_s:.1f} s of the processor")
    results = {"embedder": name, "loaded_cpu_s": loaded_s, "rows": rows}
    print(report.save("retrieval", results))


def measured(
    name: str, options: argparse.Namespace, embedder: Embedder | None
) -> Iterator[dict[str, Any]]:
    """A row for each retriever, and for each way to search for a follow-up."""
    texts, queries = SETS[name](options.data, options.questions)
    queries = queries[:ASKED]
    splitter = Splitter(lambda text: len(text.split()), PASSAGE_WORDS)
    with Index(None, splitter, embedder) as index:
        index.writer.ingest([Document(str(at), text) for at, text in enumerate(texts)])
        for retriever in RETRIEVERS if embedder is not None else ("bm25",):
            for joined in (False, True) if any(one.before for one in queries) else (False,):
                yield {
                    "set": name,
                    "searched with": "the question before" if joined else "the question alone",
                    "by": retriever,
                    **_found(index, retriever, queries, joined),
                }


def _found(index: Index, retriever: str, queries: Sequence[Query], joined: bool) -> dict[str, Any]:
    """The shares of `queries` that are answered among the first hits."""
    began = time.process_time()
    hits = [
        index.search(
            follow_up(one.text, one.before if joined else ""), max(FIRST), retriever=retriever
        )
        for one in queries
    ]
    took_s = time.process_time() - began
    ranks = [
        next((hit.rank for hit in own if one.answers(hit)), None)
        for one, own in zip(queries, hits, strict=True)
    ]
    count = len(queries)
    shares = {
        f"at {k}": sum(rank is not None and rank <= k for rank in ranks) / count for k in FIRST
    }
    return {"n": count, **shares, "ms": 1e3 * took_s / count}


def _read(name: str) -> Callable[[Path, int], tuple[list[str], list[Query]]]:
    """The passages of the first `most` questions of a set, and those of these questions of which a
    gold answer stands in a passage.
    """

    def read(folder: Path, most: int) -> tuple[list[str], list[Query]]:
        known = questions(name, folder, "test", most)
        texts = dict.fromkeys(text for asked in known for text in asked.passages)
        forms = [_form(text) for text in texts]
        queries = []
        for asked in known:
            golds = [_form(gold) for gold in asked.golds]
            if any(gold in form for gold in golds for form in forms):
                queries.append(Query(asked.question, "", _has_one_of(golds)))
        return list(texts), queries

    return read


def _has_one_of(golds: Sequence[str]) -> Callable[[Hit], bool]:
    return lambda hit: any(gold in _form(hit.passage.text) for gold in golds)


def _form(text: str) -> str:
    """Its words as the package compares them, with a blank on each side."""
    return " " + " ".join(word.text for word in words(text)) + " "


def _follow_ups(folder: Path, most: int) -> tuple[list[str], list[Query]]:
    """The passages of mtRAG's first `most` tasks, and the follow-ups of their test half."""
    lines = (folder / "mtragun_reference.jsonl").read_text("utf-8").splitlines()
    tasks = [json.loads(line) for line in lines[:most]]
    texts = dict.fromkeys(one["text"] for task in tasks for one in task["contexts"])
    numbers = {text: str(at) for at, text in enumerate(texts)}
    queries = []
    for task in tasks:
        said = [turn["text"] for turn in task["input"] if turn["speaker"] == "user"]
        if half_of(task["conversation_id"]) == "test" and task["contexts"] and len(said) > 1:
            wanted = {numbers[one["text"]] for one in task["contexts"]}
            queries.append(Query(said[-1], said[-2], _is_of(wanted)))
    return list(texts), queries


def _is_of(documents: set[str]) -> Callable[[Hit], bool]:
    return lambda hit: hit.passage.document_id in documents


SETS = {"xquad": _read("xquad"), "musique": _read("musique"), "mtrag": _follow_ups}


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="twenty questions of each set")
    parser.add_argument("--data", type=Path, default=sets_folder(), help="with the question sets")
    parser.add_argument("--sets", nargs="+", choices=[*SETS], default=[*SETS])
    parser.add_argument(
        "--questions", type=int, default=1000, help="of each set, whose passages are searched"
    )
    options = parser.parse_args()
    if options.quick:
        options.questions = min(options.questions, 20)
    return options


if __name__ == "__main__":
    main()
