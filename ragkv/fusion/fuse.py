"""Fusing: builds the KV of one prompt from many entries, layer by layer (CacheBlend sections 4.2,
4.3, 5.1).

For each layer the stored slices are read. Their keys are rotated to their positions, and keys and
values are placed in the prompt's KV. Then the layer runs over the computed rows, whose fresh KV
overwrites the stored KV.

A narrowing selector drops rows between two layers. An asking selector needs a first pass:
the question goes through the lower layers alone, which measures what it attends to. Then the chosen
tokens are recomputed from layer 0 on, while the upper layers load.

`fuse` runs no layer itself. It yields the rows of each layer and is sent the layer's output. So the
rows of several prompts can go through the weights together (`passes.py`). `fuse` knows no text,
documents or tiers. It reads entries and never writes them.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from ragkv.model import Adapter, PromptKV, Recording, Rows, Watch, sent
from ragkv.model.promptkv import PromptPart
from ragkv.model.rope import RotaryTables

from .hkvd import Narrowing
from .pipeline import LayerReader, Placing
from .plan import Plan, Span
from .selectors import Recompute, Selection, beginnings, budget


@dataclass(frozen=True, slots=True)
class LayerInput:
    """What a layer is given for the rows of one prompt."""

    layer: int
    part: PromptPart  # its R rows, and the KV they are written to and attend over
    hidden: torch.Tensor  # (1, R, E)
    cos: torch.Tensor  # for the rows' positions, (1, R, rotary dims)
    sin: torch.Tensor

    def last_row(self) -> "LayerInput":
        """The same with only the last row."""
        return LayerInput(
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
    # L tensors of the positions computed in the last pass through that layer, on the model's device
    rows_by_layer: tuple[torch.Tensor, ...]
    row_layers: int  # rows computed, summed over layers
    place_s: float  # rotating stored KV and copying it into place


FuseSteps = Generator[LayerInput, torch.Tensor, Fused]  # yields rows, is sent hidden (1, R, E)


class TokenChoice:
    """What is known of a prompt's recomputed tokens before anything is loaded."""

    def __init__(self, plan: Plan, recompute: Recompute, seed: int, layers: int) -> None:
        """`layers` is the model's number of layers."""
        candidates = plan.candidates
        selector = recompute.selector
        self.recompute = recompute
        self.budget = budget(recompute.ratio, len(candidates))
        self.narrows = selector.selection is Selection.NARROWING and self.budget > 0
        asked_layers = selector.asked_layers(layers) if self.budget else range(0)
        # without a layer to ask none is placed for it
        self.asked_layers = asked_layers if asked_layers else range(0)
        # indices of the candidates that are computed from layer 0 on, (C,) ascending
        if self.asked_layers:
            early = min(recompute.early, len(candidates) - self.budget)
            self.from_layer_0 = beginnings(candidates, early)
        elif self.narrows:
            self.from_layer_0 = torch.arange(len(candidates))
        else:
            self.from_layer_0 = selector.select(candidates, recompute.ratio, seed)
        # layers that may load while the ones below them are recomputed
        self.upper_layers = layers - self.asked_layers.stop if self.asked_layers else 0
        # A span that is computed as a whole need not be read, unless it is compared.
        self.loaded = plan.loaded if self.narrows else _not_recomputed(plan, self.from_layer_0)
        # the most rows that a layer computes
        chosen = self.from_layer_0.numel() + (self.budget if self.asked_layers else 0)
        self.most_rows = plan.computed.numel() + chosen


def fuse(
    adapter: Adapter,
    plan: Plan,
    choice: TokenChoice,
    reader: LayerReader,
    allocate: Callable[[], PromptKV],
    record: Recording | None = None,
) -> FuseSteps:
    """Yield the rows of each layer in turn; the caller sends what the layer makes of them.

    `allocate` makes KV with room for the prompt and its answer. `record` collects the raw KV of its
    range, placed or computed. Raises `EntryDamagedError`.
    """
    kv = allocate()
    layers = adapter.layer_count
    length = plan.token_ids.numel()
    tables = adapter.rope.tables(length)
    placing = reader.placing(adapter, tables, choice.loaded, kv, record)
    rows_of = partial(PromptRows, adapter, kv, tables, record)
    asked = None
    if choice.asked_layers:
        asked = yield from _ask(choice, plan, rows_of, placing)
        rows = rows_of(plan.token_ids, plan.computed[plan.leading_rows :], asked.chosen)
    else:
        rows = rows_of(
            plan.token_ids, plan.computed, plan.candidates.positions[choice.from_layer_0]
        )
    narrowing = Narrowing(rows, plan, placing) if choice.narrows else None

    for layer in range(layers):
        if layer >= choice.asked_layers.stop:  # those below are placed already
            placing.place(layer)
        if asked is not None and layer == choice.asked_layers.stop:
            rows.join(asked.rows, asked.final)
        if narrowing is not None and layer > 0:
            recompute = choice.recompute
            count = len(plan.candidates)
            narrowing.narrow(layer, recompute.selector.keep(layer, layers, recompute.ratio, count))
        yield from rows.through(layer)
        kv.finish_prefill(layer, length)

    kv.length = length
    row_layers = rows.row_layers + (asked.rows.row_layers if asked is not None else 0)
    return Fused(kv, rows.hidden[:, -1:], tuple(rows.by_layer), row_layers, placing.seconds)


class _Asked(NamedTuple):
    """What the pass of the question has found."""

    chosen: torch.Tensor  # positions of the candidates that it attends to most, ascending
    rows: "PromptRows"  # that passed the layers below
    final: torch.Tensor  # indices into these rows: what is not computed again


def _ask(
    choice: TokenChoice,
    plan: Plan,
    rows_of: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], "PromptRows"],
    placing: Placing,
) -> Generator[LayerInput, torch.Tensor, _Asked]:
    """Pass the rows of the question and the early candidates through the lower layers, which are
    placed for them.

    Two kinds of these rows are final: the early candidates, and computed rows before the first
    candidate, which no recompute changes. Their hidden states join the other rows above.
    """
    token_ids, computed = plan.asking()
    early = plan.candidates.positions[choice.from_layer_0]
    rows = rows_of(token_ids, computed, early)
    watch = Watch(plan.question_rows - plan.unasked_rows, plan.token_ids.numel(), rows.device)
    for layer in range(choice.asked_layers.stop):
        placing.place(layer)
        yield from rows.through(layer, watch if layer in choice.asked_layers else None)
    candidates = sent(plan.candidates.positions, rows.device)
    attention = watch.received()[candidates]  # (N,)
    if choice.from_layer_0.numel():
        attention[sent(choice.from_layer_0, rows.device)] = -1.0  # they are recomputed already
    recompute = choice.recompute
    chosen = recompute.selector.select_asked(plan.candidates, attention, recompute.ratio)
    final = torch.cat((computed[: plan.leading_rows], early))
    positions = torch.cat((computed, early)).sort().values
    return _Asked(candidates[chosen], rows, torch.searchsorted(positions, final))


class PromptRows:
    """The rows of one prompt on their way through the layers."""

    def __init__(
        self,
        adapter: Adapter,
        kv: PromptKV,
        tables: RotaryTables,
        record: Recording | None,
        token_ids: torch.Tensor,
        computed: torch.Tensor,
        chosen: torch.Tensor,
    ) -> None:
        """The rows are the positions `computed` and `chosen`, which the device may have chosen."""
        self.adapter = adapter
        self._kv = kv
        self._tables = tables
        self._record = record
        self.row_layers = 0
        self.by_layer: list[torch.Tensor] = []  # positions of the rows
        # One past the last row, which is always computed, so no device is asked.
        self._stop = token_ids.numel()
        positions = torch.cat((sent(computed, chosen.device), chosen)).sort().values
        self.continue_at(self._at(positions))
        # (1, R, E)
        self.hidden = adapter.embed(sent(token_ids, adapter.device)[self.rows.positions])

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.adapter.device

    def through(
        self, layer: int, watch: Watch | None = None
    ) -> Generator[LayerInput, torch.Tensor, None]:
        """Yield the rows for `layer`, and continue with the hidden states that are sent."""
        cos, sin = self._rotation(self.adapter.rope_kind(layer))
        part = PromptPart(self._kv, self.rows, self.adapter.windows, self._record, watch)
        self.hidden = yield LayerInput(layer, part, self.hidden, cos, sin)
        self.by_layer.append(self.rows.positions)
        self.row_layers += len(self.rows)

    def join(self, other: "PromptRows", index: torch.Tensor) -> None:
        """Continue also with the rows of `other` at `index` (C,), none of which is among these."""
        if index.numel():
            index = sent(index, self.adapter.device)
            positions = torch.cat((other.rows.positions[index], self.rows.positions)).sort()
            self.continue_at(self._at(positions.values))
            hidden = torch.cat((other.hidden[:, index], self.hidden), dim=1)
            self.hidden = hidden[:, positions.indices]

    def keep(self, kept: torch.Tensor, positions: torch.Tensor) -> None:
        """Continue with the rows of ascending index `kept` (C,), which are at `positions`."""
        on_host = positions.device.type == "cpu"
        self.continue_at(Rows.of(positions) if on_host else self.rows.narrowed(kept, positions))
        self.hidden = self.hidden.index_select(1, kept)

    def continue_at(self, rows: Rows) -> None:
        """Continue with these rows."""
        self._rotations: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # by kind of table
        self.rows = rows

    def _at(self, positions: torch.Tensor) -> Rows:
        """Rows of ascending `positions` (R,); the host reads none that a device chose."""
        if positions.device.type == "cpu":
            return Rows.of(positions).on(self.adapter.device)
        return Rows.unread(positions, self._stop)

    def _rotation(self, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the rows, equal in layers of a kind."""
        if kind not in self._rotations:
            self._rotations[kind] = self._tables.of(kind, self.rows)
        return self._rotations[kind]


def _not_recomputed(plan: Plan, chosen: torch.Tensor) -> tuple[Span, ...]:
    """The loaded spans with at least one token that is neither computed nor `chosen`."""
    is_computed = torch.zeros(plan.token_ids.numel(), dtype=torch.bool)
    is_computed[plan.computed] = True
    is_computed[plan.candidates.positions[chosen]] = True
    return tuple(span for span in plan.loaded if not is_computed[span.start : span.stop].all())
