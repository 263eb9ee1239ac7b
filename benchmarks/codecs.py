"""The cost and the saving of a codec: answers, next tokens, bytes.

    python -m benchmarks.codecs [--quick]

Claim: int8 entries take about half the bytes of bfloat16 in every tier and answer as raw ones do; so do bfloat16
entries of a model that computes in float32, with half of its bytes. Every codec answers the same questions with the
bundled reader (the worlds and the runner of `benchmarks/quality.py`), and continues the same texts with a model that
this project did not train (`benchmarks/fidelity.py`; skipped if the model is not there). All run in float32, at ratio 0
(all KV as stored), 0.15 and 1 (all KV recomputed). The first chunk of a lossy codec is fused, not exact, so a little
more is recomputed at the same ratio; "all fused" measures raw entries under the same condition. The error is
the root mean square difference between decoded and original numbers, relative to the originals, separately for keys and
values, on the reader's own entries.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks import fidelity, quality_data, report
from benchmarks.quality_run import Asker, Method
from ragkv import Engine, EngineConfig, FusionConfig, StoreConfig
from ragkv.store import CODECS, Codec
from ragkv.store.codecs import RAW, RawCodec

RATIOS = (0.0, 0.15, 1.0)
SELECTOR = "sensitivity"


class FusedRaw(RawCodec):
    """Raw entries that are never called exact: raw under the conditions of int8."""

    name = "raw, all fused"
    lossless = False


VARIANTS: tuple[Codec, ...] = (RAW, FusedRaw(), CODECS["bfloat16"], CODECS["int8"])


@contextmanager
def registered(codec: Codec) -> Iterator[str]:
    """Register `codec` as "int8" for the engines built in this block; the name to use."""
    if codec is RAW:
        yield "raw"
        return
    original, CODECS["int8"] = CODECS["int8"], codec
    try:
        yield "int8"
    finally:
        CODECS["int8"] = original


def config(codec: str) -> EngineConfig:
    """Settings in float32, so that no other rounding is measured."""
    return EngineConfig(dtype="float32", store=StoreConfig(codec=codec), fusion=FusionConfig(sensitivity_prefixes=2))


def answers(codec: Codec, contexts: list[quality_data.Context]) -> dict[str, Any]:
    """EM and KL of the reader for each ratio, and the error of its entries."""
    found: dict[float, list[Any]] = defaultdict(list)
    errors: list[list[float]] = []
    with registered(codec) as name, Engine.from_pretrained("reader", config(name)) as engine:
        for number, context in enumerate(contexts):
            asker = Asker(engine, context, number)
            for ratio in RATIOS:
                found[ratio] += asker.outcomes(Method(str(ratio), ratio, SELECTOR if ratio else "none"))
            errors += [error(codec, engine, chunk.token_ids) for chunk in asker.chunks[:2]]
    return {
        "questions": len(found[0.0]),
        "em": {str(ratio): statistics.fmean(o.exact for o in outcomes) for ratio, outcomes in found.items()},
        "kl": {str(ratio): statistics.fmean(o.kl for o in outcomes) for ratio, outcomes in found.items()},
        "bytes": _share_of_bytes(codec),
        "error": [statistics.fmean(values) for values in zip(*errors, strict=True)],
    }


def _share_of_bytes(codec: Codec) -> float:
    """Of a layer slice of 512 tokens of the shape of Qwen2.5-0.5B in bfloat16."""
    layer = torch.empty((2, 2, 512, 64), dtype=torch.bfloat16)
    return codec.layout(tuple(layer.shape), layer.dtype).nbytes / layer.nbytes


def error(codec: Codec, engine: Engine, token_ids: tuple[int, ...]) -> list[float]:
    """Relative root mean square error of keys and of values, the mean over layers."""
    with engine.scheduler.turn():
        entry = engine.entries.encoder.chunk(token_ids)
    pairs = []
    for layer in entry.kv:
        stored = codec.encode(layer)
        assert stored is not None
        off = codec.decode(stored, torch.empty_like(layer)) - layer
        pairs.append([float(off[side].norm() / layer[side].norm()) for side in (0, 1)])
    return [statistics.fmean(values) for values in zip(*pairs, strict=True)]


def continuations(codec: Codec, model: Any, texts: list[fidelity.Text]) -> dict[str, float]:
    """KL between the next tokens of a full prefill and of fused KV, for each ratio."""
    kl: dict[float, list[float]] = defaultdict(list)
    with registered(codec) as name, Engine(model, config=config(name)) as engine:
        for text in texts:
            engine.warm(text.chunks)
            wanted, _ = fidelity.next_tokens(engine, text, "none", 0.0, reuse="none")
            for ratio in RATIOS:
                got, _ = fidelity.next_tokens(engine, text, SELECTOR if ratio else "none", ratio)
                kl[ratio].append(fidelity.divergence(wanted, got))
    return {str(ratio): statistics.fmean(values) for ratio, values in kl.items()}


def main() -> None:
    """Measure, print the tables, and write the JSON file."""
    parser = report.parser(__doc__, quick="4 worlds, 6 texts")
    parser.add_argument("--worlds", type=int, default=60)
    parser.add_argument("--texts", type=int, default=60)
    parser.add_argument("--model", type=Path, default=Path("../shared/data/models/stories260K"))
    options = parser.parse_args()
    if options.quick:
        options.worlds, options.texts = 4, 6
    torch.set_num_threads(1)
    contexts = quality_data.worlds(options.worlds, seed=0, level=3)
    results: dict[str, Any] = {"reader": {codec.name: answers(codec, contexts) for codec in VARIANTS}}
    if (options.model / "config.json").exists():
        model = AutoModelForCausalLM.from_pretrained(options.model).eval()
        texts = fidelity.sampled(model, options.texts, chunks=6, tokens=64, after=16)
        results[options.model.name] = {codec.name: continuations(codec, model, texts) for codec in VARIANTS}
    show(results, options.model.name)
    print("written:", report.save("codecs-quick" if options.quick else "codecs", results))


def show(results: dict[str, Any], model: str) -> None:
    """The tables on the terminal."""
    questions = results["reader"]["raw"]["questions"]
    print(f"the bundled reader, {questions} questions, {SELECTOR}; KL of the first token, nats; error of K and V")
    rows = []
    for name, found in results["reader"].items():
        scores = [f"{found[kind][str(ratio)]:.4f}" for ratio in RATIOS for kind in ("em", "kl")]
        rows.append((name, *scores, *(f"{value:.5f}" for value in found["error"]), found["bytes"]))
    heads = [f"{kind} {ratio:g}" for ratio in RATIOS for kind in ("EM", "KL")]
    report.table(("codec", *heads, "error K", "error V", "bytes"), rows)
    if model in results:
        print(f"\n{model}, KL of the next tokens, nats a token")
        found_rows = [(name, *(f"{kl:.6f}" for kl in found.values())) for name, found in results[model].items()]
        report.table(("codec", *(f"ratio {ratio:g}" for ratio in RATIOS)), found_rows)


if __name__ == "__main__":
    main()
