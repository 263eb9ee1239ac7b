"""The fusor: builds the KV of one prompt from many entries, layer by layer (CacheBlend sections 4.2, 4.3 and 5.1).

For each layer it takes the stored slices from the reader, rotates their keys to their positions and places them in the
prompt's KV. A checking selector then narrows its tokens down. The layer runs over the selected and the computed rows,
whose fresh KV overwrites the stored KV. An asking selector needs two passes: the first places everything and measures
the question's attention, the second recomputes the chosen tokens and loads nothing. Rows before the first candidate saw
nothing that changes, and are computed once.

The fusor knows no text, documents or tiers. It reads entries and never writes them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ragkv.model import Adapter, PromptKV, Recording, Rows, Watch
from ragkv.model.rows import pausing
from ragkv.runtime import Closing
from ragkv.store import Lease

from .pipeline import LayerReader, Readers, Speeds
from .plan import Plan, Span
from .selectors import AskingSelector, CheckingSelector, Selector, StaticSelector, budget


@dataclass(frozen=True, slots=True)
class Fused:
    """The result of fusing one prompt."""

    kv: PromptKV  # rotated, S positions valid
    logits: torch.Tensor  # (V,) float32, of the last position
    selected_by_layer: tuple[torch.Tensor, ...]  # L tensors of candidate positions recomputed there, int64, CPU
    row_layers: int  # rows computed, summed over layers
    bytes_by_tier: dict[str, int]
    load_s: float  # waiting for slices
    read_s: float  # reading them, one after another at the threads' joint bandwidth
    fuse_s: float
    prefill_s: float
    record: Recording | None  # the recording passed to `run`


class Fusor:
    """Fuses prompts for one model. Holds no state of a request."""

    def __init__(self, adapter: Adapter, readers: Readers, read_ahead_layers: int | None, seed: int) -> None:
        """With `read_ahead_layers` None the read-ahead follows the speeds measured in earlier requests."""
        self.adapter, self.seed, self.speeds = adapter, seed, Speeds()
        self.readers, self._ahead = readers, read_ahead_layers

    def open(self, plan: Plan, selector: Selector, ratio: float) -> "Fusing":
        """Start to read what `plan` needs. The caller runs it under the compute lock, and closes it in any case."""
        return Fusing(self, plan, selector, ratio)

    def reader(self, leases: Sequence[Lease], rows: int) -> LayerReader:
        """A reader for a pass over `rows` rows; it starts to read ahead at once (CachedAttention section 3.2.1)."""
        layers, ahead = self.adapter.layer_count, self._ahead
        if ahead is None:
            size = sum(lease.stored_bytes for lease in leases if not lease.in_place)
            ahead = self.speeds.ahead(size, rows * layers, layers)
        return LayerReader(leases, layers, ahead, self.readers, self.adapter.device)


class Fusing(Closing):
    """One plan in progress. Its first layers are read while other requests compute (CachedAttention 3.2.1)."""

    def __init__(self, fusor: Fusor, plan: Plan, selector: Selector, ratio: float) -> None:
        self._fusor, self._plan, self._selector, self._ratio = fusor, plan, selector, ratio
        wanted = budget(ratio, len(plan.candidates))
        checks = isinstance(selector, CheckingSelector) and wanted > 0
        if isinstance(selector, StaticSelector):
            self._first_choice = selector.select(plan.candidates, ratio, fusor.seed)
        else:
            self._first_choice = torch.arange(len(plan.candidates) if checks else 0)
        self._spans = plan.loaded() if checks else _not_recomputed(plan, self._first_choice)
        leases = [span.lease for span in self._spans if span.lease is not None]
        self._reader = fusor.reader(leases, plan.forced.numel() + wanted)

    @torch.no_grad()
    def run(
        self,
        headroom: int = 0,
        record: Recording | None = None,
        between: Callable[[], None] = lambda: None,
        new_kv: Callable[[int], PromptKV] | None = None,
    ) -> Fused:
        """Carry out the plan; the caller holds the compute lock.

        `headroom` positions are allocated for the answer. `record` collects the raw KV of its range, placed or
        computed. `between` is called between layers and within long ones, so that other requests may compute; an
        exception it raises ends the pass. `new_kv` makes the KV of a given capacity; by default the adapter does.
        Raises `EntryDamagedError`.
        """
        adapter, reader, began = self._fusor.adapter, self._reader, time.perf_counter()
        length = self._plan.token_ids.numel()
        kv, others_s = (new_kv or adapter.new_kv)(length + headroom), 0.0

        def let_others_compute() -> None:
            nonlocal others_s
            left = time.perf_counter()
            between()
            others_s += time.perf_counter() - left

        work = _FusionPass(adapter, self._plan, self._selector, self._ratio, kv, record)
        with pausing(let_others_compute):
            work.choose(self._first_choice)
            for layer in range(adapter.layer_count):
                slices = reader.layer(layer)
                work.place(layer, self._spans, slices)
                work.narrow(layer, self._spans, slices)
                work.run(layer)
                if work.asking is None:
                    kv.finish_prefill(layer, length)
                let_others_compute()
            if work.asking is not None:  # everything is placed, and the question's attention to it is known
                chosen = work.asking.select(self._plan.candidates, work.attention(), self._ratio)
                work.choose(chosen, self._plan.leading_rows)
                for layer in range(adapter.layer_count):
                    work.run(layer)
                    kv.finish_prefill(layer, length)
                    let_others_compute()
        kv.length = length
        logits = adapter.logits(work.hidden[:, -1:])[0]
        adapter.wait_for_device()
        took_s = time.perf_counter() - began
        read_bytes, read_s = reader.measured()
        self._fusor.speeds.add_read(read_bytes, read_s)
        self._fusor.speeds.add_compute(work.row_layers, took_s - reader.waited_s - others_s)
        return Fused(
            kv,
            logits,
            tuple(work.selected_by_layer),
            work.row_layers,
            reader.bytes_by_tier(),
            reader.waited_s,
            read_s,
            work.placing_s,
            took_s,
            record,
        )

    def close(self) -> None:
        """Wait for running reads. Safe to call twice."""
        self._reader.close()


def _not_recomputed(plan: Plan, chosen: torch.Tensor) -> tuple[Span, ...]:
    """The loaded spans with at least one token that is neither forced nor `chosen`: only these must be read."""
    computed = torch.zeros(plan.token_ids.numel(), dtype=torch.bool)
    computed[plan.forced] = True
    computed[plan.candidates.positions[chosen]] = True
    return tuple(span for span in plan.loaded() if not computed[span.start : span.stop].all())


class _FusionPass:
    """The state of one prompt while it is fused."""

    def __init__(
        self, adapter: Adapter, plan: Plan, selector: Selector, ratio: float, kv: PromptKV, record: Recording | None
    ) -> None:
        self._adapter, self._plan, self._ratio, self._record = adapter, plan, ratio, record
        self._device = adapter.device
        self._tables = adapter.rope.tables(plan.token_ids.numel())
        wanted = budget(ratio, len(plan.candidates)) > 0
        self._checking = selector if isinstance(selector, CheckingSelector) and wanted else None
        self.asking = selector if isinstance(selector, AskingSelector) and wanted else None
        asking_rows = plan.question_rows - plan.unasked_rows
        self._watch = Watch(asking_rows, plan.token_ids.numel(), adapter.device) if self.asking else None
        self.kv = kv
        self.row_layers = 0
        self.placing_s = 0.0
        self._rotations: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # by kind of rotary table

    def choose(self, chosen: torch.Tensor, done: int = 0) -> None:
        """Start a pass over the forced rows without the first `done`, and the candidates of index `chosen` (C,)."""
        asks, plan = self._watch is not None, self._plan
        token_ids, self._forced = plan.asking() if asks else (plan.token_ids, plan.forced[done:])
        self.chosen = chosen  # indices of the candidates recomputed in the current layer, CPU
        self._set_rows(self._plan.candidates.positions[chosen])
        self.hidden = self._adapter.embed(token_ids.to(self._device)[self._rows.positions])  # (1, R, E)
        self.selected_by_layer: list[torch.Tensor] = []

    def attention(self) -> torch.Tensor:
        """The question's attention to each candidate, (N,); ends its measurement."""
        assert self._watch is not None
        watch, self._watch = self._watch, None
        return watch.received()[self._plan.candidates.positions]

    def place(self, layer: int, spans: Sequence[Span], slices: Sequence[torch.Tensor]) -> None:
        """Rotate each span's slice (2, G, T, D) to its positions and put it into the prompt's KV."""
        if not spans:
            return
        began = time.perf_counter()
        cos, sin = self._rotation(layer, spans)
        parts = [piece[:, :, span.offset :][:, :, : len(span)] for span, piece in zip(spans, slices, strict=True)]
        k_raw = torch.cat([part[0] for part in parts], dim=1).unsqueeze(0)  # (1, G, sum T, D): one rotation for all
        rotated = self._adapter.rotate_in_float32(layer, k_raw, cos, sin)
        k_rots = torch.split(rotated, [len(span) for span in spans], dim=2)
        for span, k_rot, part in zip(spans, k_rots, parts, strict=True):
            self.kv.put(layer, span.start, k_rot, part[1].unsqueeze(0))
            if self._record is not None:
                self._record.put(layer, span.start, part)
        self.placing_s += time.perf_counter() - began

    def _rotation(self, layer: int, spans: Sequence[Span]) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the spans' positions, each (1, sum T, rotary dims); equal in all layers of a kind."""
        kind = self._adapter.rope_kind(layer)
        if kind not in self._rotations:
            parts = [self._tables.span(kind, span.start, span.stop) for span in spans]
            cos, sin = (torch.cat(tables, dim=1) for tables in zip(*parts, strict=True))
            self._rotations[kind] = cos, sin
        return self._rotations[kind]

    def narrow(self, layer: int, spans: Sequence[Span], slices: Sequence[torch.Tensor]) -> None:
        """From layer 1 on, keep the rows of a checking selector that deviate most from the stored KV."""
        if self._checking is None or layer == 0:
            return
        keep = self._checking.keep(layer, self._adapter.layer_count, self._ratio, len(self._plan.candidates))
        if keep is None or keep >= len(self.chosen):
            return
        deviation = self._deviation(layer, spans, slices)  # (C,) of the chosen candidates, on the device
        kept = torch.sort(deviation, descending=True, stable=True).indices[:keep].sort().values.cpu()
        before = self._rows.positions
        self.chosen = self.chosen[kept]
        self._set_rows(self._plan.candidates.positions[self.chosen])
        self.hidden = self.hidden[:, torch.searchsorted(before, self._rows.positions)]

    def run(self, layer: int) -> None:
        """Run the layer over the current rows; in the last layer only the last row needs an output."""
        adapter, rows = self._adapter, self._rows
        watch = self._watch if layer >= adapter.layer_count // 2 else None
        if layer == adapter.layer_count - 1 and len(rows) > 1:
            adapter.write_kv(layer, self.hidden, rows, self.kv, self._tables, self._record)
            self.hidden, rows = self.hidden[:, -1:], Rows.of(rows.positions[-1:])
        self.hidden = adapter.run_layer(layer, self.hidden, rows, self.kv, self._tables, self._record, watch)
        self.selected_by_layer.append(self._plan.candidates.positions[self.chosen])
        self.row_layers += len(self._rows)

    def _set_rows(self, selected: torch.Tensor) -> None:
        positions = torch.cat((self._forced, selected)).sort().values
        self._rows = Rows.of(positions).on(self._device)

    def _deviation(self, layer: int, spans: Sequence[Span], slices: Sequence[torch.Tensor]) -> torch.Tensor:
        """sqrt(sum dK^2 + sum dV^2) of each chosen candidate, fresh against stored, K before RoPE, in float32."""
        positions = self._plan.candidates.positions[self.chosen].to(self._device)
        rows = torch.searchsorted(self._rows.positions, positions)
        k_raw, v = self._adapter.project_kv(layer, self.hidden[:, rows], Rows.of(positions))
        fresh = torch.stack((k_raw[0], v[0])).float()  # (2, G, C, D)
        squared = torch.empty(positions.numel(), device=self._device)
        for span, piece in zip(spans, slices, strict=True):
            low, high = torch.searchsorted(positions, torch.tensor([span.start, span.stop], device=self._device))
            if low < high:
                stored = piece[:, :, positions[low:high] - span.start + span.offset].float()
                squared[low:high] = (fresh[:, :, low:high] - stored).square().sum(dim=(0, 1, 3))
        return squared.sqrt()
