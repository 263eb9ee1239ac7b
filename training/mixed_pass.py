"""A pass of a model over a training example in which KV is a mixture of fresh and stored KV, with
gradients.

Each token of the chunks has a *share* between 0 and 1: how much of its keys and values is computed
in this pass; the rest is what is stored. With all shares 1 the pass is a full prefill, with all
shares 0 it is full reuse, and with shares of 0 and 1 it computes what the fusor does.
`training/score_training.py` trains scores through it.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn import functional

from ragkv.model import Adapter, LayerPass, Rows


@dataclass(frozen=True, eq=False)
class PreparedExample:
    """An example as one row of S tokens: prefix, chunks, then one branch per continuation, hidden
    from the others.
    """

    token_ids: torch.Tensor  # (S,)
    positions: torch.Tensor  # (S,)
    branch: torch.Tensor  # (S,), 0 for the tokens that all branches see
    reused: torch.Tensor  # (N,) indices of the tokens whose stored KV may be used
    predicting: torch.Tensor  # (A,) indices of the rows that predict a continuation's token
    stored: torch.Tensor  # (L, 2, G, N, D)
    features: tuple[torch.Tensor, ...]  # of the tokens of each chunk in `reused`
    # of each continuation, the embeddings (Q, E) of its known tokens
    questions: tuple[torch.Tensor, ...]
    # (A, V) log-probabilities, full prefill
    teacher: torch.Tensor = field(default_factory=partial(torch.empty, 0))
    # (M, N): the questions' attention
    attended: torch.Tensor = field(default_factory=partial(torch.empty, 0))

    @property
    def nbytes(self) -> int:
        """Bytes of the large tensors."""
        return sum(
            tensor.nbytes for tensor in (self.stored, self.teacher, self.attended, *self.features)
        )

    def without_kv(self) -> "PreparedExample":
        """Only what is needed to train gains."""
        return dataclasses.replace(self, stored=torch.empty(0), teacher=torch.empty(0))

    def asked(self, number: int) -> "PreparedExample":
        """The same with one of the continuations alone."""
        kept = (self.branch == 0) | (self.branch == number + 1)
        places = kept.cumsum(0) - 1
        mine = self.branch[self.predicting] == number + 1
        return dataclasses.replace(
            self,
            token_ids=self.token_ids[kept],
            positions=self.positions[kept],
            branch=self.branch[kept],
            predicting=places[self.predicting[mine]],
            teacher=self.teacher[mine],
        )

    def fresh(self, shares: torch.Tensor) -> torch.Tensor:
        """The shares (N,) of the reused tokens, among those of all S tokens; the others are
        computed, at share 1.
        """
        every = torch.ones(len(self.token_ids), device=self.token_ids.device)
        return every.index_put((self.reused,), shares)

    def attention_mask(self, window: int | None) -> torch.Tensor:
        """(S, S), added to scores: 0 where a row may attend to a token, minus infinity
        elsewhere.
        """
        order = torch.arange(len(self.branch), device=self.branch.device)
        visible = order[:, None] >= order[None, :]
        visible &= (self.branch[:, None] == self.branch[None, :]) | (self.branch[None, :] == 0)
        if window is not None:
            visible &= self.positions[:, None] - self.positions[None, :] < window
        return torch.zeros(visible.shape, device=visible.device).masked_fill(
            ~visible, float("-inf")
        )


def predict(
    adapter: Adapter,
    prepared: PreparedExample,
    fresh: torch.Tensor,
    watch: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Log-probabilities (A, V) of the predicted tokens, where KV is fresh to the shares `fresh`
    (S,).

    `watch` is rows (M,) and a tensor (M, S), to which their attention in the second half of the
    layers is added.
    """
    rows = Rows(prepared.positions, None)
    tables = adapter.rope.tables(int(prepared.positions.max()) + 1)
    hidden = adapter.embed(prepared.token_ids)
    windows = [adapter.window(layer) for layer in range(adapter.layer_count)]
    masks = {window: prepared.attention_mask(window) for window in set(windows)}
    for layer, window in enumerate(windows):
        rotation = tables.rows(adapter.rope_kind(layer), prepared.positions)
        watched = watch if layer >= adapter.layer_count // 2 else None
        step = _MixedLayer(adapter, prepared, fresh, layer, rotation, masks[window], watched)
        hidden = adapter.call_layer(layer, hidden, rows, step)
    return adapter.logits(hidden[:, prepared.predicting]).log_softmax(-1)


class _MixedLayer(LayerPass):
    """One layer: keys and values are mixed from fresh and stored ones, by the tokens' shares."""

    def __init__(
        self,
        adapter: Adapter,
        prepared: PreparedExample,
        fresh: torch.Tensor,
        layer: int,
        rotation: tuple[torch.Tensor, torch.Tensor],
        added: torch.Tensor,
        watch: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """`rotation` is cos and sin of the rows; `added` (S, S) is added to scores; for `watch` see
        `predict`.
        """
        super().__init__()
        self._prepared = prepared
        self._fresh = fresh
        self._added = added
        self._watch = watch
        self._adapter = adapter
        self._layer = layer
        self._rotation = rotation

    def _rotated(self, raw: torch.Tensor) -> torch.Tensor:
        return self._adapter.rotate_in_float32(self._layer, raw, *self._rotation)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Raw keys and values (1, G, S, D) -> rotated keys and values, mixed."""
        reused = self._prepared.reused
        share = self._fresh[self._prepared.reused, None]
        stored = self._prepared.stored[layer_idx]  # (2, G, N, D)
        mixed = [
            new.index_copy(2, reused, (old + share * (new[0][:, reused] - old))[None])
            for new, old in zip((key_states, value_states), stored, strict=True)
        ]
        return self._rotated(mixed[0]), mixed[1]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Differentiable attention of an example's rows."""
        if self._watch is None and softcap is None:
            groups = query.shape[1] // key.shape[1]
            keys, values = (part.repeat_interleave(groups, 1) for part in (key, value))
            return functional.scaled_dot_product_attention(
                self._rotated(query), keys, values, attn_mask=self._added, scale=scaling
            )
        kv_heads = key.shape[1]
        (_, heads, count, head_dim) = query.shape
        q_rot = self._rotated(query).reshape(kv_heads, heads // kv_heads * count, head_dim)
        scores = (torch.bmm(q_rot, key[0].transpose(1, 2)) * scaling).view(
            kv_heads, -1, count, count
        )
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = (scores + self._added).softmax(-1)
        if self._watch is not None:
            rows, received = self._watch
            received += weights[:, :, rows].mean(dim=(0, 1))
        return torch.bmm(weights.view(kv_heads, -1, count), value[0]).view(
            1, heads, count, head_dim
        )


__all__ = ["PreparedExample", "predict"]
