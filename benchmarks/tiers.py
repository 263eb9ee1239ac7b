"""How fast each tier reads entries, compared with raw preadv of the same files in the same run.

    python -m benchmarks.tiers [--quick] [--shapes NAME ...] [--codecs raw|int8 ...] [--directory DIR]

Claim: a request's checked reads from the disk tier (identity, token ids and a checksum of every byte) reach 85 % of
the rate of raw preadv calls for the same bytes, into as much memory, past the page cache (O_DIRECT), with as many
threads: "fusor", "of a ring". "lease" reads entry after entry into the same buffers, as many layers at once as the
tier asks for. "fusor" reads like a request: leases on eight chunks, whose slices `LayerReader` reads ahead. Raw reads
fetch one layer at a time into one buffer a thread and look at no byte. "preadv, a ring" reads into as many buffers as
a request has, which is more memory than a processor caches. "preadv, xxh3" also hashes every byte. The speed of a
shared disk changes within a second, so the methods alternate after every eight files, in random order. A share is the
median of a method's rate over the rate of the raw reads in the same round, with its quartiles. posix_fadvise makes
files cold. Rates count stored bytes, except "of KV", which counts decoded bytes. Not shown: the load of other
processes on the disk, and a device's own cache, which an unprivileged program cannot drop. Values are random, which
does not change the time.
"""

import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import xxhash
from safetensors.torch import load_file

from benchmarks import report
from ragkv.fusion import LayerReader, Readers
from ragkv.store import (
    LRU,
    DiskTier,
    EncodedEntry,
    Entry,
    EntryInfo,
    Identity,
    Lease,
    MemoryTier,
    ReadOnlyDiskTier,
    Tier,
    aligned_empty,
)
from ragkv.store.record import read_head
from ragkv.store.tiers.disk_file import HUGE_PAGE

GIB = 1024**3
CPU = torch.device("cpu")
IDENTITY = Identity("w", "a", "r", "bfloat16", "", "t", "c")
SHAPES = {  # layers, KV heads, head dim; 512 tokens each
    "Qwen2.5-0.5B": (24, 2, 64),
    "Llama-3-8B": (32, 8, 128),
}
CHUNKS = 8  # of a request
READ_AHEAD = 2  # layers, as the settings have it
RING = "preadv, a ring"


@dataclass(frozen=True)
class ReadMethod:
    """One method of reading files."""

    what: str
    condition: str  # "direct" (past the page cache), "cold", "warm"
    threads: int
    read: Callable[[slice], None]  # of all files, these
    baseline: tuple[str, str, int] | None = None  # the raw reads it is compared with

    @property
    def name(self) -> tuple[str, str, int]:
        return self.what, self.condition, self.threads


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    shape: str
    codec: str
    condition: str
    what: str
    threads: int
    gib_per_s: float  # of stored bytes, median of the rounds
    kv_gib_per_s: float  # of keys and values, decoded
    share_of_raw: float | None  # median over the rounds
    quartiles: tuple[float, float] | None  # of them
    share_of_ring: float | None  # of raw reads into as much memory as a request has
    cpu_s_per_gib: float  # of stored bytes


class Files:
    """Entries of one shape in one codec, on disk and in memory, and the methods to read them."""

    def __init__(self, shape: str, codec: str, directory: Path, total_bytes: int) -> None:
        self.entries = make_entries(shape, codec, total_bytes)
        self.kv_bytes = sum(entry.info.size_bytes for entry in self.entries)
        self.stored_bytes = sum(EncodedEntry.of(entry).stored_bytes for entry in self.entries)
        self.identity, self.directory, self.codec = self.entries[0].info.identity, directory, codec
        self.memory = MemoryTier(2 * self.kv_bytes, LRU())
        with closing(self.tier()) as tier:
            begin = time.perf_counter()
            for entry in self.entries:
                assert tier.put(entry)
            self.put_gib_per_s = self.stored_bytes / GIB / (time.perf_counter() - begin)
        for entry in self.entries:
            assert self.memory.put(entry)
        self.paths = [next(directory.glob(f"entries/*/{entry.info.key}.safetensors")) for entry in self.entries]
        with self.paths[0].open("rb") as file:
            head = read_head(file.fileno(), self.entries[0].info.key)
        self.layer_bytes, self.offsets = head.layer_bytes, head.layer_offsets

    def tier(self) -> DiskTier:
        return DiskTier(self.directory, 3 * self.kv_bytes + GIB, LRU())

    def lease(self, tier: Tier, entry: Entry) -> Lease:
        found = tier.lease(self.identity, entry.info.token_ids)
        assert found is not None
        return found

    def raw(self, flags: int, threads: int, hashed: bool = False, ring: int = 1) -> Callable[[slice], None]:
        """Reads by preadv, one layer a request, without a check, or with a checksum that is not compared.

        A thread reads into one buffer again and again, or into a ring of buffers. Memory scattered over the heap would
        halve the rate of every method.
        """
        size = self.layer_bytes + -self.layer_bytes % 4096
        memory = aligned_empty((threads, max(ring * size, HUGE_PAGE)), torch.uint8).zero_()
        buffers = [[memoryview(piece.numpy()) for piece in row[: ring * size].split(size)] for row in memory]

        def read(some: slice, share: int) -> None:
            ring_buffers = itertools.cycle(buffers[share])
            for path in self.paths[some][share::threads]:
                fd = os.open(path, os.O_RDONLY | flags)
                for offset, buffer in zip(self.offsets, ring_buffers, strict=False):
                    assert os.preadv(fd, [buffer], offset) == size
                    if hashed:
                        xxhash.xxh3_64_intdigest(buffer)
                os.close(fd)

        return lambda some: spread(lambda share: read(some, share), threads)

    def leases(self, tier: Tier, threads: int) -> Callable[[slice], None]:
        """Reads by leases, as many layers a call as they ask for, into the same buffers each time."""
        info = self.entries[0].info
        with self.lease(tier, self.entries[0]) as lease:
            together = lease.layers_per_read
        memory = aligned_empty((threads, max(together * info.layer_bytes, HUGE_PAGE)), torch.uint8).zero_()
        outs = memory[:, : together * info.layer_bytes].view(info.dtype).unflatten(1, (together, *info.shape))

        def read(some: slice, share: int) -> None:
            for entry in self.entries[some][share::threads]:
                with self.lease(tier, entry) as lease:
                    for first in range(0, info.layers, together):
                        lease.read_layers(first, list(outs[share][: info.layers - first]))

        return lambda some: spread(lambda share: read(some, share), threads)

    def fusor(self, tier: Tier, threads: int) -> Callable[[slice], None]:
        """Reads like a request: several leases, with layers read ahead."""
        readers = Readers(threads)

        def read(some: slice) -> None:
            with ExitStack() as stack:
                leases = [stack.enter_context(self.lease(tier, entry)) for entry in self.entries[some]]
                layers = leases[0].info.layers
                reader = stack.enter_context(LayerReader(leases, layers, READ_AHEAD, readers, CPU))
                for layer in range(layers):
                    reader.layer(layer)

        return read

    def methods(self, direct: Tier, buffered: Tier) -> Iterator[ReadMethod]:
        """Every method; raw reads come before the methods compared with them."""
        for condition, tier, flags in (("direct", direct, os.O_DIRECT), ("cold", buffered, 0)):
            for threads in (1, 2):
                baseline = ("raw preadv", condition, threads)
                yield ReadMethod("raw preadv", condition, threads, self.raw(flags, threads))
                ring = (READ_AHEAD + 1) * CHUNKS // threads
                yield ReadMethod(RING, condition, threads, self.raw(flags, threads, ring=ring), baseline)
                yield ReadMethod("preadv, xxh3", condition, threads, self.raw(flags, threads, hashed=True), baseline)
                yield ReadMethod("lease", condition, threads, self.leases(tier, threads), baseline)
                yield ReadMethod("fusor", condition, threads, self.fusor(tier, threads), baseline)
        if self.codec == "raw":
            yield ReadMethod("safetensors, unchecked", "cold", 1, self._load_files, ("raw preadv", "cold", 1))
        yield ReadMethod("raw preadv", "warm", 1, self.raw(0, 1))
        yield ReadMethod("lease", "warm", 1, self.leases(buffered, 1), ("raw preadv", "warm", 1))
        yield ReadMethod("memory tier", "warm", 1, self.leases(self.memory, 1), ("raw preadv", "warm", 1))

    def groups(self) -> list[slice]:
        """All files, in groups of eight, as for a request."""
        return [slice(first, first + CHUNKS) for first in range(0, len(self.paths) - CHUNKS + 1, CHUNKS)]

    def _load_files(self, some: slice) -> None:
        for path in self.paths[some]:
            load_file(path)

    def drop_pages(self, some: slice) -> None:
        """Drop these files from the page cache, so that the next read is cold."""
        for path in self.paths[some]:
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def spread(read: Callable[[int], None], threads: int) -> None:
    """Run `read(0)` ... `read(threads - 1)` in parallel."""
    if threads == 1:
        read(0)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))


def make_entries(shape: str, codec: str, total_bytes: int) -> list[Entry]:
    """Random entries (L, 2, G, 512, D) of at most `total_bytes`."""
    layers, kv_heads, head_dim = SHAPES[shape]
    identity = replace(IDENTITY, codec=codec)
    entries = []
    for number in range(max(CHUNKS, total_bytes // (layers * 2 * kv_heads * 512 * head_dim * 2))):
        ids = tuple(range(number * 1000, number * 1000 + 512))
        info = EntryInfo(identity.key(ids), identity, ids, "f", layers, kv_heads, head_dim)
        kv = torch.randint(-(2**13), 2**13, (layers, *info.shape), dtype=torch.int16)
        entries.append(Entry(info, (kv / 2**10).bfloat16()))
    return entries


def measure(files: Files, methods: list[ReadMethod], rounds: int, shape: str) -> list[Row]:
    """Every method over every group of files, `rounds` times, in random order."""
    order = random.Random(0)
    rates: dict[tuple[str, str, int], list[float]] = {method.name: [] for method in methods}
    spent: dict[tuple[str, str, int], list[float]] = {method.name: [] for method in methods}
    a_group = files.stored_bytes / len(files.entries) * CHUNKS / GIB
    for some in files.groups() * rounds:
        for method in order.sample(methods, len(methods)):
            if method.condition == "warm":
                method.read(some)
            else:
                files.drop_pages(some)
            begin, cpu_begin = time.perf_counter(), time.process_time()
            method.read(some)
            rates[method.name].append(a_group / (time.perf_counter() - begin))
            spent[method.name].append((time.process_time() - cpu_begin) / a_group)
    rows = []
    for method in methods:
        shares = _shares(rates, method.name, method.baseline)
        ring = (RING, method.condition, method.threads)
        of_ring = _shares(
            rates, method.name, ring if method.baseline and ring in rates and ring != method.name else None
        )
        quartiles = statistics.quantiles(shares, n=4) if shares else []
        rate = statistics.median(rates[method.name])
        rows.append(
            Row(
                shape,
                files.codec,
                method.condition,
                method.what,
                method.threads,
                rate,
                rate * files.kv_bytes / files.stored_bytes,
                statistics.median(shares) if shares else None,
                (quartiles[0], quartiles[2]) if shares else None,
                statistics.median(of_ring) if of_ring else None,
                statistics.median(spent[method.name]),
            )
        )
    return rows


def _shares(
    rates: dict[tuple[str, str, int], list[float]], name: tuple[str, str, int], baseline: tuple[str, str, int] | None
) -> list[float]:
    """The rate of one method over the rate of another, for each round."""
    return [a / b for a, b in zip(rates[name], rates[baseline], strict=True)] if baseline else []


def run(shape: str, codec: str, directory: Path, total_bytes: int, rounds: int) -> list[Row]:
    """One shape in one codec."""
    files = Files(shape, codec, directory, total_bytes)
    with closing(files.tier()) as buffered, closing(ReadOnlyDiskTier(directory, direct=True)) as direct:
        rows = measure(files, list(files.methods(direct, buffered)), rounds, shape)
    put = files.put_gib_per_s
    put_kv = put * files.kv_bytes / files.stored_bytes
    rows.append(Row(shape, codec, "", "put, synced", 1, put, put_kv, None, None, None, 0.0))
    return rows


def show(rows: list[Row]) -> None:
    """The table on the terminal."""
    print("entries of 512 tokens, bf16 or what int8 makes of it; random values, real shapes")
    headings = (
        "shape",
        "codec",
        "",
        "read by",
        "threads",
        "GiB/s",
        "of KV",
        "of raw",
        "quartiles",
        "of a ring",
        "CPU s/GiB",
    )
    cells = []
    for row in rows:
        between = "" if row.quartiles is None else f"{row.quartiles[0]:.0%} - {row.quartiles[1]:.0%}"
        shares = [_percent(row.share_of_raw), between, _percent(row.share_of_ring)]
        numbers = (f"{row.gib_per_s:.2f}", f"{row.kv_gib_per_s:.2f}", *shares, f"{row.cpu_s_per_gib:.3f}")
        cells.append((row.shape, row.codec, row.condition, row.what, row.threads, *numbers))
    report.table(headings, cells)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def main() -> None:
    """Measure, print the table, and write the JSON file."""
    parser = report.parser(__doc__, quick="512 MiB a shape, two rounds")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--codecs", nargs="+", default=["raw", "int8"])
    parser.add_argument(
        "--directory", type=Path, help="on the device to measure; the system's temporary one if not given"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    total_bytes, rounds = (GIB // 2, 2) if options.quick else (GIB, 9)
    rows = []
    for shape in options.shapes:
        for codec in options.codecs:
            with tempfile.TemporaryDirectory(dir=options.directory) as directory:
                rows += run(shape, codec, Path(directory), total_bytes, rounds)
    show(rows)
    print("written:", report.save("tiers-quick" if options.quick else "tiers", [asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
