"""How often a search finds a passage that answers, and what the embedder costs.

    python -m benchmarks.retrieval --data FOLDER [--quick]

Three question sets, each over one index of all its passages, cut at 200 words:

- `xquad` (the test half of its articles) and `musique`: a passage counts if it has a gold answer.
- `mtrag`: the last question of a conversation, searched alone and with the question before it, as
  `Rag.retrieve` does. A passage counts if it is one of those that the set's authors gave for it.

Printed is the share of questions with such a passage among the first 1, 4, 6 and 10, by words
(`bm25`), by vectors (`dense`) and by both (`fused`), and the processor's time for a search.
"""

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.real import NO_DATA
from benchmarks.real_sets import half_of, questions
from benchmarks.sets import questions as sets_folder
from ragkv.retrieval import Document, Embedder, Hit, Index, Splitter, resolve_embedder
from ragkv.retrieval.rag.rag import search_text

FIRST = (1, 4, 6, 10)
RETRIEVERS = ("bm25", "dense", "fused")
PASSAGE_WORDS = 200  # about 256 tokens
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
    splitter = Splitter(lambda text: len(text.split()), PASSAGE_WORDS)
    with Index(None, splitter, embedder) as index:
        index.ingest([Document(str(at), text) for at, text in enumerate(texts)])
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
            search_text(one.text, one.before if joined else ""), max(FIRST), retriever=retriever
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


def _read(
    name: str, most_texts: int | None
) -> Callable[[Path, int], tuple[list[str], list[Query]]]:
    """The passages and questions of a set whose gold answers stand in passages; only the passages of
    its first `most_texts` questions are searched, and only they are asked.
    """

    def read(folder: Path, count: int) -> tuple[list[str], list[Query]]:
        known = questions(name, folder, "test", most_texts)
        texts = dict.fromkeys(text for asked in known for text in asked.passages)
        forms = [_form(text) for text in texts]
        queries = [
            Query(asked.question, "", _has_one_of([_form(gold) for gold in asked.golds]))
            for asked in known
            if any(_form(gold) in form for gold in asked.golds for form in forms)
        ]
        return list(texts), queries[:count]

    return read


def _has_one_of(golds: Sequence[str]) -> Callable[[Hit], bool]:
    return lambda hit: any(gold in _form(hit.passage.text) for gold in golds)


def _form(text: str) -> str:
    """Its words in lower case, with a blank on each side."""
    return " " + " ".join(re.findall(r"\w+", text.lower())) + " "


def _follow_ups(folder: Path, count: int) -> tuple[list[str], list[Query]]:
    """The follow-ups of mtRAG's test half over the passages of all its tasks."""
    lines = (folder / "mtragun_reference.jsonl").read_text("utf-8").splitlines()
    tasks = [json.loads(line) for line in lines]
    texts = dict.fromkeys(one["text"] for task in tasks for one in task["contexts"])
    numbers = {text: str(at) for at, text in enumerate(texts)}
    queries = []
    for task in tasks:
        said = [turn["text"] for turn in task["input"] if turn["speaker"] == "user"]
        if half_of(task["conversation_id"]) == "test" and task["contexts"] and len(said) > 1:
            wanted = {numbers[one["text"]] for one in task["contexts"]}
            queries.append(Query(said[-1], said[-2], _is_of(wanted)))
    return list(texts), queries[:count]


def _is_of(documents: set[str]) -> Callable[[Hit], bool]:
    return lambda hit: hit.passage.document_id in documents


SETS = {"xquad": _read("xquad", 300), "musique": _read("musique", None), "mtrag": _follow_ups}


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="ten questions of each set")
    parser.add_argument("--data", type=Path, default=sets_folder(), help="with the question sets")
    parser.add_argument("--sets", nargs="+", choices=[*SETS], default=[*SETS])
    parser.add_argument("--questions", type=int, default=200, help="of each set, at most")
    options = parser.parse_args()
    if options.quick:
        options.questions = min(options.questions, 10)
    return options


if __name__ == "__main__":
    main()
