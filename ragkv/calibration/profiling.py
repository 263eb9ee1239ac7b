"""Measuring a profile: what one model takes on one machine, through the same adapter, fusor and leases as requests.

Synthetic entries stand in for documents; what they hold does not change time. Every measurement is a turn at the model,
so requests go on between two. Medians over rounds; fits weigh relative errors, and no time falls with a length. Disk is
read past the page cache, in files of its own beside the store's.
"""

import itertools
import logging
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ragkv.engine import Engine
from ragkv.errors import ConfigError, StoreError
from ragkv.fusion import LayerReader, Plan, ResidentLease, Span, SpanKind, SpanState, make_selector
from ragkv.fusion.profile import (
    LengthFit,
    LengthPoint,
    Profile,
    RecomputeFit,
    RecomputePoint,
    TierPoint,
    TierSpeed,
)
from ragkv.fusion.profile import save as save_profile
from ragkv.fusion.readahead import UNMEASURED
from ragkv.inference import subject_of
from ragkv.model import full_pass
from ragkv.store import LRU, DiskTier, Entry, EntryInfo, Identity, Lease, MemoryTier, Tier, TierKind

log = logging.getLogger(__name__)

LENGTHS = (128, 384, 768, 1536)  # prompt tokens S
QUICK_LENGTHS = (128, 384)
RATIOS = (0.0, 0.1, 0.3, 0.7)
CHUNK_TOKENS = 128
QUESTION_TOKENS = 32
SLICE_TOKENS = (64, 128, 256, 512)  # of entries read from a tier
TIER_ENTRIES = 4
ROUNDS = 3
TIER_ROUNDS = 9  # of reads, which take little
BUDGET_S = 90.0  # no further round begins after it
COPY_BYTES = 64 * 2**20

Progress = Callable[[int, int], None]


def measure(engine: Engine, *, quick: bool = False, on_progress: Progress | None = None) -> Profile:
    """The profile of `engine`'s model where it runs; about a minute or two for half a billion weights on a laptop.

    `quick` takes shorter prompts and fewer rounds. `on_progress(done, total)` is called after each measurement.
    """
    return _Measuring(engine, quick, on_progress or (lambda _done, _total: None)).profile()


def save(engine: Engine, profile: Profile) -> Path | None:
    """Let `engine` go by `profile` from now on, and every later engine like it on the same store directory.

    The profile's file, or `None` if the engine has no directory. Raises `ProfileError` if it is of another model or
    machine.
    """
    engine.parts.load_control.apply_profile(profile)
    directory = engine.config.store.directory
    return None if directory is None else save_profile(profile, directory)


def disk_speed(engine: Engine, *, quick: bool = False) -> TierSpeed:
    """How fast the disk of `engine`'s store is now; shared ones drift. Raises `ConfigError` if it has no directory."""
    if engine.config.store.directory is None:
        raise ConfigError("The engine has no store directory, so there is no disk to measure: set store.directory.")
    return _Measuring(engine, quick, lambda _done, _total: None).disk(engine.config.store.directory)


def reading_s(engine: Engine, leases: Sequence[Lease]) -> float:
    """Seconds that every layer of `leases` takes to read as a request reads them: by its threads, as far ahead."""
    adapter, ahead = engine.parts.adapter, engine.config.fusion.read_ahead_layers
    began = time.perf_counter()
    with LayerReader(
        leases, adapter.layer_count, UNMEASURED if ahead is None else ahead, engine.parts.readers, adapter.device
    ) as reader:
        for layer in range(adapter.layer_count):
            reader.layer(layer)
        _settle(adapter.device)
        return time.perf_counter() - began


class _Measuring:
    """One measurement of one engine."""

    def __init__(self, engine: Engine, quick: bool, on_progress: Progress) -> None:
        self._engine, self._adapter, self._on_progress = engine, engine.parts.adapter, on_progress
        self._rounds = 2 if quick else ROUNDS
        self._tier_rounds = 3 if quick else TIER_ROUNDS
        self._lengths = _lengths(self._adapter.context_length, QUICK_LENGTHS if quick else LENGTHS)
        self._identity = engine.parts.encoder.identity
        self._generator = torch.Generator().manual_seed(0)
        self._stored_bytes_per_token = 0.0
        self._began = time.perf_counter()
        self._done = 0
        self._total = self._rounds * len(self._lengths) * (len(RATIOS) + 2) + 2 * len(SLICE_TOKENS) + 1

    def profile(self) -> Profile:
        """Measure all of it."""
        adapter = self._adapter
        start_s = self._start_s()
        prefill, decode, recompute, placing_s = self._passes(start_s)
        tiers = {TierKind.MEMORY.value: self._tier(MemoryTier(2**62, LRU()))}
        if (directory := self._engine.config.store.directory) is not None:
            tiers[TierKind.DISK.value] = self.disk(directory)
        tiers |= self._remote()
        self._step(self._total - self._done)
        return Profile(
            subject=subject_of(adapter, self._identity),
            layers=adapter.layer_count,
            kv_bytes_per_token=adapter.kv_bytes_per_token,
            stored_bytes_per_token=self._stored_bytes_per_token,
            prefill=prefill,
            recompute=recompute,
            place_token_layer_s=placing_s,
            start_s=start_s,
            decode=decode,
            tiers=tiers,
            copy_bytes_per_s=_copy_bytes_per_s(adapter.device) if adapter.device.type == "cuda" else None,
        )

    def disk(self, directory: str) -> TierSpeed:
        """The disk under `directory`, past the page cache."""
        with tempfile.TemporaryDirectory(prefix="profile-", dir=_made(directory)) as scratch:
            return self._tier(DiskTier(scratch, 2**62, LRU(), direct=True), Path(scratch))

    def _remote(self) -> dict[str, TierSpeed]:
        """Shared storage, under a prefix of its own; what does not answer is left out."""
        settings = self._engine.config.store
        found: dict[str, TierSpeed] = {}
        if settings.redis is None and settings.s3 is None:
            return found
        from ragkv.store.remote import open_remote

        here = f"-profile-{os.getpid()}"
        redis = None if settings.redis is None else replace(settings.redis, prefix=settings.redis.prefix + here)
        s3 = None if settings.s3 is None else replace(settings.s3, prefix=settings.s3.prefix + here)
        for tier in open_remote(replace(settings, directory=None, redis=redis, s3=s3)):
            try:
                found[tier.kind.value] = self._tier(tier)
            except StoreError as error:
                log.warning("%s was not measured: %s", tier.kind.value, error)
                tier.close()
        return found

    # Passes of the model

    def _start_s(self) -> float:
        """Embedding the question and the logits of one row."""
        adapter = self._adapter
        hidden = adapter.embed(self._ids(1))

        def work() -> None:
            adapter.embed(self._ids(QUESTION_TOKENS))
            adapter.logits(hidden)

        self._timed(work)  # warm
        seconds = statistics.median(self._timed(work) for _ in range(5))
        self._step()
        return seconds

    def _passes(self, start_s: float) -> tuple[LengthFit, LengthFit, RecomputeFit, float]:
        """Prefill, decode step, a layer of a selective pass, and placing a token in a layer."""
        entries = self._entries(CHUNK_TOKENS, -(-max(self._lengths) // CHUNK_TOKENS))
        inner = max(1, self._adapter.layer_count - 1)
        full: dict[int, list[float]] = defaultdict(list)
        steps: dict[int, list[float]] = defaultdict(list)
        layers: dict[tuple[int, int, int], list[float]] = defaultdict(list)  # by rows, keys, placed tokens
        placing: list[float] = []
        self._pass(self._fused_plan(entries, self._lengths[0])[0], 0.3)  # warm
        for _ in range(self._rounds):
            for length in self._lengths:
                full[length].append(self._pass(self._whole_plan(length), 0.0).whole_s)
                steps[length].append(self._decode_s(length))
                self._step(2)
                for ratio in RATIOS:
                    plan, placed = self._fused_plan(entries, length)
                    done = self._pass(plan, ratio)
                    layers[done.rows, length, placed].append(max(0.0, done.whole_s - done.placing_s - start_s) / inner)
                    placing.append(done.placing_s / (inner * placed))
                    self._step()
            if time.perf_counter() - self._began > BUDGET_S:
                break
        fit, placed_s = _fit_recompute(layers, together=self._adapter.device.type == "cuda")
        placing_s = statistics.median(placing) if placed_s is None else placed_s
        return _fit_length(full), _fit_length(steps, quadratic=False), fit, placing_s

    def _pass(self, plan: Plan, ratio: float) -> "_Pass":
        """One pass of the fusor. Placing is timed apart where the host waits for it."""
        engine, device = self._engine, self._adapter.device
        with (
            engine.parts.fusor.open(plan, make_selector("first-k"), ratio) as fusing,
            engine.parts.activity.acquire_compute_lock(),
        ):
            _settle(device)
            began = time.perf_counter()
            fused = fusing.run()
            _settle(device)
            whole_s = time.perf_counter() - began - fused.load_s
        rows = plan.forced.numel() + fused.selected_by_layer[0].numel()
        return _Pass(rows, whole_s, fused.fuse_s if device.type == "cpu" else 0.0)

    def _fused_plan(self, entries: Sequence[Entry], length: int) -> tuple[Plan, int]:
        """Chunks fused up to a question, `length` tokens in all; and how many are placed."""
        question = min(QUESTION_TOKENS, length // 4)
        spans, at = [], 0
        for number, entry in enumerate(entries):
            stop = min(at + entry.info.tokens, length - question)
            if at < stop:
                spans.append(Span(SpanKind.CHUNK, at, stop, SpanState.FUSED, ResidentLease(entry), number))
                at = stop
        spans.append(Span(SpanKind.QUESTION, at, length, SpanState.COMPUTED))
        return Plan.of(self._ids(length).cpu(), spans), at

    def _whole_plan(self, length: int) -> Plan:
        return Plan.of(self._ids(length).cpu(), [Span(SpanKind.QUESTION, 0, length, SpanState.COMPUTED)])

    def _decode_s(self, length: int) -> float:
        adapter, token = self._adapter, self._ids(1)
        kv = adapter.new_kv(length + 1)
        for tensor in (*kv.keys, *kv.values):
            tensor.normal_()
        kv.length = length
        return statistics.median(
            self._timed(lambda: adapter.logits(full_pass(adapter, token, kv, start=length))) for _ in range(3)
        )

    @torch.no_grad()
    def _timed(self, work: Callable[[], object]) -> float:
        with self._engine.parts.activity.acquire_compute_lock():
            _settle(self._adapter.device)
            began = time.perf_counter()
            work()
            _settle(self._adapter.device)
            return time.perf_counter() - began

    # Tiers

    def _tier(self, tier: Tier, files: Path | None = None) -> TierSpeed:
        """How fast a tier gives slices to a request's readers. Sizes take turns: a disk drifts meanwhile."""
        layers = self._adapter.layer_count
        groups = [self._entries(tokens, TIER_ENTRIES) for tokens in SLICE_TOKENS]
        for entry in itertools.chain(*groups):
            tier.put(entry)
        rounds: dict[int, list[float]] = {tokens: [] for tokens in SLICE_TOKENS}  # seconds a slice
        slices: dict[int, float] = {}  # bytes of one, as stored
        for _ in range(self._tier_rounds):
            for tokens, entries in zip(SLICE_TOKENS, groups, strict=True):
                if files is not None:
                    _drop_pages(files)
                with ExitStack() as held:
                    leases = [held.enter_context(_lease(tier, entry)) for entry in entries]
                    rounds[tokens].append(reading_s(self._engine, leases) / (len(leases) * layers))
                    slices[tokens] = leases[0].stored_bytes / layers
        for entry in itertools.chain(*groups):
            tier.delete(entry.info.key)
        tier.close()
        self._step(len(SLICE_TOKENS))
        self._stored_bytes_per_token = slices[SLICE_TOKENS[-1]] * layers / SLICE_TOKENS[-1]
        medians = [statistics.median(several) for several in rounds.values()]
        times = dict(zip(SLICE_TOKENS, itertools.accumulate(medians, max), strict=True))  # none falls with a size
        latency_s, per_byte_s = _fit([[1.0, slices[tokens]] for tokens in times], list(times.values()))
        points = tuple(
            TierPoint(round(slices[tokens]), took, latency_s + slices[tokens] * per_byte_s)
            for tokens, took in times.items()
        )
        return TierSpeed(latency_s, per_byte_s, points)

    # Matter

    def _entries(self, tokens: int, count: int) -> list[Entry]:
        """Entries of random numbers."""
        adapter = self._adapter
        shape = (adapter.layer_count, 2, adapter.kv_heads, tokens, adapter.head_dim)
        made = []
        for number in range(count):
            ids = (tokens, number) * (tokens // 2) + (number,) * (tokens % 2)
            identity: Identity = self._identity
            info = EntryInfo(
                identity.key(ids), identity, ids, "", adapter.layer_count, adapter.kv_heads, adapter.head_dim
            )
            made.append(Entry(info, torch.randn(shape, generator=self._generator).to(adapter.dtype)))
        return made

    def _ids(self, count: int) -> torch.Tensor:
        """Random token ids (count,), on the device."""
        return torch.randint(0, self._adapter.vocabulary, (count,), generator=self._generator).to(self._adapter.device)

    def _step(self, count: int = 1) -> None:
        self._done += count
        self._on_progress(self._done, self._total)


@dataclass(frozen=True, slots=True)
class _Pass:
    """What one pass took."""

    rows: int  # R, in each layer
    whole_s: float  # without waiting for slices
    placing_s: float  # 0 where it is not timed apart


def _lengths(context: int | None, wanted: Sequence[int]) -> tuple[int, ...]:
    """The wanted lengths that fit the context, or shares of it."""
    limit = context or max(wanted)
    fitting = tuple(length for length in wanted if length <= limit)
    return fitting if len(fitting) > 1 else tuple(sorted({max(8, limit // 4), max(8, limit // 2), max(8, limit)}))


def _fit_length(times: dict[int, list[float]], quadratic: bool = True) -> LengthFit:
    medians = {length: statistics.median(several) for length, several in times.items()}
    columns = [[1.0, float(n), float(n) ** 2 if quadratic else 0.0] for n in medians]
    fixed_s, per_token_s, per_token_squared_s = _fit(columns, list(medians.values()))
    fit = LengthFit(fixed_s, per_token_s, per_token_squared_s)
    points = tuple(LengthPoint(length, took, fit.at(length)) for length, took in medians.items())
    return replace(fit, points=points)


def _fit_recompute(times: dict[tuple[int, int, int], list[float]], together: bool) -> tuple[RecomputeFit, float | None]:
    """A layer's time over rows and keys. With placing timed `together`, that a token too."""
    medians = {at: statistics.median(several) for at, several in times.items()}
    columns = [
        [1.0, float(placed if together else keys), float(rows), float(rows * keys)] for rows, keys, placed in medians
    ]
    fixed_s, per_key_s, per_row_s, per_row_key_s = _fit(columns, list(medians.values()))
    placed_s, per_key_s = (per_key_s, 0.0) if together else (0.0, per_key_s)
    fit = RecomputeFit(fixed_s, per_key_s, per_row_s, per_row_key_s)
    points = tuple(
        RecomputePoint(rows, keys, max(0.0, took - placed * placed_s), fit.at(rows, keys))
        for (rows, keys, placed), took in medians.items()
    )
    return replace(fit, points=points), placed_s if together else None


def _fit(columns: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """Coefficients, none negative, of least relative squared error: what would be negative is left out."""
    weights = 1.0 / np.maximum(np.array(times), 1e-9)
    matrix, wanted = np.array(columns) * weights[:, None], np.array(times) * weights
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    used = [column for column in range(matrix.shape[1]) if np.abs(matrix[:, column]).max() > 0]
    while used:
        found = np.linalg.lstsq(matrix[:, used] / scale[used], wanted, rcond=None)[0]
        if found.min() >= 0:
            break
        used.pop(int(found.argmin()))
    fitted = np.zeros(matrix.shape[1])
    if used:
        fitted[used] = found / scale[used]
    return [float(value) for value in fitted]


def _copy_bytes_per_s(device: torch.device) -> float:
    """Host to device, from pinned memory."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    rates = []
    for _ in range(5):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        source.to(device, non_blocking=True)
        torch.cuda.synchronize(device)
        rates.append(COPY_BYTES / (time.perf_counter() - began))
    return statistics.median(rates)


def _settle(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _lease(tier: Tier, entry: Entry) -> Lease:
    lease = tier.lease(entry.info.identity, entry.info.token_ids)
    if lease is None:
        raise StoreError(f"A measured entry is not in the {tier.kind.value} tier. Is its device full?")
    return lease


def _drop_pages(folder: Path) -> None:
    """Make the next read of the files in `folder` a cold one, where the system lets us."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.glob("entries/*/*"):
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def _made(directory: str) -> Path:
    path = Path(directory)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


__all__ = ["measure", "save"]
