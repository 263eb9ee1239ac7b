"""EM, F1, ROUGE-L, recall@k and TTFT of every method on your questions, as a table and a plot.

Reads JSONL with a question, its contexts and its answers in each line, and the MuSiQue, 2Wiki and
LongBench formats.
"""

import argparse
import logging
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the loaders and the table of the benchmarks
from benchmarks import quality_data
from benchmarks.report import table
from examples.baselines import map_reduce, map_rerank
from examples.earlier_prompts import ask_before, ask_each_before
from examples.metrics import best, exact_match, rouge_l, token_f1
from ragkv import Chunk, Engine, EngineConfig, PromptConfig
from ragkv.retrieval import Document, Index, Splitter

METRICS = (exact_match, token_f1, rouge_l)
METHODS = {"full prefill": {"reuse": "none"}, "exact prefix": {"reuse": "prefix"}, "fused": {}}
METHODS |= {
    "full reuse": {"ratio": 0.0},
    "MapRerank": {"reuse": "prefix"},
    "MapReduce": {"reuse": "prefix"},
}
MAPPED = {"MapRerank": map_rerank, "MapReduce": map_reduce}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="smollm2", help="smollm2, a folder, GGUF file or hub id")
    parser.add_argument("-k", type=int, default=6, help="how many contexts are retrieved")
    parser.add_argument("--system", default="Answer in a few words.", help="text before the chunks")
    parser.add_argument("--questions", type=int, default=50, help="at most this many questions")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--plot", type=Path, default="evaluation.png", help="F1 over TTFT")
    options = parser.parse_args()
    logging.getLogger("ragkv").setLevel(logging.ERROR)  # BM25 alone is what is wanted
    prompt = PromptConfig(options.system)
    scores = {name: [] for name in options.methods}
    recalls = []
    with Engine.from_pretrained(options.model, EngineConfig(prompt=prompt)) as engine:
        for context in quality_data.read(options.file, options.questions):
            index = Index(None, splitter=Splitter(engine.model.count_tokens, 10**6))
            index.writer.ingest(Document(str(n), text) for n, text in enumerate(context.chunks))
            for question in context.questions:
                hits = index.search(question.text, options.k)
                # in their own order
                found = sorted({int(hit.passage.document_id) for hit in hits}) or [0]
                golds = question.golds
                right = {
                    n for n, text in enumerate(context.chunks) if any(g in text for g in golds)
                }
                recalls += [bool(right & set(found))] if right else []
                chunks = [engine.chunk(context.chunks[n]) for n in found]
                engine.entries.encode(chunks)
                for name in options.methods:
                    text, ttft_s = ask(engine, name, question.text, chunks)
                    scores[name].append(
                        [*(best(metric, text, golds) for metric in METRICS), 1e3 * ttft_s]
                    )
    recall = statistics.fmean(recalls or [float("nan")])
    rows = []
    for name, scored in scores.items():
        *metrics, times = zip(*scored, strict=True)
        rows += [
            (name, *map(statistics.fmean, metrics), recall, statistics.median(times), len(scored))
        ]
    table(("method", "EM", "F1", "ROUGE-L", f"recall@{options.k}", "TTFT ms", "questions"), rows)
    plot(rows, options.plot)


def ask(engine: Engine, name: str, question: str, chunks: list[Chunk]) -> tuple[str, float]:
    if METHODS[name].get("reuse") == "prefix":  # which lives on an earlier question
        before = ask_each_before if name in MAPPED else ask_before
        before(engine, chunks)
    settings = {"max_new_tokens": 16, **METHODS[name]}
    if mapped := MAPPED.get(name):
        result = mapped(engine, question, chunks, **settings)
        return result.text, result.first_token_s
    answer = engine.answer(question, chunks, **settings)
    return answer.text, answer.timing.first_token_s


def plot(rows: list[tuple], path: Path) -> None:
    from matplotlib import pyplot

    for name, _, f1, *_, ttft_ms, _ in rows:
        pyplot.scatter(ttft_ms, f1, label=name)
    pyplot.gca().set(xlabel="TTFT, ms", ylabel="F1", xscale="log")
    pyplot.legend()
    pyplot.savefig(path)


if __name__ == "__main__":
    main()
