"""KCache against ordinary decoding in the same run: speed, bytes and rows fetched.

Speed is measured with a real shape, random weights and random KV. These do not change the time of
ordinary decoding. But U, how many rows the query heads of a KV head share, belongs to this KV and
differs in a trained model. `--device cuda` is the paper's table 3: the LLaMA-2-7B shape, its
contexts and batch sizes.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from benchmarks import report
from benchmarks.random_model import random_model
from ragkv.config import KCacheConfig
from ragkv.model import Adapter, PromptKV, adapt
from ragkv.model.decode.batching import DecodeRow, decode_rows
from ragkv.model.kcache import HostValues, OffloadedKV

MIB = 1 << 20
GIB = 1 << 30
# batch sizes by context
TABLE_3 = {1024: (1, 8, 16), 4096: (1, 8, 14, 23), 7168: (1, 8, 13), 15360: (1, 3, 5)}


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {"options": {key: str(value) for key, value in vars(options).items()}}
    if options.device == "cuda":
        model = random_model(options.shape, torch.float16, "cuda", options.layers)
        results["table 3"] = table_3(adapt(model), options)
    else:
        adapter = adapt(
            random_model(options.shape, getattr(torch, options.dtype), layers=options.layers)
        )
        results["speed"] = speed(adapter, options)
    print("written:", report.save(f"kcache-{options.shape}-{options.device}", results))


def random_kv(adapter: Adapter, length: int, config: KCacheConfig | None) -> PromptKV:
    """The KV of `length` random positions after a prefill."""
    size = (adapter.kv_shape, length + 8, adapter.dtype, adapter.device)
    kv = PromptKV(*size) if config is None else OffloadedKV(*size, config)
    generator = torch.Generator(adapter.device).manual_seed(length)
    shape = (2, 1, adapter.kv_heads, length, adapter.head_dim)
    noise = torch.randn(shape, generator=generator, device=adapter.device).to(adapter.dtype)
    for layer in range(adapter.layer_count):
        kv.put(layer, 0, noise[0], noise[1])
        kv.finish_prefill(layer, length)
    kv.length = length
    return kv


def stepper(adapter: Adapter, kvs: Sequence[PromptKV], length: int) -> Callable[[], None]:
    """A function that decodes one step of all `kvs`, always over `length` positions."""

    def step() -> None:
        for kv in kvs:
            kv.length = length
        decode_rows(adapter, [DecodeRow(kv, 7) for kv in kvs])
        if adapter.device.type == "cuda":
            torch.cuda.synchronize()

    return step


def rows_fetched(step: Callable[[], None]) -> int:
    """How many rows a step reads from host memory; a row is one KV head at one position."""
    rows = 0
    fetch = HostValues.fetch

    def counted(values: HostValues, wanted: torch.Tensor) -> torch.Tensor:
        nonlocal rows
        rows += int((wanted >= 0).sum())
        return fetch(values, wanted)

    with mock.patch.object(HostValues, "fetch", counted):
        step()
    return rows


def speed(adapter: Adapter, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One prompt: every N and L at every context, alternating with ordinary decoding."""
    found = []
    for length in options.contexts:
        ordinary = random_kv(adapter, length, None)
        for resident in options.resident:
            kv = random_kv(adapter, length, KCacheConfig(1, resident))
            assert isinstance(kv, OffloadedKV)

            def step(top_n: int, kv: OffloadedKV = kv, length: int = length) -> None:
                kv._config = replace(kv._config, top_n=top_n)  # every N uses the same KV
                stepper(adapter, [kv], length)()

            actions: dict[Any, Callable[[], None]] = {None: stepper(adapter, [ordinary], length)}
            actions |= {n: lambda n=n, step=step: step(n) for n in options.top_n if n < length}
            medians = report.alternate(actions, options.runs)
            fetched = {n: rows_fetched(action) for n, action in actions.items()}
            share = (adapter.layer_count + resident) / (2 * adapter.layer_count)
            for top_n, seconds in medians.items():
                whole = top_n is None
                own = ordinary if whole else kv
                found.append(
                    {
                        "context": length,
                        "N": top_n,
                        "L": None if whole else resident,
                        "tokens/s": 1 / seconds,
                        "against ordinary": medians[None] / seconds,
                        "device MiB": own.device_bytes / MIB,
                        "of ordinary": own.device_bytes / ordinary.device_bytes,
                        "(n+L)/2n": 1.0 if whole else share,
                        "host MiB": 0.0 if whole else kv.host_bytes / MIB,
                        "rows a step": fetched.get(top_n, 0),
                        "rows a head": fetched.get(top_n, 0)
                        / max(1, adapter.layer_count - resident)
                        / adapter.kv_heads,
                    }
                )
    layers = f", {options.layers} layers" if options.layers else ""
    print(
        f"\n{options.shape}{layers} (random weights, random KV), {options.dtype}, cpu, "
        f"{options.threads} threads,"
    )
    print("one prompt, alternating with ordinary decoding")
    _table(found)
    return found


def table_3(adapter: Adapter, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The paper's contexts and batch sizes; batches that exceed `--device-gib` are skipped (OOM in
    the paper).
    """
    found = []
    weights = sum(p.numel() * p.element_size() for p in adapter.model.parameters())
    free_bytes = int(options.device_gib * GIB) - weights
    for length, counts in TABLE_3.items():
        for count in counts:
            for top_n in (None, 32, 64, 128):
                config = None if top_n is None else KCacheConfig(top_n, 1)
                kvs = [random_kv(adapter, length, config)]
                size = kvs[0].device_bytes * count
                row = {
                    "context": length,
                    "batch": count,
                    "N": top_n,
                    "device GiB": size / GIB,
                    "tokens/s": None,
                }
                if size <= free_bytes:
                    kvs += [random_kv(adapter, length, config) for _ in range(count - 1)]
                    row["tokens/s"] = (
                        count
                        / report.alternate({0: stepper(adapter, kvs, length)}, options.runs)[0]
                    )
                found.append(row)
                del kvs
    print(
        f"\n{options.shape} (random weights, random KV), float16, L=1, {options.device_gib} GiB "
        "of device memory"
    )
    _table(found)
    return found


def _table(rows: list[dict[str, Any]]) -> None:
    report.table(
        list(rows[0]), [["-" if cell is None else cell for cell in row.values()] for row in rows]
    )


def _options() -> argparse.Namespace:
    parser = report.parser(
        __doc__, quick="a tiny shape and few settings, for a minute", threads=2, runs=4
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--device-gib", type=float, default=64.0, help="device memory; default: the paper's"
    )
    parser.add_argument("--shape", default=None, help="[default: qwen2.5-0.5b; llama-2-7b on cuda]")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--dtype", default="bfloat16", help="in the CPU benchmark")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--top-n", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512])
    parser.add_argument("--resident", type=int, nargs="+", default=[0, 1, 2, 3])
    options = parser.parse_args()
    options.shape = options.shape or ("llama-2-7b" if options.device == "cuda" else "qwen2.5-0.5b")
    if options.quick:
        options.shape = "llama-2-7b" if options.device == "cuda" else "tiny"
        options.contexts = [1024, 4096, 16384]
        options.top_n = [16, 128]
        options.resident = [0, 1]
        options.runs = 3
    return options


if __name__ == "__main__":
    main()
