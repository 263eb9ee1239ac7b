"""Computes many runs of tokens in one pass, each after its own context, whose KV is given. Chunks
are encoded this way.

The rows of all runs are rows of one hidden (1, R, E), so projections, MLPs and experts run once for
all of them, in every family. Only attention goes run by run. Up to rounding, the KV of a run is
that of a pass of its own. A matrix product may add in another order if it has more rows. This file
knows no chunks and no entries.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from .adapter import Adapter
from .attention import attend
from .rope import RotaryTables
from .rows import Pause, Rows, Seen

# Rows of a pass, at most: more are hardly faster, and others wait for its layers.
PASS_ROWS = {"cpu": 512, "cuda": 4096}


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """The text before a run: the raw KV (L, 2, G, T, D) of pieces that follow each other from
    position 0 on.
    """

    pieces: tuple[torch.Tensor, ...] = ()

    def __len__(self) -> int:
        return sum(piece.shape[3] for piece in self.pieces)

    def shortened(self, length: int) -> "Context":
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


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens to compute behind a context."""

    token_ids: tuple[int, ...]
    context: Context = NO_CONTEXT
    skip: int = 0  # the first tokens, of which no KV is returned

    @property
    def stop(self) -> int:
        """One past the position of its last token."""
        return len(self.context) + len(self.token_ids)


@torch.no_grad()
def raw_kv(
    adapter: Adapter, runs: Sequence[TokenRun], between: Callable[[], None] = lambda: None
) -> list[torch.Tensor]:
    """The raw KV (L, 2, G, T, D) of each run, on the model's device; T is without the tokens that
    are skipped.

    `between` is called between layers, so that others may compute; an exception it raises ends the
    work.
    """
    found = list[torch.Tensor]()
    for together in _passes(runs, PASS_ROWS[adapter.device.type]):
        found += _RunsPass(adapter, together).run(between)
    return found


def _passes(runs: Sequence[TokenRun], most_rows: int) -> Iterator[Sequence[TokenRun]]:
    """The runs in order, as many together as have at most `most_rows` rows, or one."""
    start = rows = 0
    for at, run in enumerate(runs):
        if at > start and rows + len(run.token_ids) > most_rows:
            yield runs[start:at]
            start = at
            rows = 0
        rows += len(run.token_ids)
    if runs:
        yield runs[start:]


class _RunsPass:
    """Runs that are computed together."""

    def __init__(self, adapter: Adapter, runs: Sequence[TokenRun]) -> None:
        self._adapter = adapter
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
        last = adapter.layer_count - 1
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
        rows: Rows,
        tables: RotaryTables,
        placed: dict[tuple[int, str], Seen],
    ) -> None:
        """`rows` are those of all its tokens."""
        self._adapter = adapter
        self._run = run
        self.rows = rows
        self.tables = tables
        self._placed = placed
        self.token_ids = torch.tensor(run.token_ids, dtype=torch.int64, device=adapter.device)
        self.found = adapter.new_recording(run.skip, len(run.token_ids)).kv

    def record(self, layer: int, k_raw: torch.Tensor, v: torch.Tensor) -> None:
        """Keep what is wanted of its keys and values (1, G, R, D) of a layer."""
        self.found[layer, 0] = k_raw[0, :, self._run.skip :]
        self.found[layer, 1] = v[0, :, self._run.skip :]

    def put(self, layer: int, k_raw: torch.Tensor, k_rot: torch.Tensor, v: torch.Tensor) -> Seen:
        """Record what a layer made, each (1, G, R, D); keys and values of the context and of all
        the run's tokens.
        """
        self.record(layer, k_raw, v)
        context = self._run.context
        if not context.pieces:
            return k_rot, v
        name = (id(context), self.tables.rope_digest)
        if name not in self._placed:
            pieces = [piece[layer].to(self._adapter.device) for piece in context.pieces]
            self._placed[name] = self._placed_first(layer, torch.cat(pieces, dim=2))
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

    def _placed_first(self, layer: int, kv: torch.Tensor) -> Seen:
        """Raw KV (2, G, T, D) of a layer placed from position 0 on: rotated keys, and values, each
        (1, G, T, D).
        """
        kv = kv.to(self._adapter.device, self._adapter.dtype)
        cos, sin = self.tables.span(self._adapter.rope_kind(layer), 0, kv.shape[2])
        return self._adapter.rotate(layer, kv[:1], cos, sin), kv[1:]
