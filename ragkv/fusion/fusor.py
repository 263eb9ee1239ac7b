"""The fusor: one prompt's KV out of many entries, layer by layer (CacheBlend sections 4.2, 4.3 and 5.1).

For each layer: take its slices -> rotate them to their places -> decide who is recomputed -> drive the layer over those
rows and the computed ones, whose fresh KV overwrites what was placed -> next. It knows no text, no documents and no
tiers; entries are read, never written.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from ragkv.model import Adapter, PromptKV, Recording, RotaryTables, Rows

from .pipeline import LayerReader
from .plan import Plan, Span
from .selectors import CheckingSelector, Selector, StaticSelector, budget


@dataclass(frozen=True, slots=True)
class Fused:
    """What came of fusing one prompt."""

    kv: PromptKV  # rotated, S positions valid
    logits: torch.Tensor  # (V,) float32, of the last position
    selected_by_layer: tuple[torch.Tensor, ...]  # L tensors of candidate positions recomputed there, int64, CPU
    row_layers: int  # rows computed, summed over layers
    bytes_by_tier: dict[str, int]
    load_s: float
    fuse_s: float
    prefill_s: float


class Fusor:
    """Fuses prompts for one model. Holds no request's state."""

    def __init__(self, adapter: Adapter, pool: ThreadPoolExecutor, read_ahead_layers: int, seed: int) -> None:
        self._adapter, self._pool, self._ahead, self._seed = adapter, pool, read_ahead_layers, seed

    @torch.no_grad()
    def fuse(
        self, plan: Plan, selector: Selector, ratio: float, room: int = 0, record: Recording | None = None
    ) -> Fused:
        """Carry out `plan`; allocate `room` more positions for an answer. Raises `EntryDamagedError` of a lease."""
        adapter, began = self._adapter, time.perf_counter()
        length = plan.token_ids.numel()
        kv = adapter.new_kv(length + room)
        work = _Pass(adapter, plan, selector, ratio, self._seed, adapter.rope.tables(length), kv, record)
        spans = plan.loaded()
        leases = [span.lease for span in spans if span.lease is not None]
        with LayerReader(leases, adapter.layer_count, self._ahead, self._pool, adapter.device) as reader:
            for layer in range(adapter.layer_count):
                slices = reader.layer(layer)
                work.place(layer, spans, slices)
                work.narrow(layer, spans, slices)
                work.run(layer)
            kv.length = length
            logits = adapter.logits(work.hidden[:, -1:])[0]
            return Fused(
                kv,
                logits,
                tuple(work.selected_by_layer),
                work.row_layers,
                reader.bytes_by_tier(),
                reader.waited_s,
                work.placing_s,
                time.perf_counter() - began,
            )


class _Pass:
    """The state of one pass over a prompt; dies with it."""

    def __init__(
        self,
        adapter: Adapter,
        plan: Plan,
        selector: Selector,
        ratio: float,
        seed: int,
        tables: RotaryTables,
        kv: PromptKV,
        record: Recording | None,
    ) -> None:
        self._adapter, self._plan, self._ratio, self._tables, self._kv = adapter, plan, ratio, tables, kv
        self._record = record
        self._device = adapter.device
        count = len(plan.candidates)
        self._checking = selector if isinstance(selector, CheckingSelector) and budget(ratio, count) else None
        if isinstance(selector, StaticSelector):
            chosen = selector.select(plan.candidates, ratio, seed)
        else:
            chosen = torch.arange(count if self._checking else 0)
        self._chosen = chosen  # indices into the candidates that are recomputed in this layer, CPU
        self._set_rows(plan.candidates.positions[chosen])
        self.hidden = adapter.embed(plan.token_ids.to(self._device)[self._rows.positions])  # (1, R, E)
        self.selected_by_layer: list[torch.Tensor] = []
        self.row_layers = 0
        self.placing_s = 0.0

    def place(self, layer: int, spans: Sequence[Span], slices: Sequence[torch.Tensor]) -> None:
        """Rotate each span's slice (2, G, T, D) to its positions and put it into the prompt's KV."""
        began = time.perf_counter()
        kind = self._adapter.rope_kind(layer)
        for span, piece in zip(spans, slices, strict=True):
            cos, sin = self._tables.span(kind, span.start, span.stop)
            k_rot = self._adapter.rotate(layer, piece[0].unsqueeze(0), cos, sin)
            self._kv.put(layer, span.start, k_rot, piece[1].unsqueeze(0))
        self.placing_s += time.perf_counter() - began

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
        """Drive the layer over the rows in force."""
        self.hidden = self._adapter.run_layer(layer, self.hidden, self._rows, self._kv, self._tables, self._record)
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
                stored = piece[:, :, positions[low:high] - span.start].float()
                squared[low:high] = (fresh[:, :, low:high] - stored).square().sum(dim=(0, 1, 3))
        return squared.sqrt()
