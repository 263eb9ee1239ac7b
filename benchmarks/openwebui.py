"""Time to the first token of a recorded dialogue whose RAG text stands in the system message and changes every turn.

    python -m benchmarks.openwebui [--quick] [--shape qwen2.5-0.5b --layers 4]

Open WebUI and other clients send plain chat requests: a system message with the passages that were found for this turn,
then the dialogue so far. Nothing but the text says which passages these are, and no prefix stays the same, so servers
that reuse exact prefixes compute all of it. Here the same requests are sent in turns with full recompute and with
reuse: as the dialogue is held for the first time, and when it is held again. Before a turn, waiting chunks are encoded,
as they are while a user reads. The bundled reader is served, or a real shape with random weights (they do not change
the time) and the reader's tokenizer. Times are of whole requests for one token.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from fastapi.testclient import TestClient

from benchmarks.report import parser, save, table
from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.api import ServeConfig, create_app
from ragkv.api.logs import configure_logging
from ragkv.api.settings import LogConfig
from ragkv.model.loading import load
from ragkv.model.shapes import SHAPES, random_model
from ragkv.retrieval.testing import HashEmbedder

EXAMPLES = Path(__file__).parents[1] / "examples"
TURNS, PASSAGES = 6, 5
TASK = "Answer the question from the context, and say so if the context does not have the answer.\n\n<context>\n"
MODES = ("full recompute", "first time", "again")


def main() -> None:
    """Measure and print."""
    options = parser(__doc__, quick="one run", threads=2, runs=3)
    options.add_argument("--shape", choices=sorted(SHAPES), help="a real shape with random weights, not the reader")
    options.add_argument("--layers", type=int, help="of the shape; left out: all")
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    configure_logging(LogConfig(level="error"))
    model, tokenizer = load("reader", "cpu", "float32")
    if given.shape is not None:
        model = random_model(given.shape, torch.bfloat16, layers=given.layers)
        model.generation_config.eos_token_id = None
    with Engine(model, tokenizer, EngineConfig(store=StoreConfig(memory_bytes=0))) as engine:
        rows = measured(engine, runs=1 if given.quick else given.runs)
    name = "the reader" if given.shape is None else f"{given.shape}, {model.config.num_hidden_layers} layers"
    print(f"{name}; {given.threads} threads; {TURNS} turns, {PASSAGES} passages in each system message")
    table(
        ("turn", "tokens", *(f"{mode} ms" for mode in MODES), "reused", "speedup", "again"),
        [_cells(*one) for one in enumerate(rows, 1)],
    )
    print("written:", save(f"openwebui-{given.shape or 'reader'}", {"rows": rows, "model": name}))


def measured(loaded: Engine, runs: int) -> list[dict[str, Any]]:
    """For each turn: the tokens of its prompt, milliseconds by mode, and the share reused the first time."""
    found: list[list[dict[str, Any]]] = [_run(loaded) for _ in range(runs)]
    rows = []
    for turn in range(len(found[0])):
        row = dict(found[0][turn])
        row |= {mode: statistics.median(run[turn][mode] for run in found) for mode in MODES}
        rows.append(row)
    return rows


def recorded(client: TestClient, questions: list[dict[str, Any]]) -> list[list[dict[str, str]]]:
    """The messages of each turn, as such a client sends them. No two turns have the same passages."""
    said: list[dict[str, str]] = []
    turns: list[list[dict[str, str]]] = []
    for one in questions:
        search = {"query": one["question"], "k": PASSAGES}
        hits = client.post("/v1/collections/docs/search", json=search).json()["hits"]
        sources = [f'<source id="{hit["number"]}">{hit["text"]}</source>' for hit in hits]
        system = TASK + "\n".join(sources) + "\n</context>"
        if any(messages[0]["content"] == system for messages in turns) or len(turns) == TURNS:
            continue
        said.append({"role": "user", "content": one["question"]})
        turns.append([{"role": "system", "content": system}, *said])
        said.append({"role": "assistant", "content": one["answer"]})
    return turns


def questions() -> list[dict[str, Any]]:
    """The questions of the example corpus, with their answers."""
    lines = (EXAMPLES / "questions.jsonl").read_text("utf-8").splitlines()
    return [one for one in map(json.loads, lines) if "history" not in one]


def documents() -> list[dict[str, str]]:
    """The example corpus."""
    return [{"id": path.name, "text": path.read_text("utf-8")} for path in sorted((EXAMPLES / "corpus").glob("*.md"))]


def _run(loaded: Engine) -> list[dict[str, Any]]:
    """One run on a new store."""
    with tempfile.TemporaryDirectory() as home:
        app = create_app(ServeConfig(home=home), engine=loaded.with_config(EngineConfig()), embedder=HashEmbedder())
        with TestClient(app, base_url="http://localhost") as client:
            client.post("/v1/collections", json={"name": "docs"}).raise_for_status()
            client.post("/v1/collections/docs/documents", json={"documents": documents()}).raise_for_status()
            turns = recorded(client, questions())
            _seconds(client, [turns[0][-1]], "none")  # the first request of a process is slower
            rows = []
            for messages in turns:
                full_s, _ = _seconds(client, messages, "none")
                first_s, reuse = _seconds(client, messages, "fused")
                used = reuse["exact"] + reuse["fused"] + reuse["recomputed"]
                rows.append({"tokens": reuse["tokens"], "reused": used / reuse["tokens"]})
                rows[-1] |= {MODES[0]: 1e3 * full_s, MODES[1]: 1e3 * first_s}
            for row, messages in zip(rows, turns, strict=True):
                row[MODES[2]] = 1e3 * _seconds(client, messages, "fused")[0]
            return rows


def _seconds(client: TestClient, messages: list[dict[str, str]], reuse: str) -> tuple[float, dict[str, Any]]:
    """The time of a request for one token, and its report."""
    service: Any = client.app.state.service  # type: ignore[attr-defined]
    for tenant in service.tenants.opened().values():
        tenant.engine.flush()
    body = {"model": service.model_id, "messages": messages, "max_tokens": 1, "ragkv": {"reuse": reuse}}
    began = time.perf_counter()
    response = client.post("/v1/chat/completions", json=body)
    took = time.perf_counter() - began
    return took, response.raise_for_status().json()["ragkv"]["reuse"]


def _cells(turn: int, row: dict[str, Any]) -> list[Any]:
    full = row[MODES[0]]
    times = [round(row[mode], 1) for mode in MODES]
    return [turn, row["tokens"], *times, f"{row['reused']:.0%}", full / row[MODES[1]], full / row[MODES[2]]]


if __name__ == "__main__":
    main()
