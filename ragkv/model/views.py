"""Views of a model's layers: shallow copies that share every weight and differ in one or two modules.

A view attends through `row_attention`, needs less memory in long passes, or does not compute unused queries. The model
itself is never changed.
"""

import copy
from typing import Any, cast

import torch
from transformers import Cache

from . import attention
from .packing import view_with
from .pauses import TILE_ROWS, pause


class InTiles(torch.nn.Module):
    """An MLP that runs over `TILE_ROWS` rows at a time: equal results, less memory, 8 % less time on a CPU."""

    def __init__(self, whole: torch.nn.Module) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden (1, R, E) -> the same shape."""
        if hidden.shape[1] <= TILE_ROWS:
            return cast(torch.Tensor, self.whole(hidden))
        out = torch.empty_like(hidden)
        for at in range(0, hidden.shape[1], TILE_ROWS):
            pause()
            out[:, at : at + TILE_ROWS] = self.whole(hidden[:, at : at + TILE_ROWS])
        return out


class PlainAttention(torch.nn.Module):
    """An attention layer that projects, norms heads and attends, and does nothing else: without the model's rotation.

    The model rotates queries and keys by the position 0, which is a twentieth of a decoding step and changes no bit.
    """

    PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
    NORMS = frozenset({"q_norm", "k_norm"})

    def __init__(self, attn: torch.nn.Module) -> None:
        super().__init__()
        self._modules = dict(attn._modules)
        own: Any = attn
        self.head_dim, self.scaling, self.layer_idx = own.head_dim, own.scaling, own.layer_idx
        self._softcap: float | None = getattr(attn, "attn_logit_softcapping", None)
        copies = [getattr(self._modules[f"{name}_proj"], "for_few", None) for name in "qkv"]
        shared = len(set(map(id, copies))) == 1 and not self._modules.keys() & self.NORMS
        self._for_few: Any = copies[0] if shared else None  # of q, k and v: see `int8.CopyForFew`

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: attention.Mask, past_key_values: Cache, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """Hidden (1, R, E) -> (1, R, E)."""
        attend_joined = getattr(attention_mask, "attend_joined", None)  # of decoding steps
        if attend_joined is not None and self._for_few is not None and self._for_few.takes(hidden_states):
            out = attend_joined(self._by_head(self._for_few.outputs(hidden_states)), self.scaling, self._softcap)
        else:
            q, k, v = (self._heads(name, hidden_states) for name in "qkv")
            keys, values = past_key_values.update(k, v, self.layer_idx)
            out = attention_mask.attend(q, keys, values, self.scaling, self._softcap)  # (1, H, R, D)
        rows = hidden_states.shape[1]
        joined = (out if rows == 1 else out.transpose(1, 2)).reshape(1, rows, -1)
        return self._call_part("o_proj", joined), None

    def _heads(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden (1, R, E) -> queries, keys or values (1, heads, R, D)."""
        heads = self._by_head(self._call_part(f"{name}_proj", hidden))
        return self._call_part(f"{name}_norm", heads) if f"{name}_norm" in self._modules else heads

    def _by_head(self, projected: torch.Tensor) -> torch.Tensor:
        """(1, R, heads D) -> (1, heads, R, D), in one call if it is one row."""
        rows = projected.shape[1]
        if rows == 1:
            return projected.view(1, -1, 1, self.head_dim)
        return projected.view(1, rows, -1, self.head_dim).transpose(1, 2)

    def _call_part(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        part = self._modules[name]
        assert part is not None
        result: torch.Tensor = part(hidden)
        return result


class NoQueries(torch.nn.Module):
    """Replaces a layer's query projection where only keys and values are needed: returns one head of zeros."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden (1, R, E) -> (1, R, D), without allocating memory."""
        return hidden.new_zeros(()).expand(*hidden.shape[:-1], self.head_dim)


def attending_view(layer: torch.nn.Module, attention_name: str, in_tiles: bool) -> torch.nn.Module:
    """`layer` attending through `row_attention`; `in_tiles` runs a dense MLP in tiles of rows."""
    attn = copy.copy(getattr(layer, attention_name))
    attn.config = copy.copy(attn.config)
    attn.config._attn_implementation = attention.IMPLEMENTATION
    changed: dict[str, Any] = {attention_name: attn}
    mlp = layer._modules.get("mlp")
    if in_tiles and mlp is not None and _is_dense(mlp):
        changed["mlp"] = InTiles(mlp)
    return view_with(layer, changed)


def plain_attention_view(view: torch.nn.Module, attention_name: str) -> torch.nn.Module | None:
    """A view that leaves the model's own rotation out; `None` if its attention has other parts than these.

    The caller tests that it gives the same bits.
    """
    attn = getattr(view, attention_name)
    hooks = attn._forward_hooks or attn._forward_pre_hooks or "forward" in vars(attn)
    if hooks or attn._modules.keys() - PlainAttention.NORMS != PlainAttention.PROJECTIONS:
        return None
    return view_with(view, {attention_name: PlainAttention(attn)})


def key_view(view: torch.nn.Module, attention_name: str, head_dim: int) -> torch.nn.Module:
    """A view that computes no queries; `view` itself if one projection makes queries and keys."""
    attn = getattr(view, attention_name)
    if "q_proj" not in attn._modules:
        return view
    return view_with(view, {attention_name: view_with(attn, {"q_proj": NoQueries(head_dim)})})


def _is_dense(mlp: torch.nn.Module) -> bool:
    """Whether all its weights are in linear layers. Experts are not tiled: they run better with many rows."""
    own = (part for part in mlp.modules() if next(part.parameters(recurse=False), None) is not None)
    return all(isinstance(part, torch.nn.Linear) for part in own)
