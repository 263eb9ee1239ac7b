"""Tools of the quality benchmarks: true KV against stored KV, and a selector that knows the true
KV.

None of this is available when a question is answered.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragkv import Engine
from ragkv.fusion import Candidates, Selector
from ragkv.fusion.selectors import budget, top
from ragkv.model import Rows, run_layer


@dataclass(frozen=True)
class Truth:
    """The KV of a full prefill for the chunks of one prompt, compared with the stored KV."""

    chunk_start: int  # position of the first chunk's first token
    # (L, 2, C) squared deviation of K (raw) and V of every chunk token, true against stored
    moved: torch.Tensor
    norm: torch.Tensor  # (L, 2) mean squared norm of the true K and V

    def deviation(self) -> torch.Tensor:
        """sqrt(sum dK^2 + sum dV^2) of every chunk token in every layer, (L, C)."""
        return self.moved.sum(dim=1).sqrt()

    def score(self, positions: torch.Tensor) -> torch.Tensor:
        """One number per position (N,): later half of the layers, each with the
        same weight.
        """
        later = self.moved.shape[0] // 2
        relative = (self.moved / self.norm.unsqueeze(-1))[later:].sum(dim=(0, 1))  # (C,)
        return relative[positions - self.chunk_start]


class Oracle(Selector):
    """Selects by the true deviation, which is unknown at question time."""

    name = "oracle"

    def __init__(self, truth: Truth) -> None:
        self._truth = truth

    def select(self, candidates: Candidates, ratio: float, seed: int) -> torch.Tensor:
        return top(self._truth.score(candidates.positions), budget(ratio, len(candidates)))


@torch.no_grad()
def raw_kv(engine: Engine, ids: Sequence[int], start: int, stop: int) -> torch.Tensor:
    """Raw KV (L, 2, G, stop - start, D) of the positions start ... stop - 1 in a full prefill of
    `ids`.
    """
    adapter = engine.model.adapter
    rows = Rows.span(0, len(ids), adapter.device)
    tables = adapter.rope.tables(len(ids))
    kv = adapter.new_kv(len(ids))
    record = adapter.new_recording(start, stop)
    hidden = adapter.embed(torch.tensor(ids, device=adapter.device))
    for layer in range(adapter.layer_count):
        hidden = run_layer(adapter, layer, hidden, rows, kv, tables, record)
    return record.kv


def truth(engine: Engine, chunks: Sequence[Sequence[int]]) -> Truth:
    """Compare the true KV of a prompt of these chunks, which must all be stored, with the stored
    KV.
    """
    prefix = engine.entries.encoder.prefix_ids
    ids = [*prefix, *(token for chunk in chunks for token in chunk)]
    true = raw_kv(engine, ids, len(prefix), len(ids)).float()  # (L, 2, G, C, D)
    pieces = []
    for chunk in chunks:
        lease = engine.parts.store.lease(engine.entries.encoder.identity, tuple(chunk))
        assert lease is not None, "the engine was not warmed with this chunk"
        with lease:
            pieces.append(torch.stack([lease.read_layer(layer) for layer in range(true.shape[0])]))
    stored = torch.cat(pieces, dim=3).float()
    moved = (true - stored).square().sum(dim=(2, 4))
    norm = true.square().sum(dim=(2, 4)).mean(dim=-1).clamp_min(1e-12)
    return Truth(len(prefix), moved, norm)
