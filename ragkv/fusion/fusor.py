"""The fusor: one prompt's KV out of many entries, layer by layer (CacheBlend sections 4.2, 4.3 and 5.1).

For each layer: take its slices -> rotate them to their places -> decide who is recomputed -> drive the layer over those
rows and the computed ones, whose fresh KV overwrites what was placed -> next. Where the question is asked first, that
pass places everything and a second one, without loading, recomputes what it chose. It knows no text, no documents and
no tiers; entries are read, never written.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ragkv.model import Adapter, PromptKV, Recording, Rows, Watch
from ragkv.runtime import Closing
from ragkv.store import Lease

from .guard import remaining_deviation
from .pipeline import LayerReader
from .plan import Plan, Span
from .readahead import Speeds
from .readers import Readers
from .selectors import AskingSelector, CheckingSelector, Selector, StaticSelector, budget


@dataclass(frozen=True, slots=True)
class Fused:
    """What came of fusing one prompt."""

    kv: PromptKV  # rotated, S positions valid
    logits: torch.Tensor  # (V,) float32, of the last position
    selected_by_layer: tuple[torch.Tensor, ...]  # L tensors of candidate positions recomputed there, int64, CPU
    row_layers: int  # rows computed, summed over layers
    remaining_deviation: (
        float | None
    )  # expected deviation left a candidate (see `guard`); None if an entry has no scores
    bytes_by_tier: dict[str, int]
    load_s: float
    fuse_s: float
    prefill_s: float
    record: Recording | None  # what was to be collected on the way


class Fusor:
    """Fuses prompts for one model. Holds no request's state."""

    def __init__(self, adapter: Adapter, readers: Readers, read_ahead_layers: int | None, seed: int) -> None:
        """Without `read_ahead_layers` it goes by what it measures of earlier requests."""
        self._adapter, self._readers, self._ahead, self._seed = adapter, readers, read_ahead_layers, seed
        self._speeds = Speeds()

    def open(self, plan: Plan, selector: Selector, ratio: float) -> "Fusing":
        """Begin to read what `plan` needs; whoever has the model then calls `run`. Close it, run or not."""
        first_choice = self._first_choice(plan, selector, ratio)

        def reader(leases: Sequence[Lease]) -> LayerReader:
            rows = plan.forced.numel() + budget(ratio, len(plan.candidates))
            return LayerReader(leases, layers, self._ahead_of(leases, rows), self._readers, self._adapter.device)

        layers = self._adapter.layer_count
        return Fusing(self._adapter, plan, selector, ratio, first_choice, reader, self._speeds)

    @property
    def row_layer_s(self) -> float | None:
        """Seconds a computed row of a layer took, lately; `None` until something was fused."""
        return self._speeds.row_layer_s

    def _ahead_of(self, leases: Sequence[Lease], rows: int) -> int:
        """Layers to read ahead of a pass over `rows` rows (CachedAttention section 3.2.1)."""
        if self._ahead is not None:
            return self._ahead
        layers = self._adapter.layer_count
        size = sum(lease.stored_bytes for lease in leases if not lease.in_place)
        return self._speeds.ahead(size, rows * layers, layers)

    def _first_choice(self, plan: Plan, selector: Selector, ratio: float) -> torch.Tensor:
        """Indices of the candidates recomputed in layer 0."""
        count = len(plan.candidates)
        if isinstance(selector, StaticSelector):
            return selector.select(plan.candidates, ratio, self._seed)
        return torch.arange(count if isinstance(selector, CheckingSelector) and budget(ratio, count) else 0)


class Fusing(Closing):
    """One plan being carried out; its first layers are read while other requests compute (CachedAttention 3.2.1)."""

    def __init__(
        self,
        adapter: Adapter,
        plan: Plan,
        selector: Selector,
        ratio: float,
        first_choice: torch.Tensor,
        reader: Callable[[Sequence[Lease]], LayerReader],
        speeds: Speeds,
    ) -> None:
        self._adapter, self._plan, self._selector, self._ratio = adapter, plan, selector, ratio
        self._first_choice, self._speeds = first_choice, speeds
        self._spans = _needed(plan, selector, ratio, first_choice)
        self._reader = reader([span.lease for span in self._spans if span.lease is not None])

    @torch.no_grad()
    def run(
        self,
        room: int = 0,
        record: Recording | None = None,
        between: Callable[[], None] = lambda: None,
        new_kv: Callable[[int], PromptKV] | None = None,
    ) -> Fused:
        """Carry out the plan; allocate `room` more positions for an answer. The caller has the model to itself.

        `record` collects what lies in its range, placed or computed. `between` is called between layers: others may
        decode a step there, and what it raises ends the pass. `new_kv` makes the KV of a capacity; left out, the
        adapter's. Raises `EntryDamagedError` of a lease.
        """
        adapter, reader, began = self._adapter, self._reader, time.perf_counter()
        length = self._plan.token_ids.numel()
        kv = (new_kv or adapter.new_kv)(length + room)
        work = _Pass(adapter, self._plan, self._selector, self._ratio, kv, record)
        work.choose(self._first_choice)
        for layer in range(adapter.layer_count):
            slices = reader.layer(layer)
            work.place(layer, self._spans, slices)
            work.narrow(layer, self._spans, slices)
            work.run(layer)
            if work.asking is None:
                kv.finish_prefill(layer, length)
            between()
        if work.asking is not None:  # all is in place, and the question has looked at it
            work.choose(work.asking.select(self._plan.candidates, work.attention(), self._ratio))
            for layer in range(adapter.layer_count):
                work.run(layer)
                kv.finish_prefill(layer, length)
                between()
        kv.length = length
        logits = adapter.logits(work.hidden[:, -1:])[0]
        took_s = time.perf_counter() - began
        self._speeds.read(*reader.measured())
        self._speeds.computed(work.row_layers, took_s - reader.waited_s)
        return Fused(
            kv,
            logits,
            tuple(work.selected_by_layer),
            work.row_layers,
            work.remaining_deviation(),
            reader.bytes_by_tier(),
            reader.waited_s,
            work.placing_s,
            took_s,
            record,
        )

    def close(self) -> None:
        """Wait for reads under way. Twice is harmless."""
        self._reader.close()


def _needed(plan: Plan, selector: Selector, ratio: float, chosen: torch.Tensor) -> tuple[Span, ...]:
    """The spans to be read: not those of which every token is recomputed in every layer anyway."""
    loaded = plan.loaded()
    if isinstance(selector, CheckingSelector) and budget(ratio, len(plan.candidates)):
        return loaded
    computed = torch.zeros(plan.token_ids.numel(), dtype=torch.bool)
    computed[plan.forced] = True
    computed[plan.candidates.positions[chosen]] = True
    return tuple(span for span in loaded if not computed[span.start : span.stop].all())


class _Pass:
    """The state of one prompt being fused; dies with it."""

    def __init__(
        self, adapter: Adapter, plan: Plan, selector: Selector, ratio: float, kv: PromptKV, record: Recording | None
    ) -> None:
        self._adapter, self._plan, self._ratio, self._record = adapter, plan, ratio, record
        self._device = adapter.device
        self._tables = adapter.rope.tables(plan.reach)
        wanted = budget(ratio, len(plan.candidates)) > 0
        self._checking = selector if isinstance(selector, CheckingSelector) and wanted else None
        self.asking = selector if isinstance(selector, AskingSelector) and wanted else None
        self._watch = Watch(plan.token_ids.numel(), adapter.device) if self.asking else None
        self.kv = kv
        self.row_layers = 0
        self.placing_s = 0.0
        self._placed_turns: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # by kind of rotary table

    def choose(self, chosen: torch.Tensor) -> None:
        """Begin a pass through the layers over the computed rows and those candidates, given by index (C,)."""
        self._chosen = chosen  # indices into the candidates that are recomputed in this layer, CPU
        self._set_rows(self._plan.candidates.positions[chosen])
        self.hidden = self._adapter.embed(self._plan.token_ids.to(self._device)[self._rows.positions])  # (1, R, E)
        self.selected_by_layer: list[torch.Tensor] = []

    def remaining_deviation(self) -> float | None:
        """Expected deviation left a candidate."""
        return remaining_deviation(self._plan.candidates, self._chosen)

    def attention(self) -> torch.Tensor:
        """What the question pays to each candidate, (N,); it looks once."""
        assert self._watch is not None
        watch, self._watch = self._watch, None
        return watch.received()[self._plan.candidates.positions]

    def place(self, layer: int, spans: Sequence[Span], slices: Sequence[torch.Tensor]) -> None:
        """Rotate each span's slice (2, G, T, D) to its positions and put it into the prompt's KV."""
        if not spans:
            return
        began = time.perf_counter()
        cos, sin = self._turns(layer, spans)
        parts = [piece[:, :, span.offset :][:, :, : len(span)] for span, piece in zip(spans, slices, strict=True)]
        k_raw = torch.cat([part[0] for part in parts], dim=1).unsqueeze(0)  # (1, G, sum T, D): one rotation for all
        k_rot = torch.split(
            self._adapter.rotate_in_float32(layer, k_raw, cos, sin), [len(span) for span in spans], dim=2
        )
        for span, turned, part in zip(spans, k_rot, parts, strict=True):
            self.kv.put(layer, span.start, turned, part[1].unsqueeze(0))
            if self._record is not None:
                self._record.put(layer, span.start, part)
        self.placing_s += time.perf_counter() - began

    def _turns(self, layer: int, spans: Sequence[Span]) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the spans' positions, each (1, sum T, rotary dims); the same for all layers of a kind."""
        kind = self._adapter.rope_kind(layer)
        if kind not in self._placed_turns:
            parts = [self._tables.span(kind, at := span.rotary_start, at + len(span)) for span in spans]
            cos, sin = (torch.cat(turns, dim=1) for turns in zip(*parts, strict=True))
            self._placed_turns[kind] = cos, sin
        return self._placed_turns[kind]

    def narrow(self, layer: int, spans: Sequence[Span], slices: Sequence[torch.Tensor]) -> None:
        """From layer 1 on, keep those rows of a checking selector that deviate most from what is stored."""
        if self._checking is None or layer == 0:
            return
        keep = self._checking.keep(layer, self._adapter.layer_count, self._ratio, len(self._plan.candidates))
        if keep is None or keep >= len(self._chosen):
            return
        deviation = self._deviation(layer, spans, slices)  # (C,) of the chosen candidates, on the device
        kept = torch.sort(deviation, descending=True, stable=True).indices[:keep].sort().values.cpu()
        before = self._rows.positions
        self._chosen = self._chosen[kept]
        self._set_rows(self._plan.candidates.positions[self._chosen])
        self.hidden = self.hidden[:, torch.searchsorted(before, self._rows.positions)]

    def run(self, layer: int) -> None:
        """Drive the layer over the rows in force; of the last one, only the last row's output is wanted."""
        adapter, rows = self._adapter, self._rows
        watch = self._watch if layer >= adapter.layer_count // 2 else None
        if layer == adapter.layer_count - 1 and len(rows) > 1:
            adapter.write_kv(layer, self.hidden, rows, self.kv, self._tables, self._record)
            self.hidden, rows = self.hidden[:, -1:], Rows.of(rows.positions[-1:])
        self.hidden = adapter.run_layer(layer, self.hidden, rows, self.kv, self._tables, self._record, watch)
        self.selected_by_layer.append(self._plan.candidates.positions[self._chosen])
        self.row_layers += len(self._rows)

    def _set_rows(self, selected: torch.Tensor) -> None:
        positions = torch.cat((self._plan.forced, selected)).sort().values
        self._rows = Rows.of(positions.to(self._device))

    def _deviation(self, layer: int, spans: Sequence[Span], slices: Sequence[torch.Tensor]) -> torch.Tensor:
        """sqrt(sum dK^2 + sum dV^2) of each chosen candidate, fresh against stored, K before RoPE, in float32."""
        positions = self._plan.candidates.positions[self._chosen].to(self._device)
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
