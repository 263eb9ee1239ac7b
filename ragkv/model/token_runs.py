"""Many runs of tokens in one pass, each behind a context of its own whose KV is there: how chunks are encoded.

The rows of all runs are rows of one hidden (1, R, E), so projections, MLPs and experts run once for all of them, in
every family; only attention goes run by run. The KV of a run is that of a pass of its own, to rounding: a matrix
product may add in another order if it has more rows. This file knows no chunks and no entries.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from .adapter import Adapter
from .attention import LayerPass, attend
from .rope import RotaryTables
from .rows import Rows

# A pass has at most so many rows: more are hardly faster, and others wait for its layers.
PASS_ROWS = {"cpu": 512, "cuda": 4096}


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """What stands before a run: the raw KV (L, 2, G, T, D) of pieces, one behind the other from position 0 on.

    Pieces may lack the last layers, if these are not computed.
    """

    pieces: tuple[torch.Tensor, ...] = ()

    def __len__(self) -> int:
        return sum(piece.shape[3] for piece in self.pieces)

    def cut(self, length: int) -> "Context":
        """The first `length` tokens; the context itself if it has no more."""
        if len(self) <= length:
            return self
        kept = list[torch.Tensor]()
        for piece in self.pieces:
            if length > 0:
                kept.append(piece[:, :, :, :length])
                length -= piece.shape[3]
        return Context(tuple(kept))


NO_CONTEXT = Context()


@dataclass(frozen=True, slots=True, eq=False)
class ReusedTokens:
    """Tokens of a run that are not computed: they keep the KV they have behind another text."""

    kv: torch.Tensor  # (L, 2, G, T, D) raw, of all tokens of the run
    computed: torch.Tensor  # (R,) ascending places of the tokens that are computed, int64 on the model's device


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens to compute behind a context."""

    token_ids: tuple[int, ...]
    context: Context = NO_CONTEXT
    skip: int = 0  # the first tokens, of which no KV is returned
    reused: ReusedTokens | None = None  # nothing is skipped then

    @property
    def stop(self) -> int:
        """One past the position of its last token."""
        return len(self.context) + len(self.token_ids)

    @property
    def row_count(self) -> int:
        """How many of its tokens are computed."""
        return len(self.token_ids) if self.reused is None else len(self.reused.computed)


@torch.no_grad()
def raw_kv(
    adapter: Adapter,
    runs: Sequence[TokenRun],
    between: Callable[[], None] = lambda: None,
    layers: range | None = None,
) -> list[torch.Tensor]:
    """The raw KV (L, 2, G, T, D) of each run, on the model's device; T is without the tokens that are skipped.

    With `layers` it is the KV of these layers only, and later ones are not computed. `between` is called between
    layers, so that others may compute; an exception it raises ends the work.
    """
    found = list[torch.Tensor]()
    for together in _passes(runs, PASS_ROWS[adapter.device.type]):
        found += _RunsPass(adapter, together, layers or range(adapter.layer_count)).run(between)
    return found


def _passes(runs: Sequence[TokenRun], most_rows: int) -> Iterator[Sequence[TokenRun]]:
    """The runs in order, as many together as have at most `most_rows` rows, or one."""
    start = rows = 0
    for at, run in enumerate(runs):
        if at > start and rows + run.row_count > most_rows:
            yield runs[start:at]
            start, rows = at, 0
        rows += run.row_count
    if runs:
        yield runs[start:]


class _RunsPass:
    """Runs that are computed together."""

    def __init__(self, adapter: Adapter, runs: Sequence[TokenRun], layers: range) -> None:
        self.adapter, self._runs, self._layers = adapter, runs, layers
        device = adapter.device
        tables = {stop: adapter.rope.tables(stop) for stop in {run.stop for run in runs}}
        self._tables = [tables[run.stop] for run in runs]
        spans = {(len(run.context), run.stop) for run in runs}
        rows = {span: Rows.span(*span, device) for span in spans}  # runs of equal positions share their masks
        self._rows = [
            rows[len(run.context), run.stop]
            if run.reused is None
            else Rows(len(run.context) + run.reused.computed, None)
            for run in runs
        ]
        ends = accumulate((len(own) for own in self._rows), initial=0)
        self._places = [slice(start, stop) for start, stop in pairwise(ends)]  # of each run's rows among all
        self._all = Rows(torch.cat([own.positions for own in self._rows]), None)
        self._found = [self._empty(run) for run in runs]

    def _empty(self, run: TokenRun) -> torch.Tensor:
        """What is filled with the KV of a run; the tokens that are not computed have theirs."""
        layers = self._layers
        if run.reused is not None:
            return run.reused.kv[layers.start : layers.stop].to(self.adapter.device, self.adapter.dtype, copy=True)
        return self.adapter.new_recording(run.skip, len(run.token_ids)).kv[: len(layers)]

    def run(self, between: Callable[[], None]) -> list[torch.Tensor]:
        """The raw KV of each run."""
        adapter, last = self.adapter, self._layers[-1]
        hidden = adapter.embed(torch.cat([self._ids(run) for run in self._runs]))
        rotations = {kind: self._rotation(kind) for kind in adapter.rope_kinds()}
        for layer in range(last):
            step = _LayerOfRuns(self, layer, rotations[adapter.rope_kind(layer)])
            hidden = adapter.call_layer(layer, hidden, self._all, step)
            between()
        self.record(last, *adapter.project_kv(last, hidden, self._all))  # more than keys and values is not needed
        between()
        return self._found

    def _ids(self, run: TokenRun) -> torch.Tensor:
        """The token ids of a run's rows."""
        ids = torch.tensor(run.token_ids, dtype=torch.int64, device=self.adapter.device)
        return ids if run.reused is None else ids[run.reused.computed]

    def _rotation(self, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each (1, R, rotary dims), of all rows, with the frequencies of each run's own length."""
        parts = [tables.rows(kind, rows.positions) for rows, tables in zip(self._rows, self._tables, strict=True)]
        cos, sin = (torch.cat(tables, dim=1) for tables in zip(*parts, strict=True))
        return cos, sin

    def record(self, layer: int, k_raw: torch.Tensor, v: torch.Tensor) -> None:
        """Keep what is wanted of the keys and values (1, G, R, D) of a layer."""
        if layer not in self._layers:
            return
        at = self._layers.index(layer)
        for run, place, found in zip(self._runs, self._places, self._found, strict=True):
            wanted = slice(place.start + run.skip, place.stop)
            computed = slice(None) if run.reused is None else run.reused.computed
            found[at, 0][:, computed] = k_raw[0, :, wanted]
            found[at, 1][:, computed] = v[0, :, wanted]

    def contexts(self, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Rotated keys, and values, (1, G, T, D) of the context of each run; a context that runs share is one."""
        made = dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]()
        found = []
        for run, tables in zip(self._runs, self._tables, strict=True):
            name = (id(run.context), tables.frequencies)
            if name not in made:
                made[name] = self._placed(layer, run.context, tables)
            found.append(made[name])
        return found

    def _placed(self, layer: int, context: Context, tables: RotaryTables) -> tuple[torch.Tensor, torch.Tensor]:
        adapter = self.adapter
        if not context.pieces:
            empty = torch.empty((1, adapter.kv_heads, 0, adapter.head_dim), dtype=adapter.dtype, device=adapter.device)
            return empty, empty
        kv = torch.cat([piece[layer].to(adapter.device) for piece in context.pieces], dim=2)  # (2, G, T, D)
        cos, sin = tables.span(adapter.rope_kind(layer), 0, len(context))
        return adapter.rotate(layer, kv[:1], cos, sin), kv[1:]

    def attended(
        self, layer: int, q_rot: torch.Tensor, k_rot: torch.Tensor, v: torch.Tensor, scaling: float, cap: float | None
    ) -> torch.Tensor:
        """Attention of all rows, (1, H, R, D), over their own runs and contexts: (1, H, R, D)."""
        out = q_rot.new_empty((1, q_rot.shape[2], q_rot.shape[1], q_rot.shape[3]))  # the layout the layer expects
        window = self.adapter.window(layer)
        parts = zip(self._runs, self._tables, self._places, self._rows, self.contexts(layer), strict=True)
        for run, tables, place, rows, (before_k, before_v) in parts:
            own_k, own_v = self._completed(layer, run, tables, k_rot[:, :, place], v[:, :, place])
            keys, values = torch.cat((before_k, own_k), dim=2), torch.cat((before_v, own_v), dim=2)
            out[:, place] = attend(q_rot[:, :, place], keys, values, rows, window, scaling, cap).transpose(1, 2)
        return out.transpose(1, 2)

    def _completed(
        self, layer: int, run: TokenRun, tables: RotaryTables, k_rot: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys, and values, (1, G, T, D) of all tokens of a run, from those of its rows."""
        if run.reused is None:
            return k_rot, v
        stored, computed = run.reused.kv[layer].to(self.adapter.device, self.adapter.dtype), run.reused.computed
        cos, sin = tables.span(self.adapter.rope_kind(layer), len(run.context), run.stop)
        keys = self.adapter.rotate(layer, stored[:1], cos, sin)
        return keys.index_copy(2, computed, k_rot), stored[1:].index_copy(2, computed, v)


class _LayerOfRuns(LayerPass):
    """One layer of a pass."""

    def __init__(self, runs: _RunsPass, layer: int, rotation: tuple[torch.Tensor, torch.Tensor]) -> None:
        """`rotation` is cos and sin of all rows, each (1, R, rotary dims)."""
        super().__init__()
        self._runs, self._layer, self._rotation = runs, layer, rotation

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record k_raw and v, each (1, G, R, D), and return them with rotated keys."""
        self._runs.record(self._layer, key_states, value_states)
        return self._runs.adapter.rotate(self._layer, key_states, *self._rotation), value_states

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, softcap: float | None
    ) -> torch.Tensor:
        """Queries (1, H, R, D) before RoPE, and what `update` returned -> (1, H, R, D)."""
        q_rot = self._runs.adapter.rotate(self._layer, query, *self._rotation)
        return self._runs.attended(self._layer, q_rot, key, value, scaling, softcap)
