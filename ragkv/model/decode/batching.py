"""Batched decoding: one step of several prompts, each with its own KV, length and positions.

The tokens are B rows of one hidden (1, B, E), so projections, MLPs, experts and the head run once
for all rows, in every family. Only attention runs prompt by prompt. Each step may have other
prompts. A prompt may bring drafts, which are tokens that may follow its last one. Then it has a row
for each draft, and the caller keeps those that prove right.

A row is written and attended only through `put` and `attend` of its `PromptKV`, which may store its
values elsewhere.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..adapter import Adapter
from ..promptkv import PromptKV
from ..recording import Recording
from ..rows import Pause, Rows, Seen, sent

# Tokens before the steps of a trial: SDPA cuts keys at 512, MKL its sums from 192 on.
TRIED_LENGTHS = (1022, 250)


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One prompt in a step."""

    kv: PromptKV  # of every position before the token, with space for all of these
    token: int  # the last decoded token; its position is `kv.length`
    record: Recording | None = None  # receives the tokens' raw KV
    drafts: tuple[int, ...] = ()  # tokens that may follow; only for a KV that `takes_drafts`

    @property
    def tokens(self) -> tuple[int, ...]:
        """The token and its drafts."""
        return (self.token, *self.drafts)


# a tenth faster than without gradients alone; what is returned may not be changed in place
@torch.inference_mode()
def decode_rows(
    adapter: Adapter, rows: Sequence[DecodeRow], layers: Iterable[int] | None = None
) -> torch.Tensor:
    """One step: logits (B, V) float32 behind each token and draft; each prompt's KV grows by as
    many positions.

    Only a trial names `layers`. If it raises, no KV has grown, so the step may be tried again with
    some of the prompts.
    """
    lengths = [row.kv.length for row in rows]
    sizes = [1 + len(row.drafts) for row in rows]
    ends = [length + size for length, size in zip(lengths, sizes, strict=True)]
    places = [at for length, end in zip(lengths, ends, strict=True) for at in range(length, end)]
    positions = sent(torch.tensor(places), adapter.device)  # (B,)
    tokens = torch.tensor([token for row in rows for token in row.tokens])
    hidden = adapter.embed(sent(tokens, adapter.device))
    for row in rows if adapter.device.type == "cpu" else ():
        row.kv.make_finite()
    rotations = {kind: _rotation(adapter, kind, ends, positions) for kind in adapter.rope_kinds()}
    splits = zip(rows, torch.split(positions, sizes), strict=True)
    parts = [_Part(adapter, row, Rows(own, row.kv.length)) for row, own in splits]
    step_rows = Rows(positions, None)
    for layer in range(adapter.layer_count) if layers is None else layers:
        step = adapter.joint_pass(layer, parts, *rotations[adapter.rope_kind(layer)])
        hidden = adapter.call_layer(layer, hidden, step_rows, step)
    logits = adapter.logits(hidden)
    for row, part in zip(rows, parts, strict=True):
        if row.record is not None:
            row.record.append(row.kv.length, part.recorded)
    for row, end in zip(rows, ends, strict=True):
        row.kv.length = end
    return logits


def rows_are_alike(adapter: Adapter, rows: int) -> bool:
    """Whether a step of `rows` rows gives each the bits that it has alone, tried with two layers
    and the head.

    Some processors' libraries choose another order of sums where layers have no copies of weights,
    and in experts.
    """
    layers = (0, adapter.layer_count - 1)
    tokens = [token % adapter.vocabulary for token in range(rows)]
    kv = adapter.new_kv(TRIED_LENGTHS[0] + rows)
    chance = torch.Generator(adapter.device).manual_seed(0)
    for tensor in (tensors[layer] for tensors in (kv.keys, kv.values) for layer in layers):
        tensor.normal_(generator=chance)
    for kv.length in TRIED_LENGTHS:  # the longest first, because its step clears what is behind it
        together = decode_rows(
            adapter, [DecodeRow(kv, tokens[0], drafts=tuple(tokens[1:]))], layers
        )
        kv.length -= rows
        if not torch.equal(
            together,
            torch.cat([decode_rows(adapter, [DecodeRow(kv, one)], layers) for one in tokens]),
        ):
            return False
    return True


def _rotation(
    adapter: Adapter, kind: str, ends: Sequence[int], positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each (1, B, rotary dims), of each row's position with the frequencies of its own
    length.
    """
    if not adapter.rope.depends_on_length:
        return adapter.rope.tables(max(ends)).rows(kind, positions)
    # no drafts: a row each
    own = [adapter.rope.tables(end, end - 1).span(kind, end - 1, end) for end in ends]
    cos, sin = (torch.cat(parts, dim=1) for parts in zip(*own, strict=True))
    return cos, sin


class _Part:
    """The rows of one prompt in a step, which go through its own KV."""

    def __init__(self, adapter: Adapter, row: DecodeRow, rows: Rows) -> None:
        self._adapter = adapter
        self._kv = row.kv
        self._record = row.record
        self.rows = rows
        # raw keys and values of each layer, if they are recorded
        self.recorded: list[torch.Tensor] = []

    def put(self, layer: int, k_raw: torch.Tensor, k_rot: torch.Tensor, v: torch.Tensor) -> Seen:
        """Write what a layer made, each (1, G, R, D), and return it: the KV knows the rest."""
        self._kv.put(layer, self._kv.length, k_rot, v)
        if self._record is not None:
            self.recorded += (k_raw, v)
        return k_rot, v

    def attend(
        self,
        layer: int,
        q_rot: torch.Tensor,
        seen: Seen,
        scaling: float,
        cap: float | None,
        pause: Pause,
    ) -> torch.Tensor:
        """Queries (1, H, R, D) -> (1, H, R, D). A step is never paused."""
        return self._kv.attend(layer, q_rot, self.rows, self._adapter.windows[layer], scaling, cap)
