"""Asking over anchors: the question's attention, taken over a slice of each chunk alone, as if no
more had been loaded (QCFuse). docs/research/log.md says what it loses.
"""

from collections.abc import Sequence

import torch

from ragkv import Chunk, Engine
from ragkv.fusion import Candidates, Selector
from ragkv.fusion.selectors import Attention, budget, top, weighed
from ragkv.model import PromptKV, grown, run_layer
from ragkv.model import Rows as PromptRows
from ragkv.model.attention import Watch
from ragkv.model.promptkv import PromptPart
from ragkv.model.rows import Pause, Seen
from ragkv.prompt import PrefilledPrompt


class Given(Selector):
    """The prompt positions that were given."""

    name = "given"

    def __init__(self, positions: torch.Tensor) -> None:
        """`positions` (R,) ascending."""
        self._positions = positions

    def select(self, candidates: Candidates, ratio: float, seed: int) -> torch.Tensor:
        return torch.isin(candidates.positions, self._positions).nonzero().squeeze(1)


class Reusing(Given):
    """Recomputes nothing, and keeps the candidates of its prompt."""

    def __init__(self) -> None:
        super().__init__(torch.empty(0, dtype=torch.int64))
        self.candidates = Candidates.of((), 0)

    def select(self, candidates: Candidates, ratio: float, seed: int) -> torch.Tensor:
        self.candidates = candidates
        return super().select(candidates, ratio, seed)


class OverSome(PromptPart):
    """Rows of a prompt that attend over some of its positions, as if no others were loaded."""

    def __init__(self, kv: PromptKV, rows: PromptRows, kept: torch.Tensor) -> None:
        """`kept` (P,) ascending has the positions, the rows' own among them."""
        super().__init__(kv, rows, ())
        self._kept = kept
        self._seen = kept <= rows.positions[:, None]  # (R, P)
        self.received = torch.zeros(len(kept))  # attention of each, over the layers so far

    def attend(
        self,
        layer: int,
        q_rot: torch.Tensor,
        seen: Seen,
        scaling: float,
        cap: float | None,
        pause: Pause,
    ) -> torch.Tensor:
        """Queries (1, H, R, D) over the kept positions -> (1, H, R, D)."""
        assert cap is None  # the models of this study have none
        keys, values = (part[0, :, self._kept].float() for part in seen)
        queries = q_rot[0].float().unflatten(0, (len(keys), -1))  # (G, H / G, R, D)
        scores = queries @ keys[:, None].transpose(-1, -2) * scaling
        weights = scores.masked_fill(~self._seen, float("-inf")).softmax(dim=-1)
        self.received += weights.mean(dim=(0, 1, 2))
        return (weights @ values[:, None]).flatten(0, 1)[None].type_as(q_rot)


@torch.no_grad()
def asked_over_anchors(
    engine: Engine, question: str, chunks: Sequence[Chunk], share: float, ratio: float
) -> PrefilledPrompt:
    """The prompt with those anchors recomputed that the question attends to most, while it sees
    of the chunks their anchors alone: `share` of a chunk's tokens.
    """
    reusing = Reusing()
    first = engine.prefill(question, chunks, selector=reusing)
    candidates = reusing.candidates
    starts: dict[int, int] = {}
    for span in first.spans:
        if span.chunk is not None:
            starts.setdefault(span.chunk, span.start)
    anchors = torch.cat(
        [start + anchors_of(engine, chunks[i], share) for i, start in starts.items()]
    )
    anchors = anchors[torch.isin(anchors, candidates.positions)]

    length = len(first.token_ids)
    is_left = torch.ones(length, dtype=torch.bool)
    is_left[candidates.positions] = False
    is_left[anchors] = True
    kept = is_left.nonzero().squeeze(1)
    adapter = engine.model.adapter
    # all behind the last candidate ask
    rows = PromptRows.span(int(candidates.positions[-1]) + 1, length, adapter.device)
    asked = Attention().asked_layers(adapter.layer_count)
    part = OverSome(grown(first.kv, 0), rows, kept)
    tables = adapter.rope.tables(length)
    hidden = adapter.embed(first.token_ids[rows.positions])
    for layer in range(asked.stop):
        if layer == asked.start:
            part.received.zero_()
        step = adapter.joint_pass(layer, [part], *tables.of(adapter.rope_kind(layer), rows))
        hidden = adapter.call_layer(layer, hidden, rows, step)

    attention = part.received[torch.isin(kept, anchors)]
    asked_over = torch.isin(candidates.positions, anchors)
    among = Candidates(anchors, candidates.offset[asked_over])
    chosen = anchors[top(weighed(attention, among), budget(ratio, len(candidates)))]
    return engine.prefill(question, chunks, selector=Given(chosen), ratio=ratio)


def anchors_of(engine: Engine, chunk: Chunk, share: float) -> torch.Tensor:
    """The tokens of a chunk that get most attention from its last quarter, `share` of all: indices
    (A,) ascending. The chunk stands alone.
    """
    adapter = engine.model.adapter
    token_ids = torch.tensor(chunk.token_ids)
    length = len(token_ids)
    rows = PromptRows.span(0, length, adapter.device)
    tables = adapter.rope.tables(length)
    kv = adapter.new_kv(length)
    watch = Watch(max(1, length // 4), length, adapter.device)
    asked = Attention().asked_layers(adapter.layer_count)
    hidden = adapter.embed(token_ids)
    for layer in range(asked.stop):
        seen = watch if layer in asked else None
        hidden = run_layer(adapter, layer, hidden, rows, kv, tables, watch=seen)
    return top(watch.received(), budget(share, length))
