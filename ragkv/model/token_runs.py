"""Many runs of tokens in one pass, each behind a context of its own whose KV is there: how chunks
are encoded.

The rows of all runs are rows of one hidden (1, R, E), so projections, MLPs and experts run once for
all of them, in every family; only attention goes run by run. The KV of a run is that of a pass of
its own, to rounding: a matrix product may add in another order if it has more rows. This file knows
no chunks and no entries.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from .adapter import Adapter
from .attention import attend
from .joint import Seen
from .rope import RotaryTables
from .rows import Pause, Rows

# A pass has at most so many rows: more are hardly faster, and others wait for its layers.
PASS_ROWS = {"cpu": 512, "cuda": 4096}


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """What stands before a run: the raw KV (L, 2, G, T, D) of pieces, one behind the other from
    position 0 on.

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
    # (R,) ascending places of the tokens that are computed, int64 on the model's device
    computed: torch.Tensor


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
    """The raw KV (L, 2, G, T, D) of each run, on the model's device; T is without the tokens that
    are skipped.

    With `layers` it is the KV of these layers only, and later ones are not computed. `between` is
    called between layers, so that others may compute; an exception it raises ends the work.
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
            start = at
            rows = 0
        rows += run.row_count
    if runs:
        yield runs[start:]


class _RunsPass:
    """Runs that are computed together."""

    def __init__(self, adapter: Adapter, runs: Sequence[TokenRun], layers: range) -> None:
        self._adapter = adapter
        self._layers = layers
        tables = {stop: adapter.rope.tables(stop) for stop in {run.stop for run in runs}}
        spans = {(len(run.context), run.stop) for run in runs}
        # runs of equal positions share their masks
        rows = {span: Rows.span(*span, adapter.device) for span in spans}
        # By context and frequencies: rotated keys, and values, of the layer that is computed now.
        self._placed: dict[tuple[int, str], Seen] = {}
        self._runs = [
            _RunPass(
                adapter,
                run,
                layers,
                rows[len(run.context), run.stop],
                tables[run.stop],
                self._placed,
            )
            for run in runs
        ]
        self._sizes = [len(run.rows) for run in self._runs]

    def run(self, between: Callable[[], None]) -> list[torch.Tensor]:
        """The raw KV of each run."""
        adapter = self._adapter
        last = self._layers[-1]
        hidden = adapter.embed(torch.cat([run.token_ids for run in self._runs]))
        rows = Rows(torch.cat([run.rows.positions for run in self._runs]), None)
        rotations = {kind: self._rotation(kind) for kind in adapter.rope_kinds()}
        for layer in range(last):
            self._placed.clear()
            step = adapter.joint_pass(layer, self._runs, *rotations[adapter.rope_kind(layer)])
            hidden = adapter.call_layer(layer, hidden, rows, step)
            between()
        made = adapter.project_kv(last, hidden, rows)  # more than keys and values is not needed
        k_raw, v = (torch.split_with_sizes(states, self._sizes, 2) for states in made)
        for run, own_k, own_v in zip(self._runs, k_raw, v, strict=True):
            run.record(last, own_k, own_v)
        between()
        return [run.found for run in self._runs]

    def _rotation(self, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each (1, R, rotary dims), of all rows, with the frequencies of each run's
        own length.
        """
        parts = [run.tables.rows(kind, run.rows.positions) for run in self._runs]
        cos, sin = (torch.cat(tables, dim=1) for tables in zip(*parts, strict=True))
        return cos, sin


class _RunPass:
    """One run in a pass."""

    def __init__(
        self,
        adapter: Adapter,
        run: TokenRun,
        layers: range,
        rows: Rows,
        tables: RotaryTables,
        placed: dict[tuple[int, str], Seen],
    ) -> None:
        """`rows` are those of all its tokens."""
        self._adapter = adapter
        self._run = run
        self._layers = layers
        self.tables = tables
        self._placed = placed
        # of its rows
        self.token_ids = torch.tensor(run.token_ids, dtype=torch.int64, device=adapter.device)
        if run.reused is None:
            self.rows = rows
            self.found = adapter.new_recording(run.skip, len(run.token_ids)).kv[: len(layers)]
        else:  # tokens that are not computed have their KV
            self.rows = Rows(len(run.context) + run.reused.computed, None)
            self.token_ids = self.token_ids[run.reused.computed]
            self.found = run.reused.kv[layers.start : layers.stop].to(
                adapter.device, adapter.dtype, copy=True
            )

    def record(self, layer: int, k_raw: torch.Tensor, v: torch.Tensor) -> None:
        """Keep what is wanted of its keys and values (1, G, R, D) of a layer."""
        if layer in self._layers:
            at = self._layers.index(layer)
            computed = slice(None) if self._run.reused is None else self._run.reused.computed
            self.found[at, 0][:, computed] = k_raw[0, :, self._run.skip :]
            self.found[at, 1][:, computed] = v[0, :, self._run.skip :]

    def put(self, layer: int, k_raw: torch.Tensor, k_rot: torch.Tensor, v: torch.Tensor) -> Seen:
        """Record what a layer made, each (1, G, R, D); keys and values of the context and of all
        the run's tokens.
        """
        self.record(layer, k_raw, v)
        context = self._run.context
        reused = self._run.reused
        if reused is not None:
            own_k, own_v = self._placed_at(len(context), layer, reused.kv[layer])
            k_rot = own_k.index_copy(2, reused.computed, k_rot)
            v = own_v.index_copy(2, reused.computed, v)
        if not context.pieces:
            return k_rot, v
        name = (id(context), self.tables.frequencies)
        if name not in self._placed:
            pieces = [piece[layer].to(self._adapter.device) for piece in context.pieces]
            self._placed[name] = self._placed_at(0, layer, torch.cat(pieces, dim=2))
        before_k, before_v = self._placed[name]
        return torch.cat((before_k, k_rot), dim=2), torch.cat((before_v, v), dim=2)

    def attend(
        self,
        layer: int,
        q_rot: torch.Tensor,
        seen: Seen,
        scaling: float,
        cap: float | None,
        pause: Pause,
    ) -> torch.Tensor:
        """Queries (1, H, R, D) over what `put` returned: (1, H, R, D)."""
        window = self._adapter.window(layer)
        return attend(q_rot, *seen, self.rows, window, scaling, cap, pause)

    def _placed_at(self, start: int, layer: int, kv: torch.Tensor) -> Seen:
        """Raw KV (2, G, T, D) of a layer placed at `start`: rotated keys, and values, each (1, G,
        T, D).
        """
        kv = kv.to(self._adapter.device, self._adapter.dtype)
        cos, sin = self.tables.span(self._adapter.rope_kind(layer), start, start + kv.shape[2])
        return self._adapter.rotate(layer, kv[:1], cos, sin), kv[1:]
