"""TTFT of an LCEL chain on ragkv against the same chain on plain transformers, in the same run.

The chain joins its documents into one string, and ragkv recognises the ingested documents in it. With the bundled
reader the answers of both are compared, at ratio 1 and at the default ratio. A real shape has random weights (they do
not change time) and the reader's tokenizer. The time of recognition is shown as a share of TTFT.
`python -m benchmarks.langchain`
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable

from benchmarks import report
from examples.plain_transformers import PlainTransformers
from ragkv import Engine, EngineConfig
from ragkv.integrations.langchain import ChatRagKV
from ragkv.model.loading import load
from ragkv.model.shapes import SHAPES, random_model

EXAMPLES = Path(__file__).parents[1] / "examples"
PROMPT = ChatPromptTemplate.from_messages([("human", "{context} {question}")])
RATIOS = {"ragkv, ratio 1": 1.0, "ragkv": None, "ragkv, ratio 0": 0.0}


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    reader = options.shape is None
    model, tokenizer = load("reader", "cpu", options.dtype)
    if not reader:
        model = random_model(options.shape, getattr(torch, options.dtype))
        model.generation_config.eos_token_id = None
    documents = _documents(None if reader else options.chunks, options.tokens, tokenizer)
    questions = _questions() if reader else ["What does Verlab sell?"]
    tokens = 12 if reader else 1  # random weights give ids without text, so only the first token is timed
    plain = PlainTransformers(net=model, tokenizer=tokenizer, max_tokens=tokens)
    with Engine(model, tokenizer, EngineConfig()) as engine:
        chains: dict[str, Runnable[Any, str]] = {"transformers": PROMPT | plain | StrOutputParser()}
        for name, ratio in RATIOS.items():
            chains[name] = PROMPT | ChatRagKV(engine=engine, ratio=ratio, max_tokens=tokens) | StrOutputParser()
        ChatRagKV(engine=engine).ingest(documents)
        inputs = [
            {"context": " ".join(one.page_content for one in documents), "question": question} for question in questions
        ]
        rows = _timed(chains, inputs, options.runs)
        same = _same(chains, inputs)
        llm = ChatRagKV(engine=engine, max_tokens=1)
        reports = [llm.invoke(PROMPT.invoke(one)).response_metadata["kv_cache"] for one in inputs * options.runs]
    for row in rows:
        row["same_answers"], row["questions"] = same[row["chain"]], len(inputs)
    found = sorted({len(one["documents"]) for one in reports})
    shares = [one["timing"]["recognition_s"] / one["timing"]["first_token_s"] for one in reports]
    recognition_s = statistics.median(one["timing"]["recognition_s"] for one in reports)
    layout_s = statistics.median(one["timing"]["layout_s"] for one in reports)
    name = "reader" if reader else f"{options.shape} (random weights)"
    print(
        f"{name}, {options.dtype}, {options.threads} threads; {len(documents)} documents, "
        f"recognised in a prompt: {', '.join(map(str, found))}"
    )
    report.table(
        ("chain", "TTFT ms", "speedup", "answers as transformers'"),
        [
            (row["chain"], 1e3 * row["ttft_s"], row["speedup"], f"{row['same_answers']} of {row['questions']}")
            for row in rows
        ],
    )
    print(
        f"recognition {1e3 * recognition_s:.2f} ms a prompt, median {100 * statistics.median(shares):.2f} % of TTFT; "
        f"the whole layout {1e3 * layout_s:.2f} ms.\n"
        f"The prompt at the default ratio: {_counts(reports[0]['reuse'])}."
    )
    results = {
        "rows": rows,
        "recognition_s": recognition_s,
        "recognition_share": statistics.median(shares),
        "layout_s": layout_s,
        "documents_found": found,
        "documents": len(documents),
        "model": name,
        "dtype": options.dtype,
    }
    print("written:", report.save(f"langchain-{options.shape or 'reader'}{'-quick' * options.quick}", results))


def _counts(reuse: dict[str, Any]) -> str:
    return ", ".join(f"{reuse[name]} {name}" for name in ("exact", "fused", "recomputed", "computed"))


def _timed(chains: dict[str, Runnable[Any, str]], inputs: list[dict[str, str]], runs: int) -> list[dict[str, Any]]:
    """The median over all questions of the median time to the first piece of an answer. Chains take turns."""
    medians: dict[str, list[float]] = {name: [] for name in chains}
    for one in inputs:
        for name, seconds in _alternate(chains, one, runs).items():
            medians[name].append(seconds)
    ttft = {name: statistics.median(seconds) for name, seconds in medians.items()}
    return [{"chain": n, "ttft_s": s, "speedup": ttft["transformers"] / s} for n, s in ttft.items()]


def _alternate(chains: dict[str, Runnable[Any, str]], one: dict[str, str], runs: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in chains}
    for run in range(runs + 1):  # the first run is a warm-up
        for name, chain in chains.items():
            began = time.perf_counter()
            pieces = chain.stream(one)
            next(pieces)
            if run:
                times[name].append(time.perf_counter() - began)
            for _ in pieces:
                pass
    return {name: statistics.median(values) for name, values in times.items()}


def _same(chains: dict[str, Runnable[Any, str]], inputs: list[dict[str, str]]) -> dict[str, int]:
    """The number of answers of each chain that equal those of transformers."""
    expected = [chains["transformers"].invoke(one) for one in inputs]
    return {
        name: sum(chain.invoke(one) == answer for one, answer in zip(inputs, expected, strict=True))
        for name, chain in chains.items()
    }


def _documents(chunks: int | None, tokens: int, tokenizer: Any) -> list[Document]:
    texts = [path.read_text("utf-8").strip() for path in sorted((EXAMPLES / "corpus").glob("*.md"))]
    if chunks is None:
        return [Document(page_content=text) for text in texts]
    ids = tokenizer(" ".join(texts), add_special_tokens=False)["input_ids"] * (1 + chunks * tokens // 500)
    cuts = [tokenizer.decode(ids[at : at + tokens]).strip() for at in range(0, chunks * tokens, tokens)]
    return [Document(page_content=f"Part {number}. {text}") for number, text in enumerate(cuts)]


def _questions() -> list[str]:
    lines = (EXAMPLES / "questions.jsonl").read_text("utf-8").splitlines()
    records = [json.loads(line) for line in lines if line]
    return [record["question"] for record in records if "history" not in record]


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="fewer runs", threads=2, runs=5)
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), help="a real shape with random weights in place of the reader"
    )
    parser.add_argument("--chunks", type=int, default=6, help="number of chunks, with --shape")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a chunk, with --shape")
    parser.add_argument("--dtype", help="default float32 for the reader, bfloat16 for a shape")
    options = parser.parse_args()
    options.dtype = options.dtype or ("bfloat16" if options.shape else "float32")
    if options.quick:
        options.runs = 2
    return options


if __name__ == "__main__":
    main()
