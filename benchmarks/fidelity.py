"""How close fused prompts are to a full prefill, without questions: KL of the next tokens over the
ratio.

Text is sampled from the model itself (`stories260K` next to this repository, or any given folder)
and cut into chunks. The predictions for the following tokens are compared with those of a full
prefill (CacheBlend figures 6 and 8 by other means). Two claims: KL falls with the ratio and is 0 at
1, and HKVD finds better tokens than chance; deviations of neighbouring layers rank tokens alike
(insight 2).
"""

import argparse
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from scipy.stats import spearmanr
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks import lens, report, sets
from ragkv import Engine
from ragkv.fusion import Selector
from ragkv.model import full_pass, grown

SELECTORS = ("hkvd", "hkvd-gradual", "attention", "first-k", "random", "oracle")
RATIOS = (0.0, 0.05, 0.15, 0.3, 1.0)


@dataclass(frozen=True)
class Text:
    """A text: chunks and the tokens after them."""

    chunks: list[list[int]]
    after: list[int]


def main() -> None:
    options = _options()
    if options.model is None:
        report.skip("stories260K is not here, and no --model was given.")
    torch.set_num_threads(options.threads)
    if not (options.model / "config.json").exists():
        report.skip(f"there is no model in {options.model}; give its folder with --model.")
    model = AutoModelForCausalLM.from_pretrained(options.model).eval()
    texts = sampled(model, options.prompts, options.chunks, options.tokens, options.after)
    with Engine(model) as engine:
        results = _measure(engine, texts, options.selectors)
    shape = (
        f"{len(texts)} texts of {options.chunks} x {options.tokens} tokens, KL over "
        f"{options.after} tokens"
    )
    print(f"{options.model.name}, {shape}")
    _print(results)
    print("written:", report.save(f"fidelity-{options.model.name}", results))


@torch.no_grad()
def sampled(model: torch.nn.Module, count: int, chunks: int, tokens: int, after: int) -> list[Text]:
    """`count` texts sampled from the model at temperature 1, without BOS and end tokens."""
    generator = torch.Generator().manual_seed(0)
    config = model.config
    never = [token for token in (config.bos_token_id, config.eos_token_id) if token is not None]
    step = torch.full((count, 1), config.bos_token_id or 0)
    cache = DynamicCache()
    drawn = []
    for _ in range(chunks * tokens + after):
        logits = model(step, past_key_values=cache).logits[:, -1].float()
        logits[:, never] = -torch.inf
        step = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        drawn.append(step)
    rows = torch.cat(drawn, dim=1).tolist()
    cut = [[row[at : at + tokens] for at in range(0, chunks * tokens, tokens)] for row in rows]
    return [Text(pieces, row[chunks * tokens :]) for pieces, row in zip(cut, rows, strict=True)]


def _measure(engine: Engine, texts: list[Text], selectors: list[str]) -> dict[str, object]:
    kl: dict[tuple[str, float], list[float]] = defaultdict(list)
    compute: dict[tuple[str, float], list[float]] = defaultdict(list)
    recall: dict[str, list[float]] = defaultdict(list)
    ranks: list[list[float]] = []
    for text in texts:
        engine.entries.encode(text.chunks)
        wanted, _ = next_tokens(engine, text, "none", 0.0, reuse="none")
        truth = lens.truth(engine, text.chunks)
        ranks.append(_rank_correlations(truth))
        for name in selectors:
            selector: str | Selector = lens.Oracle(truth) if name == "oracle" else name
            for ratio in RATIOS:
                got, share = next_tokens(engine, text, selector, ratio)
                kl[name, ratio].append(divergence(wanted, got))
                compute[name, ratio].append(share)
            recall[name].append(_recall(engine, text, selector, truth))
    return {
        "kl": _means(kl),
        "compute": _means(compute),
        "recall_of_true_top_15_percent": {
            name: sum(values) / len(values) for name, values in recall.items()
        },
        "spearman_of_neighbouring_layers": torch.tensor(ranks).mean(0).tolist(),
    }


def next_tokens(
    engine: Engine, text: Text, selector: str | Selector, ratio: float, reuse: str = "fused"
) -> tuple[torch.Tensor, float]:
    """Log-probabilities (A, V) behind each token of `text.after`, and the compute of the
    prefill.
    """
    prefill = engine.prefill(
        text.after[:1], text.chunks, ratio=ratio, selector=selector, reuse=reuse
    )  # type: ignore[arg-type]
    kv = grown(prefill.kv, len(text.after))
    hidden = full_pass(engine.model.adapter, torch.tensor(text.after[1:]), kv, start=kv.length)
    with torch.no_grad():
        logits = torch.cat((prefill.logits.unsqueeze(0), engine.model.adapter.logits(hidden)))
    return logits.log_softmax(-1), prefill.reuse.compute


def divergence(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """KL(wanted || got) in nats, mean over rows of log-probabilities (A, V)."""
    return float((wanted.exp() * (wanted - got)).sum(-1).mean())


def _recall(engine: Engine, text: Text, selector: str | Selector, truth: lens.Truth) -> float:
    """Share of the 15 % with the highest true deviation among the selected 15 %."""
    chosen = engine.prefill(text.after[:1], text.chunks, ratio=0.15, selector=selector).selected
    candidates = torch.arange(
        truth.chunk_start + len(text.chunks[0]), truth.chunk_start + truth.moved.shape[2]
    )
    best = candidates[truth.score(candidates).topk(len(chosen)).indices]
    return len(set(chosen.tolist()) & set(best.tolist())) / len(chosen)


def _rank_correlations(truth: lens.Truth) -> list[float]:
    """Spearman's correlation of the true deviations in layers l and l + 1, for every l >= 1."""
    layers = truth.deviation()[1:]
    return [float(spearmanr(one, following).statistic) for one, following in pairwise(layers)]


def _means(values: dict[tuple[str, float], list[float]]) -> dict[str, dict[str, float]]:
    means: dict[str, dict[str, float]] = defaultdict(dict)
    for (name, ratio), numbers in values.items():
        means[name][str(ratio)] = sum(numbers) / len(numbers)
    return dict(means)


def _print(results: dict) -> None:
    print(
        "\nKL(full prefill || fused), nats per token; in brackets row-layers over a full prefill's"
    )
    rows = []
    for name, by_ratio in results["kl"].items():
        cells = [
            f"{kl:.4f} ({results['compute'][name][ratio]:.2f})" for ratio, kl in by_ratio.items()
        ]
        rows.append([name, *cells, results["recall_of_true_top_15_percent"][name]])
    report.table(("selector", *RATIOS, "recall"), rows)
    print("\nSpearman's correlation of true deviations, layers l and l + 1 from l = 1:")
    print("  " + "  ".join(f"{value:.3f}" for value in results["spearman_of_neighbouring_layers"]))


def _stories() -> Path | None:
    found = sets.folder()
    path = None if found is None else found / "models" / "stories260K"
    return path if path is not None and path.is_dir() else None


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="8 texts", threads=1)
    parser.add_argument("--model", type=Path, default=_stories())
    parser.add_argument("--selectors", nargs="+", default=list(SELECTORS), choices=SELECTORS)
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--after", type=int, default=16, help="tokens of text after the chunks")
    options = parser.parse_args()
    if options.quick:
        options.prompts = 8
    return options


if __name__ == "__main__":
    main()
