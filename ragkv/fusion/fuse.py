"""Fusing: the KV of one prompt from many entries, layer by layer (CacheBlend sections 4.2, 4.3, 5.1).

For each layer the stored slices are read, their keys are rotated to their positions, and keys and
values are placed in the prompt's KV. Then the layer runs over the computed rows, whose fresh KV
overwrites the stored KV. A checking selector narrows the rows down between two layers. For an
asking selector the question first passes the lower layers alone and measures what it attends to.
Then the chosen tokens are recomputed from layer 0 on, while the upper layers load.

`fuse` runs no layer itself. It yields the rows of each layer and is sent what the layer makes of
them, so that the rows of several prompts can go through the weights together (`passes.py`). It
knows no text, documents or tiers, reads entries and never writes them.
"""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from ragkv.model import Adapter, PromptKV, Recording, Rows, Watch, sent
from ragkv.model.promptkv import KVRows
from ragkv.model.rope import RotaryTables

from .device.placing import DevicePlacing
from .device.staging import StagedReader
from .pipeline import LayerReader
from .plan import Candidates, Plan, Span
from .selectors import AskingSelector, CheckingSelector, Selector, StaticSelector, budget


@dataclass(frozen=True, slots=True)
class LayerRows:
    """The rows of one prompt in one layer."""

    layer: int
    part: KVRows  # its R rows, and the KV they are written to and attend over
    hidden: torch.Tensor  # (1, R, E)
    cos: torch.Tensor  # of the rows' positions, (1, R, rotary dims)
    sin: torch.Tensor

    def last_row(self) -> "LayerRows":
        """The same with only the last row."""
        return LayerRows(
            self.layer,
            self.part.last_row(),
            self.hidden[:, -1:],
            self.cos[:, -1:],
            self.sin[:, -1:],
        )


@dataclass(frozen=True, slots=True)
class Fused:
    """The result of fusing one prompt."""

    kv: PromptKV  # rotated, S positions valid
    last: torch.Tensor  # (1, 1, E): the last layer's output for the last position
    selected_by_layer: tuple[torch.Tensor, ...]  # L tensors of positions recomputed there
    row_layers: int  # rows computed, summed over layers
    place_s: float  # rotating stored KV and copying it into place


Fusing = Generator[LayerRows, torch.Tensor, Fused]  # yields rows, is sent hidden (1, R, E)


class RowChoice:
    """The candidates that a prompt recomputes, chosen before, during or after loading."""

    def __init__(
        self, plan: Plan, selector: Selector, ratio: float, seed: int, layers: int
    ) -> None:
        """`layers` is the model's number of layers."""
        count = len(plan.candidates)
        self.wanted = budget(ratio, count)
        self.asks = selector if isinstance(selector, AskingSelector) and self.wanted else None
        self.checks = selector if isinstance(selector, CheckingSelector) and self.wanted else None
        self.asked_layers = self.asks.layers(layers) if self.asks else range(0)
        # layers that may load while the ones below them are recomputed
        self.upper_layers = layers - self.asked_layers.stop if self.asks else 0
        self.ratio = ratio
        self.candidates = plan.candidates
        # indices of the candidates that the first pass computes, (C,) ascending
        if isinstance(selector, StaticSelector):
            self.first = selector.select(plan.candidates, ratio, seed)
        else:
            self.first = torch.arange(count if self.checks else 0)
        # A span that is computed as a whole need not be read.
        self.loaded = plan.loaded if self.checks else _not_recomputed(plan, self.first)
        forced = plan.forced.numel()
        self.rows = forced + max(self.wanted, self.first.numel())  # at most, in a layer


def fuse(
    adapter: Adapter,
    plan: Plan,
    choice: RowChoice,
    reader: LayerReader,
    allocate: Callable[[], PromptKV],
    record: Recording | None = None,
) -> Fusing:
    """Yield the rows of each layer in turn; the caller sends what the layer makes of them.

    `allocate` makes KV with room for the prompt and its answer. `record` collects the raw KV of its
    range, placed or computed. Raises `EntryDamagedError`.
    """
    kv = allocate()
    length = plan.token_ids.numel()
    tables = adapter.rope.tables(length)
    placing = _placing_of(reader)(adapter, tables, choice.loaded, kv, record)
    running = partial(_Running, adapter, kv, tables, record, choice.candidates)

    placed = choice.asked_layers.stop  # layers that are placed before recompute begins
    if choice.asks is None:
        rows = running(plan.token_ids, plan.forced, choice.first)
    else:
        asking = running(*plan.asking(), choice.first)
        watch = Watch(plan.question_rows - plan.unasked_rows, length, adapter.device)
        for layer in range(placed):
            placing.place(layer, reader.layer(layer))
            yield from asking.through(layer, watch if layer in choice.asked_layers else None)
        attention = watch.received()[sent(choice.candidates.positions, adapter.device)]  # (N,)
        chosen = choice.asks.select(choice.candidates, attention, choice.ratio)
        # Rows before the first candidate saw nothing that recompute changes: they wait above.
        rows = running(plan.token_ids, plan.forced[plan.leading_rows :], chosen)
        rows.row_layers = asking.row_layers

    for layer in range(adapter.layer_count):
        if layer >= placed:
            placing.place(layer, reader.layer(layer))
        if choice.asks is not None and layer == placed:
            rows.join(asking, plan.leading_rows)
        if choice.checks is not None and layer > 0:
            _keep_deviating(layer, rows, choice, placing)
        yield from rows.through(layer)
        kv.finish_prefill(layer, length)

    kv.length = length
    selected_by_layer = tuple(rows.selected_by_layer)
    return Fused(kv, rows.hidden[:, -1:], selected_by_layer, rows.row_layers, placing.seconds)


class _Running:
    """The rows of one prompt on their way through the layers."""

    def __init__(
        self,
        adapter: Adapter,
        kv: PromptKV,
        tables: RotaryTables,
        record: Recording | None,
        candidates: Candidates,
        token_ids: torch.Tensor,
        forced: torch.Tensor,
        chosen: torch.Tensor,
    ) -> None:
        """The rows are the positions `forced`, and the candidates of index `chosen` (C,)."""
        self.adapter = adapter
        self._kv = kv
        self._tables = tables
        self._record = record
        self._forced = forced
        self._candidates = candidates.positions
        self._stop = token_ids.numel()  # the last position is forced
        self.row_layers = 0
        self.selected_by_layer: list[torch.Tensor] = []
        self._set(chosen)
        # (1, R, E)
        self.hidden = adapter.embed(sent(token_ids, adapter.device)[self.rows.positions])

    def through(
        self, layer: int, watch: Watch | None = None
    ) -> Generator[LayerRows, torch.Tensor, None]:
        """Yield the rows for `layer`, and continue with the hidden states that are sent."""
        cos, sin = self._rotation(self.adapter.rope_kind(layer))
        part = KVRows(self._kv, self.rows, self.adapter.windows, self._record, watch)
        self.hidden = yield LayerRows(layer, part, self.hidden, cos, sin)
        self.selected_by_layer.append(self.chosen_positions)
        self.row_layers += len(self.rows)

    def keep(self, kept: torch.Tensor) -> None:
        """Continue with the chosen candidates of index `kept` (C,)."""
        before = self.rows.positions
        self._set(sent(self.chosen, kept.device)[kept])
        self.hidden = self.hidden[:, torch.searchsorted(before, self.rows.positions)]

    def join(self, other: "_Running", count: int) -> None:
        """Continue also with the first `count` rows of `other`, which stand before these."""
        if count:
            self._forced = torch.cat((other._forced[:count], self._forced))
            self.__dict__.pop("_on_device", None)
            self._set(self.chosen)
            self.hidden = torch.cat((other.hidden[:, :count], self.hidden), dim=1)

    def _rotation(self, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the rows, equal in layers of a kind."""
        if kind not in self._rotations:
            self._rotations[kind] = self._tables.of(kind, self.rows)
        return self._rotations[kind]

    def _set(self, chosen: torch.Tensor) -> None:
        self._rotations: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # by kind of table
        self.chosen = chosen
        if chosen.device.type == "cpu":
            selected = self._candidates[chosen]
            positions = torch.cat((self._forced, selected)).sort().values
            self.rows = Rows.of(positions).on(self.adapter.device)
            self.chosen_positions = sent(selected, self.adapter.device)
        else:  # the device chose, and the host does not read what
            forced, candidates = self._on_device
            self.chosen_positions = candidates[chosen]
            positions = torch.cat((forced, self.chosen_positions)).sort().values
            self.rows = Rows.unread(positions, self._stop)

    @cached_property
    def _on_device(self) -> tuple[torch.Tensor, torch.Tensor]:
        device = self.adapter.device
        return sent(self._forced, device), sent(self._candidates, device)


class _Placing:
    """Puts stored slices at their positions in a prompt's KV."""

    def __init__(
        self,
        adapter: Adapter,
        tables: RotaryTables,
        spans: Sequence[Span],
        kv: PromptKV,
        record: Recording | None,
    ) -> None:
        self._adapter = adapter
        self._tables = tables
        self._spans = spans
        self._kv = kv
        self._record = record
        self._rotations: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # by kind of table
        self.seconds = 0.0

    def place(self, layer: int, slices: Sequence[torch.Tensor]) -> None:
        """Rotate each span's slice (2, G, T, D) to its positions and put it into the KV."""
        if not self._spans:
            return
        began = time.perf_counter()
        self._parts = parts = [
            piece[:, :, span.offset :][:, :, : len(span)]
            for span, piece in zip(self._spans, slices, strict=True)
        ]
        # (1, G, sum T, D): one rotation for all
        k_raw = torch.cat([part[0] for part in parts], dim=1).unsqueeze(0)
        rotated = self._adapter.rotate_in_float32(layer, k_raw, *self._rotation(layer))
        k_rots = torch.split(rotated, [len(span) for span in self._spans], dim=2)
        for span, k_rot, part in zip(self._spans, k_rots, parts, strict=True):
            self._kv.put(layer, span.start, k_rot, part[1].unsqueeze(0))
            if self._record is not None:
                self._record.put(layer, span.start, part)
        self.seconds += time.perf_counter() - began

    def stored(self, positions: torch.Tensor) -> torch.Tensor:
        """Those (2, G, C, D) of ascending `positions` (C,) in the layer placed last."""
        starts = torch.tensor([span.start for span in self._spans])
        bounds = torch.searchsorted(positions, starts).tolist()
        own = zip(self._spans, self._parts, bounds, [*bounds[1:], len(positions)], strict=True)
        return torch.cat(
            [part[:, :, positions[low:high] - span.start] for span, part, low, high in own], dim=2
        )

    def _rotation(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the spans' positions, (1, sum T, rotary dims): equal in layers of a kind."""
        kind = self._adapter.rope_kind(layer)
        if kind not in self._rotations:
            parts = [self._tables.span(kind, span.start, span.stop) for span in self._spans]
            cos, sin = (torch.cat(tables, dim=1) for tables in zip(*parts, strict=True))
            self._rotations[kind] = cos, sin
        return self._rotations[kind]


Placing = _Placing | DevicePlacing


def _placing_of(reader: LayerReader) -> type[_Placing] | partial[DevicePlacing]:
    return partial(DevicePlacing, reader) if isinstance(reader, StagedReader) else _Placing


def _keep_deviating(layer: int, running: _Running, choice: RowChoice, placing: Placing) -> None:
    """From layer 1 on, keep the candidates that deviate most from the stored KV."""
    assert choice.checks is not None
    layers = running.adapter.layer_count
    keep = choice.checks.keep(layer, layers, choice.ratio, len(choice.candidates))
    if keep is None or keep >= len(running.chosen):
        return
    order = torch.sort(_deviation(layer, running, placing), descending=True, stable=True).indices
    running.keep(order[:keep].sort().values)


def _deviation(layer: int, running: _Running, placing: Placing) -> torch.Tensor:
    """sqrt(sum dK^2 + sum dV^2) of the chosen candidates: (C,) float32 on the device.

    Fresh is compared with stored KV, keys before RoPE.
    """
    positions = running.chosen_positions
    rows = torch.searchsorted(running.rows.positions, positions)
    k_raw, v = running.adapter.project_kv(layer, running.hidden[:, rows], Rows(positions, None))
    fresh = torch.stack((k_raw[0], v[0])).float()  # (2, G, C, D)
    return (fresh - placing.stored(positions).float()).square().sum(dim=(0, 1, 3)).sqrt()


def _not_recomputed(plan: Plan, chosen: torch.Tensor) -> tuple[Span, ...]:
    """The loaded spans with at least one token that is neither forced nor `chosen`."""
    computed = torch.zeros(plan.token_ids.numel(), dtype=torch.bool)
    computed[plan.forced] = True
    computed[plan.candidates.positions[chosen]] = True
    return tuple(span for span in plan.loaded if not computed[span.start : span.stop].all())
