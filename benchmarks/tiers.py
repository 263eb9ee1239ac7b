"""How fast each tier gives an entry back, beside what the machine can do: raw preadv of the same file, same run.

    python -m benchmarks.tiers [--quick] [--directory DIR]

Claim: a checked read from the disk tier (identity, token ids and a checksum of every byte) reaches 85 % of a raw preadv
of the same bytes. Cold means that the files' pages were dropped from the page cache before (posix_fadvise), one reader
thread unless a row says otherwise. Entries are random numbers: their values do not change time. Not shown: other
processes' load on the disk, and a device's own cache, which no unprivileged program can drop.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from ragkv.store import LRU, DiskTier, Entry, EntryInfo, Identity, MemoryTier, Tier, aligned_empty

GIB = 1024**3
IDENTITY = Identity("w", "a", "r", "bfloat16", "", "t", "c")
SHAPES = {  # layers, KV heads, head dim; 512 tokens each
    "Qwen2.5-0.5B": (24, 2, 64),
    "Llama-3-8B": (32, 8, 128),
}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    shape: str
    condition: str  # "cold", "direct" (cold, past the page cache), "warm"; "" for writing
    what: str
    gib_per_s: float  # best of the rounds, as what disturbs only slows
    share_of_raw: float | None = None  # of the raw preadv in the same condition
    cpu_s_per_gib: float | None = None
    p50_ms: float | None = None  # of one entry
    p99_ms: float | None = None


def make_entries(shape: str, total_bytes: int) -> list[Entry]:
    """Random entries (L, 2, G, 512, D) of at most `total_bytes`."""
    layers, kv_heads, head_dim = SHAPES[shape]
    entry_bytes = layers * 2 * kv_heads * 512 * head_dim * 2
    entries = []
    for number in range(max(2, total_bytes // entry_bytes)):
        ids = tuple(range(number * 1000, number * 1000 + 512))
        info = EntryInfo(IDENTITY.key(ids), IDENTITY, ids, "f", layers, kv_heads, head_dim)
        kv = torch.randint(-(2**15), 2**15, (layers, 2, kv_heads, 512, head_dim), dtype=torch.int16)
        entries.append(Entry(info, kv.view(torch.bfloat16)))
    return entries


def drop_pages(paths: list[Path]) -> None:
    """Make the next read of `paths` a cold one."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_through(tier: Tier, entry: Entry, out: torch.Tensor) -> None:
    """One entry out of a tier, as the fusor reads it."""
    lease = tier.lease(IDENTITY, entry.info.token_ids)
    assert lease is not None
    with lease:
        for layer in range(entry.info.layers):
            lease.read_layer(layer, out)


def read_raw(path: Path, out: torch.Tensor, flags: int) -> None:
    """The bytes of one file by preadv, in requests of one layer slice, unchecked."""
    fd = os.open(path, os.O_RDONLY | flags)
    view = memoryview(out.view(-1).view(torch.uint8).numpy())
    offset = 0
    while (got := os.preadv(fd, [view], offset)) == len(view):
        offset += got
    os.close(fd)


def measure(
    work: Callable[[int], object], count: int, size: int, prepare: Callable[[], object], rounds: int, threads: int = 1
) -> tuple[float, float, float, float]:
    """GiB/s, CPU seconds per GiB and the P50 and P99 milliseconds of `work(0..count - 1)`, `size` bytes in all."""
    best, cpu, times = 0.0, 0.0, list[float]()

    def timed(number: int) -> None:
        begin = time.perf_counter()
        work(number)
        times.append(1e3 * (time.perf_counter() - begin))

    for _ in range(rounds):
        prepare()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        if threads == 1:
            for number in range(count):
                timed(number)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(timed, range(count)))
        rate = size / GIB / (time.perf_counter() - begin)
        if rate > best:
            best, cpu = rate, (time.process_time() - cpu_begin) / (size / GIB)
    return best, cpu, statistics.median(times), statistics.quantiles(times, n=100)[98]


def run(shape: str, directory: Path, total_bytes: int, rounds: int) -> list[Row]:
    """Every way to get the entries of one shape back."""
    entries = make_entries(shape, total_bytes)
    size = sum(entry.kv.nbytes for entry in entries)
    rows: list[Row] = []
    raw: dict[str, float] = {}

    def add(what: str, condition: str, work: Callable[[int], object], threads: int = 1) -> None:
        prepare = (lambda: drop_pages(paths)) if condition != "warm" else (lambda: None)
        rate, cpu, p50, p99 = measure(work, len(entries), size, prepare, rounds, threads)
        if what.startswith("raw"):
            raw[condition] = rate
        share = rate / raw[condition] if condition in raw else None
        rows.append(Row(shape, condition, what, rate, share, cpu, p50, p99))

    memory = MemoryTier(2 * size, LRU())
    disk = DiskTier(directory, 2 * size, LRU())
    for entry in entries:
        assert memory.put(entry)
    begin = time.perf_counter()
    for entry in entries:
        assert disk.put(entry)
    written = size / GIB / (time.perf_counter() - begin)
    paths = [next(directory.glob(f"entries/*/{entry.info.key}.safetensors")) for entry in entries]
    outs = [aligned_empty(entries[0].kv[0].shape, torch.bfloat16) for _ in range(len(entries))]

    add("raw preadv", "cold", lambda n: read_raw(paths[n], outs[n], 0))
    add("disk tier", "cold", lambda n: read_through(disk, entries[n], outs[n]))
    add("disk tier, 2 threads", "cold", lambda n: read_through(disk, entries[n], outs[n]), threads=2)
    add("safetensors, unchecked", "cold", lambda n: load_file(paths[n]))
    add("raw preadv", "direct", lambda n: read_raw(paths[n], outs[n], os.O_DIRECT))
    disk.close()
    disk = DiskTier(directory, 2 * size, LRU(), direct=True)
    add("disk tier", "direct", lambda n: read_through(disk, entries[n], outs[n]))
    add("disk tier, 2 threads", "direct", lambda n: read_through(disk, entries[n], outs[n]), threads=2)
    disk.close()
    disk = DiskTier(directory, 2 * size, LRU())
    add("raw preadv", "warm", lambda n: read_raw(paths[n], outs[n], 0))
    add("disk tier", "warm", lambda n: read_through(disk, entries[n], outs[n]))
    add("memory tier (views)", "warm", lambda n: read_through(memory, entries[n], outs[n]))
    rows.append(Row(shape, "", "put, synced to disk", written))
    for entry in entries:
        disk.delete(entry.info.key)
    disk.close()
    return rows


def show(rows: list[Row]) -> None:
    """The table on the terminal."""
    table = Table(title="entries of 512 tokens, bf16; random values, real shapes")
    for name in ("shape", "", "read by", "GiB/s", "of raw", "CPU s/GiB", "P50 ms", "P99 ms"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("shape", "", "read by") else "right")
    for row in rows:
        numbers = [(row.gib_per_s, ".2f"), (row.share_of_raw, ".0%"), (row.cpu_s_per_gib, ".3f")]
        numbers += [(row.p50_ms, ".2f"), (row.p99_ms, ".2f")]
        cells = ["" if value is None else format(value, style) for value, style in numbers]
        table.add_row(row.shape, row.condition, row.what, *cells)
    Console().print(table)


def main() -> None:
    """Measure, show, and write the JSON beside."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="256 MiB a shape, two rounds")
    parser.add_argument(
        "--directory", type=Path, help="on the device to measure; the system's temporary one if not given"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    total_bytes, rounds = (GIB // 4, 2) if options.quick else (GIB, 5)
    rows = []
    for shape in SHAPES:
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            rows += run(shape, Path(directory), total_bytes, rounds)
    show(rows)
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "system": platform.system()}
    (results / "tiers.json").write_text(
        json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1)
    )


if __name__ == "__main__":
    main()
