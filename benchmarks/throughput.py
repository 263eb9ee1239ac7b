"""Throughput: tokens/s of batched decoding, and requests/s at a TTFT bound.

    python -m benchmarks.throughput [--quick] [--part decode|requests ...] [--shape qwen2.5-0.5b]

decode: 1, 4 and 16 prompts one after the other; all in one step; and through the engine's decode batch, one thread for
each prompt, with the mean number of rows in a step. All run on threads, as in a server. The main thread releases its
OpenMP thread pool before, because an idle pool would slow all of them.

requests: prefill only (one token of answer). Methods: full recompute and exact-prefix reuse by transformers' own model
and cache, and fusion. The two stores may hold the same bytes. The bound is full recompute's mean TTFT at half the load
that saturates it. Service times are measured by serving every request, in order, with alternating methods. The TTFT at
a rate is then *computed*: Poisson arrivals at one server, first come first served, the measured times repeated in
order, the first tenth excluded. The highest rate under the bound is found by bisection. One rate of each method is
confirmed by a real run, in which the following requests are sent at their arrival times. Weights and entries are
random, which changes no time.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks import throughput_requests as serving
from benchmarks.random_model import SHAPES, random_model
from ragkv import EngineConfig
from ragkv.model import Adapter, PromptKV, adapt
from ragkv.model.decode.batching import DecodeRow, decode_rows
from ragkv.model.decode.sampling import Sampler, Sampling
from ragkv.runtime import FairLock, openmp
from ragkv.scheduling import decode_batch as batching

TRACE = Path(__file__).parents[2] / "shared" / "data" / "traces" / "ragpulse"
PARTS = ("decode", "requests")
ARRIVALS = 20_000  # in the computed queue


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    model = random_model(options.shape)
    where = f"{options.shape}, random weights, bf16, {report.machine()['cpu']}, {options.threads} threads"
    if "decode" in options.part:
        print(f"\nDecoding together: {where}")
        _decode(adapt(model, EngineConfig().packed_bytes), options)
    if "requests" in options.part:
        print(f"\nRequests at a TTFT bound: {where}")
        _requests(model, options)


def _decode(adapter: Adapter, options: argparse.Namespace) -> None:
    found: list[dict[str, Any]] = []
    for count in options.rows:
        prompts = [_prompt(adapter, options.prompt_tokens + 37 * at, options.steps) for at in range(count)]

        def one_by_one(prompts: Sequence[PromptKV] = prompts) -> None:
            for kv in prompts:
                _answer(adapter, lambda token, kv=kv: decode_rows(adapter, [DecodeRow(kv, token)])[0], options.steps)
            _rewind(prompts, options.steps)

        def together(prompts: Sequence[PromptKV] = prompts) -> None:
            for _ in range(options.steps):
                decode_rows(adapter, [DecodeRow(kv, 5) for kv in prompts])
            _rewind(prompts, options.steps)

        sizes: list[float] = []

        def threads(prompts: Sequence[PromptKV] = prompts, sizes: list[float] = sizes) -> None:
            sizes.append(_through_batch(adapter, prompts, options.steps))
            _rewind(prompts, options.steps)

        actions = {"one by one": one_by_one, "together": together, "engine's batch": threads}
        seconds = report.alternate({name: _on_a_thread(action) for name, action in actions.items()}, options.runs)
        for name, taken in seconds.items():
            rows = {"one by one": 1.0, "together": float(count)}.get(name, statistics.fmean(sizes))
            tokens = count * options.steps / taken
            gain = seconds["one by one"] / taken
            found.append({"rows": count, "how": name, "tokens_per_s": tokens, "gain": gain, "mean_batch": rows})
    report.table(
        ("prompts", "how", "tokens/s", "of one by one", "rows a step"),
        [
            (r["rows"], r["how"], f"{r['tokens_per_s']:.1f}", f"{r['gain']:.2f}x", f"{r['mean_batch']:.1f}")
            for r in found
        ],
    )
    print("written:", report.save(f"throughput-decode-{options.shape}{options.tag}", found))


def _prompt(adapter: Adapter, length: int, max_new_tokens: int) -> PromptKV:
    """KV of random values, which change no time."""
    kv = adapter.new_kv(length + max_new_tokens)
    for tensor in (*kv.keys, *kv.values):
        tensor.normal_()
    kv.length = length
    return kv


def _rewind(prompts: Sequence[PromptKV], steps: int) -> None:
    for kv in prompts:
        kv.length -= steps


def _on_a_thread(action: Callable[[], None]) -> Callable[[], None]:
    """`action` on its own thread, as a server runs requests."""

    def run() -> None:
        openmp.release_threads()  # of this thread
        with ThreadPoolExecutor(1) as pool:
            pool.submit(action).result()

    return run


def _answer(adapter: Adapter, step: Callable[[int], torch.Tensor], steps: int) -> None:
    """Decodes `steps` tokens of one prompt with a sampler."""
    sampler, logits = Sampler(Sampling(), torch.tensor([1]), ()), torch.zeros(adapter.vocabulary)
    for _ in range(steps):
        logits = step(sampler.choose(logits))
    sampler.choose(logits)


def _through_batch(adapter: Adapter, prompts: Sequence[PromptKV], steps: int) -> float:
    """Decodes each prompt on its own thread with its own sampler; returns the mean number of rows in a step."""
    batch, sizes = batching.DecodeBatch(adapter, FairLock()), []

    def counting(adapter: Adapter, rows: Sequence[DecodeRow]) -> torch.Tensor:
        sizes.append(len(rows))
        return decode_rows(adapter, rows)

    def one(kv: PromptKV) -> None:
        with batch.slot(kv) as slot:
            _answer(adapter, lambda token: slot.verify(token)[0], steps)

    batching.decode_rows = counting
    try:
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(one, prompts))
    finally:
        batching.decode_rows = decode_rows
    return statistics.fmean(sizes)


def _requests(model: Any, options: argparse.Namespace) -> None:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    counts = options.before, options.requests, options.real
    load = serving.load(options.trace, options.chunks, options.chunk_tokens, vocabulary, *counts)
    servers, budget_bytes = _servers(model, load, options)
    full, _, fused = servers
    times = serving.services(servers, load.measured)
    unit_gaps = serving.poisson_gaps(ARRIVALS, seed=0)
    half = serving.saturation(times[full.name]) / 2
    bound_s = serving.mean_ttft(times[full.name], half, unit_gaps)
    print(
        f"{load.name}: {options.requests} requests of {options.chunks} x {options.chunk_tokens} + "
        f"{serving.QUESTION_TOKENS} tokens, after {options.before}; {len(load.corpus)} chunks; stores of "
        f"{budget_bytes / 2**20:.0f} MiB\nbound: mean TTFT {bound_s:.3f} s (full recompute at {half:.3f} requests/s)"
    )
    found = [_measure(server, times[server.name], bound_s, load, unit_gaps, options) for server in servers]
    for row in found:
        row["of_full"] = row["rate"] / found[0]["rate"]
    report.table(
        (
            "method",
            "reused",
            "service s",
            "saturation /s",
            "requests/s at bound",
            "of full",
            "real run: TTFT s",
            "computed",
        ),
        [
            (
                row["method"],
                f"{row['reused']:.0%}",
                row["service_s"],
                row["saturation"],
                row["rate"],
                f"{row['of_full']:.2f}x",
                *("-" if row[name] is None else row[name] for name in ("real_ttft_s", "computed_ttft_s")),
            )
            for row in found
        ],
    )
    print("real run: later requests at the rate found; computed: a queue of the same arrivals and the measured times")
    settings = {"bound_s": bound_s, "load": load.name, "budget_bytes": budget_bytes, "chunks": options.chunks}
    print("written:", report.save(f"throughput-requests-{options.shape}{options.tag}", [settings, *found]))
    fused.engine.close()


def _servers(
    model: Any, load: serving.Load, options: argparse.Namespace
) -> tuple[tuple[serving.Full, serving.ExactPrefix, serving.Fused], int]:
    config, corpus = model.config, load.corpus
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = config.num_hidden_layers * 2 * config.num_key_value_heads * head_dim * 2 + 2  # and a score
    budget_bytes = int(options.budget * len(corpus) * options.chunk_tokens * token_bytes)
    fused = serving.Fused(model, budget_bytes, options.ratio, corpus)
    prefix = serving.ExactPrefix(model, budget_bytes)
    piece = torch.randn(serving.piece_shape(fused.engine, options.chunk_tokens)).to(model.dtype).unsqueeze(2)
    for request in load.before:
        prefix.fill(request, piece)
    full = serving.Full(model)
    for server in (full, prefix, fused):  # warm up with an earlier prompt
        server.serve(load.before[-1])
        server.finish_background_work()
    return (full, prefix, fused), budget_bytes


def _measure(
    server: serving.Server,
    times: Sequence[serving.Service],
    bound_s: float,
    load: serving.Load,
    unit_gaps: Sequence[float],
    options: argparse.Namespace,
) -> dict[str, Any]:
    rate = serving.highest_rate(times, bound_s, unit_gaps)
    arrivals = list(itertools.accumulate(gap / rate for gap in unit_gaps[: options.real]))
    return {
        "method": server.name,
        "reused": statistics.fmean(service.reused for service in times),
        "service_s": statistics.fmean(service.prefill_s for service in times),
        "after_s": statistics.fmean(service.after_s for service in times),
        "saturation": serving.saturation(times),
        "rate": rate,
        "real_ttft_s": statistics.fmean(serving.measured_ttfts(server, load.real, arrivals)) if arrivals else None,
        "computed_ttft_s": statistics.fmean(serving.queue_ttfts(times, arrivals)) if arrivals else None,
    }


def _options() -> argparse.Namespace:
    parser = report.parser(__doc__, quick="a tiny shape and few requests: a minute on a laptop", threads=2, runs=3)
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=sorted(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16], help="prompts that decode")
    parser.add_argument(
        "--prompt-tokens", type=int, default=512, help="of the shortest prompt; each next one has 37 more"
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--trace", type=Path, default=TRACE, help="RAGPulse's folder; if missing, Zipf requests")
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--before", type=int, default=300, help="requests that filled the stores")
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--real", type=int, default=40, help="requests of the real run; 0: none")
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--budget", type=float, default=1.0, help="bytes of each store as a share of the corpus's KV")
    parser.set_defaults(tag="")
    options = parser.parse_args()
    if options.quick:
        options.shape, options.tag, options.before, options.requests, options.real = "tiny", "-quick", 60, 24, 24
    return options


if __name__ == "__main__":
    main()
