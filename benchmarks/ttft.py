"""TTFT of a fused prefill against transformers' full prefill and our own full recompute, same run, same work.

A real architecture with random weights (weights do not change time), chunks in memory and on disk, one question of 32
tokens. Baselines compute the last row's logits only, as we do.
"""

import argparse
import tempfile

import torch
from transformers import DynamicCache

from benchmarks import report
from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.model.shapes import SHAPES, random_model

QUESTION_TOKENS = 32


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    model = random_model(options.shape)
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.vocab_size

    def ids(count: int) -> list[int]:
        return torch.randint(3, vocabulary, (count,), generator=generator).tolist()

    chunks = [ids(options.tokens) for _ in range(options.chunks)]
    question = ids(QUESTION_TOKENS)
    rows = []
    for tier in options.tiers:
        with tempfile.TemporaryDirectory() as directory:
            store = StoreConfig(
                directory=directory if tier == "disk" else None, memory_bytes=0 if tier == "disk" else 4 << 30
            )
            with Engine(model, config=EngineConfig(store=store)) as engine:
                engine.warm(chunks)
                rows += _measure(engine, model, chunks, question, tier, options.runs)
    print(
        f"{options.shape} (random weights), {options.chunks} x {options.tokens} + {QUESTION_TOKENS} tokens, bf16, cpu"
    )
    report.table(("tier", "method", "ratio", "TTFT s", "speedup"), rows)
    print("written:", report.save(f"ttft-{options.shape}-{options.chunks}x{options.tokens}", rows))


def _measure(engine: Engine, model: torch.nn.Module, chunks: list, question: list, tier: str, runs: int) -> list:
    whole = engine.prefill(question, chunks, reuse="none").token_ids.unsqueeze(0)

    @torch.no_grad()
    def transformers_full() -> None:
        model(whole, past_key_values=DynamicCache(), logits_to_keep=1)

    actions = {
        ("transformers full", 1.0): transformers_full,
        ("full recompute", 1.0): lambda: engine.prefill(question, chunks, reuse="none"),
        ("exact prefix", 1.0): lambda: engine.prefill(question, chunks, reuse="prefix"),
        ("full reuse", 0.0): lambda: engine.prefill(question, chunks, ratio=0.0, selector="none"),
    }
    for ratio in (0.05, 0.15):
        for selector in ("hkvd", "hkvd-gradual", "first-k"):
            actions[selector, ratio] = lambda s=selector, r=ratio: engine.prefill(question, chunks, ratio=r, selector=s)
    medians = report.alternate(actions, runs)
    base = medians["transformers full", 1.0]
    return [(tier, name, ratio, seconds, base / seconds) for (name, ratio), seconds in medians.items()]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny shape, for a minute on a laptop")
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=sorted(SHAPES))
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiers", nargs="+", default=["memory", "disk"], choices=("memory", "disk"))
    options = parser.parse_args()
    if options.quick:
        options.shape, options.tokens, options.runs = "tiny", 256, 3
    return options


if __name__ == "__main__":
    main()
