"""Measures a profile: the times of one model on one machine, with the adapter, fusor and leases
that requests use.

Entries of random numbers stand in for documents; their values do not change the time. Every
measurement acquires the compute lock, so requests run between two of them. Times are medians over
rounds, and no time falls with a length. Memory is measured, and every tier of the store that offers
an empty copy of itself (`Tier.scratch`). Files of such a copy are next to the store's. They are
dropped from the page cache before they are read.
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
from dataclasses import replace
from pathlib import Path

import torch

from ragkv.errors import StoreError
from ragkv.fusion import Fusor, Plan, Recompute, Span, SpanKind, SpanState, make_selector
from ragkv.fusion.pipeline import UNMEASURED
from ragkv.runtime import make_private_folder
from ragkv.scheduling import Scheduler
from ragkv.store.entry import Entry, EntryInfo
from ragkv.store.policies import LRU
from ragkv.store.stored_form import stored_form
from ragkv.store.tiers import Lease, MemoryLease, MemoryTier, Tier, TierKind
from ragkv.store.tiers.base import UNLIMITED_BYTES

from .fits import fit_length, fit_recompute, fit_tier
from .profile import LengthFit, Profile, RecomputeFit, TierSpeed
from .profile_in_use import ProfileInUse

log = logging.getLogger(__name__)

LENGTHS = (128, 384, 768, 1536)  # tokens S of the prompts that are timed
QUICK_LENGTHS = (128, 384, 768)
# A quick profile ends with the first prompt that takes so long, because requests wait for it.
LONG_S = 1.0
RATIOS = (0.0, 0.1, 0.3, 0.7)
CHUNK_TOKENS = 128
QUESTION_TOKENS = 32
SLICE_TOKENS = (64, 128, 256, 512)  # tokens of the entries that are read from a tier
TIER_ENTRIES = 4
ROUNDS = 5
QUICK_ROUNDS = 2
# Reads are short, so they have more rounds.
TIER_ROUNDS = 9
QUICK_TIER_ROUNDS = 3
BUDGET_S = 90.0  # no round starts later
COPY_BYTES = 64 * 2**20
HINDERED_RATIO = 0.3  # so that reading is hidden, as far as it can be


class Measuring:
    """One profile measurement of one engine."""

    def __init__(
        self,
        in_use: ProfileInUse,
        fusor: Fusor,
        scheduler: Scheduler,
        quick: bool,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._in_use = in_use
        self._fusor = fusor
        self._scheduler = scheduler
        self._adapter = fusor.adapter
        self._on_progress = on_progress
        self._longest_s = LONG_S if quick else BUDGET_S
        self._rounds, self._tier_rounds = (
            (QUICK_ROUNDS, QUICK_TIER_ROUNDS) if quick else (ROUNDS, TIER_ROUNDS)
        )
        self._lengths = _lengths(self._adapter.context_length, QUICK_LENGTHS if quick else LENGTHS)
        self._identity = in_use.identity
        self._generator = torch.Generator().manual_seed(0)
        self._stored_bytes_per_token = 0.0
        self._began = time.perf_counter()
        self._done = 0
        tiers = in_use.store.tiers
        # memory is the same in every store, and reads of remote tiers are timed while they are used
        self._below = [
            tier for tier in tiers if not tier.is_remote and tier.kind != TierKind.MEMORY
        ]
        of_tiers = (1 + len(self._below)) * len(SLICE_TOKENS)
        self._total = self._rounds * len(self._lengths) * (len(RATIOS) + 1) + of_tiers + 1

    def profile(self) -> Profile:
        """Measure everything."""
        adapter = self._adapter
        start_s = self._start_s()
        prefill, recompute, placing_s = self._passes(start_s)
        tiers = {TierKind.MEMORY: self._tier(MemoryTier(UNLIMITED_BYTES, LRU()))}
        directory = self._in_use.directory
        if directory is not None:
            make_private_folder(Path(directory))
        for tier in self._below:
            with tempfile.TemporaryDirectory(prefix="profile-", dir=directory) as folder:
                if (scratch := tier.scratch(Path(folder))) is not None:
                    tiers[tier.kind] = self._tier(scratch, Path(folder))
        self._step(self._total - self._done)
        return Profile(
            subject=self._in_use.subject,
            layers=adapter.layer_count,
            kv_bytes_per_token=adapter.kv_bytes_per_token,
            stored_bytes_per_token=self._stored_bytes_per_token,
            prefill=prefill,
            recompute=recompute,
            place_token_layer_s=placing_s,
            start_s=start_s,
            tiers=tiers,
            copy_bytes_per_s=_copy_bytes_per_s(adapter.device)
            if adapter.device.type == "cuda"
            else None,
        )

    # Passes of the model

    def _start_s(self) -> float:
        """Seconds to embed the question and to compute the logits of one row."""
        adapter = self._adapter
        hidden = adapter.embed(self._ids(1))

        def work() -> None:
            adapter.embed(self._ids(QUESTION_TOKENS))
            adapter.logits(hidden)

        self._timed(work)  # warm-up
        seconds = statistics.median(self._timed(work) for _ in range(5))
        self._step()
        return seconds

    def _passes(self, start_s: float) -> tuple[LengthFit, RecomputeFit, float]:
        """Prefill, a layer of a selective pass, and the seconds to place one token in a layer."""
        count = -(-max(self._lengths) // CHUNK_TOKENS)
        entries = [MemoryLease(entry) for entry in self._entries(CHUNK_TOKENS, count)]
        inner = max(1, self._adapter.layer_count - 1)
        full: dict[int, list[float]] = defaultdict(list)
        # by rows, keys, placed tokens
        layers: dict[tuple[int, int, int], list[float]] = defaultdict(list)
        placing: list[float] = []
        self._pass(self._fused_plan(entries, self._lengths[0])[0], 0.3)  # warm-up
        for _ in range(self._rounds):
            for length in self._lengths:
                if (
                    len(full) > 1
                    and max(map(min, full.values())) > self._longest_s
                    and length not in full
                ):
                    break
                spans = [Span(SpanKind.QUESTION, 0, length, SpanState.COMPUTED)]
                _, whole_s, _ = self._pass(Plan.of(self._ids(length).cpu(), spans), 0.0)
                full[length].append(whole_s)
                self._step()
                for ratio in RATIOS:
                    plan, placed = self._fused_plan(entries, length)
                    rows, whole_s, fuse_s = self._pass(plan, ratio)
                    layers[rows, length, placed].append(
                        max(0.0, whole_s - fuse_s - start_s) / inner
                    )
                    placing.append(fuse_s / (inner * placed))
                    self._step()
            if time.perf_counter() - self._began > BUDGET_S:
                break
        fit, placed_s = fit_recompute(layers, with_placing=self._adapter.device.type == "cuda")
        placing_s = statistics.median(placing) if placed_s is None else placed_s
        return fit_length(full), fit, placing_s

    def _pass(self, plan: Plan, ratio: float) -> tuple[int, float, float]:
        """One pass: its rows R in each layer, its seconds without waiting for slices, and those of
        placing.

        Placing is timed on a CPU only and is 0 on a GPU, which does it asynchronously.
        """
        adapter = self._adapter
        recompute = Recompute(make_selector("first-k"), ratio)
        with (
            self._fusor.prepared(plan, recompute) as prompt,
            self._scheduler.computing(),
        ):
            adapter.wait_for_device()
            began = time.perf_counter()
            self._fusor.run([prompt], lambda: None)
            passed = prompt.result()
            whole_s = time.perf_counter() - began - passed.load_s
        fused = passed.fused
        rows = plan.computed.numel() + passed.selected_by_layer[0].numel()
        return rows, whole_s, fused.place_s if adapter.device.type == "cpu" else 0.0

    def _fused_plan(self, leases: Sequence[Lease], length: int) -> tuple[Plan, int]:
        """A plan of fused chunks and a question, `length` tokens in all; and how many tokens are
        placed.
        """
        question = min(QUESTION_TOKENS, length // 4)
        spans = []
        at = 0
        for number, lease in enumerate(leases):
            stop = min(at + lease.info.tokens, length - question)
            if at < stop:
                spans.append(Span(SpanKind.CHUNK, at, stop, SpanState.FUSED, lease, number))
                at = stop
        spans.append(Span(SpanKind.QUESTION, at, length, SpanState.COMPUTED))
        return Plan.of(self._ids(length).cpu(), spans), at

    @torch.no_grad()
    def _timed(self, work: Callable[[], object]) -> float:
        with self._scheduler.computing():
            self._adapter.wait_for_device()
            began = time.perf_counter()
            work()
            self._adapter.wait_for_device()
            return time.perf_counter() - began

    # Tiers

    def _tier(self, tier: Tier, files: Path | None = None) -> TierSpeed:
        """How fast a tier delivers slices to a request's readers. Sizes alternate, because a disk's
        speed drifts.
        """
        layers = self._adapter.layer_count
        groups = [self._entries(tokens, TIER_ENTRIES) for tokens in SLICE_TOKENS]
        for entry in itertools.chain(*groups):
            tier.put(stored_form(entry))
        rounds: dict[int, list[float]] = {tokens: [] for tokens in SLICE_TOKENS}  # seconds a slice
        slices: dict[int, float] = {}  # bytes of one, as stored
        in_place = False
        for _ in range(self._tier_rounds):
            for tokens, entries in zip(SLICE_TOKENS, groups, strict=True):
                if files is not None:
                    _drop_pages(files)
                with ExitStack() as held:
                    leases = [held.enter_context(_lease(tier, entry)) for entry in entries]
                    rounds[tokens].append(self._reading_s(leases) / (len(leases) * layers))
                    slices[tokens] = leases[0].stored_bytes / layers
                    in_place = self._adapter.device.type == "cpu" and all(
                        lease.in_place for lease in leases
                    )
        hindered_s = self._hindered_s_per_byte(tier, groups[SLICE_TOKENS.index(CHUNK_TOKENS)])
        tier.close()
        self._step(len(SLICE_TOKENS))
        self._stored_bytes_per_token = slices[SLICE_TOKENS[-1]] * layers / SLICE_TOKENS[-1]
        medians = itertools.accumulate(
            (statistics.median(several) for several in rounds.values()), max
        )
        times = [(slices[tokens], took) for tokens, took in zip(SLICE_TOKENS, medians, strict=True)]
        return replace(fit_tier(times, in_place), hindered_s_per_byte=hindered_s)

    def _hindered_s_per_byte(self, tier: Tier, entries: Sequence[Entry]) -> float:
        """By how much longer a pass computes while it reads a byte from a tier: readers check and
        unpack on the same cores, and disturb the same caches.
        """
        length = CHUNK_TOKENS * len(entries) + QUESTION_TOKENS
        times: dict[bool, list[float]] = {False: [], True: []}  # by whether the tier is read
        for _ in range(self._tier_rounds):
            for reads, seconds in times.items():
                with ExitStack() as held:
                    leases: list[Lease] = [MemoryLease(entry) for entry in entries]
                    if reads:
                        leases = [held.enter_context(_lease(tier, entry)) for entry in entries]
                        size = sum(lease.stored_bytes for lease in leases)
                    plan, _ = self._fused_plan(leases, length)
                    seconds.append(self._pass(plan, HINDERED_RATIO)[1])
        more_s = statistics.median(times[True]) - statistics.median(times[False])
        return max(0.0, more_s) / size

    def _reading_s(self, leases: Sequence[Lease]) -> float:
        """Seconds to read every layer as a first request does: with the same threads, `UNMEASURED`
        layers ahead.
        """
        adapter = self._adapter
        began = time.perf_counter()
        with self._fusor.reader(leases, UNMEASURED) as reader:
            for layer in range(adapter.layer_count):
                reader.take(layer)
            adapter.wait_for_device()
            return time.perf_counter() - began

    # Random data

    def _entries(self, tokens: int, count: int) -> list[Entry]:
        """Entries with random values."""
        adapter = self._adapter
        shape = (adapter.layer_count, 2, adapter.kv_heads, tokens, adapter.head_dim)
        made = []
        for number in range(count):
            ids = (tokens, number) * (tokens // 2) + (number,) * (tokens % 2)
            info = EntryInfo(self._identity.key(ids), self._identity, ids, "", *adapter.kv_shape)
            made.append(
                Entry(info, torch.randn(shape, generator=self._generator).to(adapter.dtype))
            )
        return made

    def _ids(self, count: int) -> torch.Tensor:
        """Random token ids (count,), on the device."""
        return torch.randint(0, self._adapter.vocabulary, (count,), generator=self._generator).to(
            self._adapter.device
        )

    def _step(self, count: int = 1) -> None:
        self._done += count
        self._on_progress(self._done, self._total)


def _lengths(context: int | None, wanted: Sequence[int]) -> tuple[int, ...]:
    """The wanted lengths that fit the context; if fewer than two do, fractions of the context."""
    limit = context or max(wanted)
    fitting = tuple(length for length in wanted if length <= limit)
    return (
        fitting
        if len(fitting) > 1
        else tuple(sorted({max(8, limit // 4), max(8, limit // 2), max(8, limit)}))
    )


def _copy_bytes_per_s(device: torch.device) -> float:
    """The bandwidth from host to device, out of page-locked memory."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    rates = []
    for _ in range(5):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        source.to(device, non_blocking=True)
        torch.cuda.synchronize(device)
        rates.append(COPY_BYTES / (time.perf_counter() - began))
    return statistics.median(rates)


def _lease(tier: Tier, entry: Entry) -> Lease:
    lease = tier.lease(entry.info.identity, entry.info.token_ids)
    if lease is None:
        raise StoreError(f"A measured entry is not in the {tier.kind} tier. Is its device full?")
    return lease


def _drop_pages(folder: Path) -> None:
    """Drop the files in `folder` from the page cache."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with suppress(OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
