"""Layers that norm, attend and run an MLP, and do nothing else: computed without the model's own calls between.

Most families' layers are of this kind. Their own code rotates queries and keys by the position 0, which changes no bit,
and passes every small step through torch's bookkeeping for modules. Both cost time in a decoding step, where a product
of one row ends soon. The adapter uses what is here only if a trial gives the same bits as the model's own layer.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from transformers import Cache

from . import attention
from .cpu.packing import view_with
from .views import InTiles

Part = Callable[[torch.Tensor], torch.Tensor]

# The names of the norms of a layer: before and behind attention, before and behind the MLP.
LAYER_NORMS: tuple[tuple[str, str | None, str, str | None], ...] = (
    ("input_layernorm", None, "post_attention_layernorm", None),  # llama and most others
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),  # gemma
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),  # glm4
)


HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)


class PlainAttention(torch.nn.Module):
    """An attention layer that projects, norms heads and attends, without the model's own rotation."""

    PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
    NORMS = frozenset({"q_norm", "k_norm"})

    def __init__(self, attn: torch.nn.Module, direct: bool = False) -> None:
        """`direct` calls parts without their hooks, and multiplies few rows in int8 by q, k and v at once."""
        super().__init__()
        self._modules = dict(attn._modules)
        for name in HOOKS:  # the same ones, also those that are added later
            setattr(self, name, getattr(attn, name))
        own: Any = attn
        self.head_dim, self.scaling, self.layer_idx = own.head_dim, own.scaling, own.layer_idx
        self.attn_logit_softcapping: float | None = getattr(attn, "attn_logit_softcapping", None)
        self._parts: dict[str, Part] = {
            name: part.forward if direct else part for name, part in attn._modules.items() if part is not None
        }
        joins = direct and not self._modules.keys() & self.NORMS
        self._for_few = _shared_copy(own.q_proj, own.k_proj, own.v_proj) if joins else None

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: attention.Mask, past_key_values: Cache, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """Hidden (1, R, E) -> (1, R, E)."""
        rows, for_few = hidden_states.shape[1], self._for_few
        attend_joined = getattr(attention_mask, "attend_joined", None)  # of decoding steps
        if attend_joined is not None and for_few is not None and for_few.takes(hidden_states):
            states = self._by_head(for_few.outputs(hidden_states))
            out = attend_joined(states, self.scaling, self.attn_logit_softcapping)
        else:
            q, k, v = (self._heads(name, hidden_states) for name in "qkv")
            keys, values = past_key_values.update(k, v, self.layer_idx)
            out = attention_mask.attend(q, keys, values, self.scaling, self.attn_logit_softcapping)  # (1, H, R, D)
        joined = (out if rows == 1 else out.transpose(1, 2)).reshape(1, rows, -1)
        return self._parts["o_proj"](joined), None

    def _heads(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden (1, R, E) -> queries, keys or values (1, heads, R, D)."""
        heads = self._by_head(self._parts[f"{name}_proj"](hidden))
        norm = self._parts.get(f"{name}_norm")
        return heads if norm is None else norm(heads)

    def _by_head(self, projected: torch.Tensor) -> torch.Tensor:
        """(1, R, heads D) -> (1, heads, R, D), in one call if it is one row."""
        rows = projected.shape[1]
        if rows == 1:
            return projected.view(1, -1, 1, self.head_dim)
        return projected.view(1, rows, -1, self.head_dim).transpose(1, 2)


class GatedMLP:
    """An MLP of the usual three projections; several tiles of rows go through the view's own."""

    PARTS = frozenset({"gate_proj", "up_proj", "down_proj", "act_fn"})

    def __init__(self, mlp: Any, tiles: InTiles | None) -> None:
        """`tiles` computes `mlp` tile by tile."""
        self._tiles = tiles
        self._gate, self._up, self._down = (part.forward for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        self._activation: Part = getattr(mlp.act_fn, "forward", mlp.act_fn)
        self._for_few = _shared_copy(mlp.gate_proj, mlp.up_proj)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden (1, R, E) -> (1, R, E)."""
        if self._tiles is not None and not self._tiles.is_one(hidden):
            return self._tiles.forward(hidden)
        if self._for_few is not None and self._for_few.takes(hidden):
            gate, up = self._for_few.outputs(hidden).chunk(2, dim=-1)
        else:
            gate, up = self._gate(hidden), self._up(hidden)
        out: torch.Tensor = self._down(self._activation(gate) * up)
        return out


class PlainLayer:
    """A layer whose parts are called directly: attention and MLP, each with norms, each added to what it got."""

    def __init__(
        self, view: torch.nn.Module, attention_name: str, norms: tuple[str, str | None, str, str | None]
    ) -> None:
        """`norms` is one of `LAYER_NORMS`."""
        parts: Any = view._modules
        self.hooks = _hooks_of(view)  # if any is not empty, `__call__` would leave it out
        self._attend = PlainAttention(parts[attention_name], direct=True).forward
        mlp, whole = parts["mlp"], _whole(parts["mlp"])
        gated = whole._modules.keys() == GatedMLP.PARTS
        self._mlp: Part = GatedMLP(whole, None if mlp is whole else mlp) if gated else mlp.forward
        first, behind, second, behind_mlp = norms
        self._first, self._second = _norm(parts[first]), _norm(parts[second])
        self._behind = None if behind is None else _norm(parts[behind])
        self._behind_mlp = None if behind_mlp is None else _norm(parts[behind_mlp])

    def __call__(self, hidden: torch.Tensor, mask: attention.Mask, cache: Cache) -> torch.Tensor:
        """Hidden (1, R, E) -> (1, R, E)."""
        attended, _ = self._attend(self._first(hidden), mask, cache)
        hidden = hidden + (attended if self._behind is None else self._behind(attended))
        computed = self._mlp(self._second(hidden))
        return hidden + (computed if self._behind_mlp is None else self._behind_mlp(computed))


def plain_attention_view(view: torch.nn.Module, attention_name: str) -> torch.nn.Module | None:
    """A view that leaves the model's own rotation out; `None` if its attention has other parts than these.

    The caller tests that it gives the same bits.
    """
    attn = getattr(view, attention_name)
    hooks = attn._forward_hooks or attn._forward_pre_hooks or "forward" in vars(attn)
    if hooks or attn._modules.keys() - PlainAttention.NORMS != PlainAttention.PROJECTIONS:
        return None
    return view_with(view, {attention_name: PlainAttention(attn)})


def plain_layers(views: list[torch.nn.Module], attention_name: str) -> list[PlainLayer] | None:
    """The layers of views with `PlainAttention`; `None` if they have other parts, or are not all of one kind.

    The caller tests that the first one gives the same bits.
    """
    parts = views[0]._modules
    kinds = {(type(view), *((name, type(_whole(part))) for name, part in view._modules.items())) for view in views}
    norms = next((one for one in LAYER_NORMS if {attention_name, "mlp", *filter(None, one)} == parts.keys()), None)
    if norms is None or None in parts.values() or len(kinds) > 1:
        return None
    return [PlainLayer(view, attention_name, norms) for view in views]


def _norm(norm: Any) -> Part:
    """A norm's function: the usual RMS norm without reading attributes in each call, of the same bits as the module."""
    weight: torch.Tensor | None = norm._parameters.get("weight")
    epsilon: float | None = getattr(norm, "variance_epsilon", None)
    whole: Part = norm.forward
    if weight is None or epsilon is None:
        return whole

    def root_mean_square(hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.float()
        normed = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + epsilon)
        return weight * normed.type_as(hidden)

    trial = torch.linspace(-2, 3, 2 * len(weight), dtype=weight.dtype, device=weight.device).view(1, 2, -1)
    return root_mean_square if torch.equal(root_mean_square(trial), whole(trial)) else whole


def _whole(part: Any) -> Any:
    """The MLP that is computed in tiles; any other part itself."""
    return part.whole if isinstance(part, InTiles) else part


def _shared_copy(*layers: Any) -> Any | None:
    """The `int8.CopyForFew` that multiplies by all of these layers at once; `None` if they do not share one."""
    copies = [getattr(layer, "for_few", None) for layer in layers]
    return copies[0] if len(set(map(id, copies))) == 1 else None


def _hooks_of(view: torch.nn.Module) -> tuple[dict[int, Any], ...]:
    """What holds the hooks of all modules of a layer, those that are added later, too."""
    own = (hooks for part in view.modules() for hooks in (part._forward_hooks, part._forward_pre_hooks))
    return (*own, torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
