"""A model's layer whose parts are called directly.

In most families a layer has norms, attention and an MLP, and nothing else. In a decoding step a
call takes longer than its work. So `PlainLayer` calls the parts directly. If copies of weights can
be joined, few rows have one product for queries, keys and values, and one for gate and up. The
adapter uses a `PlainLayer` only if a trial gives the bits of the model's own layer.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from ragkv.runtime import no_check

from .cpu.copied import FEW_ROWS, joined
from .device.graphs import Graphs, Heads
from .device.norms import fused
from .rows import TILE_ROWS, LayerPass, Pause

Part = Callable[[torch.Tensor], torch.Tensor]

MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}  # of a usual MLP


def in_tiles(mlp: Part, hidden: torch.Tensor, pause: Pause) -> torch.Tensor:
    """`mlp` of hidden (1, R, E), `TILE_ROWS` rows at a time: (1, R, E).

    The results are equal; it needs less memory, and 8 % less time on a CPU.
    """
    if hidden.shape[1] <= TILE_ROWS:
        return mlp(hidden)
    out = torch.empty_like(hidden)
    for at in range(0, hidden.shape[1], TILE_ROWS):
        pause()
        out[:, at : at + TILE_ROWS] = mlp(hidden[:, at : at + TILE_ROWS])
    return out


class PlainLayer:
    """A layer whose parts are called directly: attention and MLP, each with norms, each added to
    what it got.
    """

    def __init__(
        self,
        view: torch.nn.Module,
        attention_name: str,
        norms: tuple[str, str | None, str, str | None],
        fuse_norms: bool = False,
    ) -> None:
        """`norms` are the names of those before and behind attention, before and behind the MLP."""
        parts: Any = view._modules
        attn = parts[attention_name]
        mlp = getattr(parts["mlp"], "whole", parts["mlp"])
        self.graphs: Graphs | None = None  # of all layers, on a device that has them
        self.hooks = _hooks_of(view)  # if any is not empty, `__call__` would leave it out
        first, behind, second, behind_mlp = norms
        norm_of = fused if fuse_norms else lambda norm: norm.forward
        self._first = norm_of(parts[first])
        self._second = norm_of(parts[second])
        self._behind = None if behind is None else norm_of(parts[behind])
        self._behind_mlp = None if behind_mlp is None else norm_of(parts[behind_mlp])
        self._head_dim = attn.head_dim
        self._scaling = attn.scaling
        self._layer = attn.layer_idx
        self._softcap: float | None = getattr(attn, "attn_logit_softcapping", None)
        projections = [attn._modules[f"{name}_proj"] for name in "qkv"]
        self._qkv = joined(projections)
        self._heads = [len(one.weight) // attn.head_dim for one in projections] if self._qkv else []
        self._projections: list[Part] = [one.forward for one in projections]
        self._head_norms = [
            norm_of(norm) for name in "qk" if (norm := attn._modules.get(f"{name}_norm"))
        ]
        self._out: Part = attn.o_proj.forward
        self._mlp: Part = mlp.forward
        self._tiled = mlp is not parts["mlp"]
        self._gate_up = (
            joined([mlp.gate_proj, mlp.up_proj]) if mlp._modules.keys() == MLP_PARTS else None
        )
        if self._gate_up is not None:
            self._act: Part = mlp.act_fn.forward
            self._down: Part = mlp.down_proj.forward

    def project_kv(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden (1, R, E) -> raw keys and values, each (1, G, R, D)."""
        normed = self._first(hidden)
        k, v = (
            part(normed).view(1, hidden.shape[1], -1, self._head_dim).transpose(1, 2)
            for part in self._projections[1:]
        )
        return (self._head_norms[1](k) if self._head_norms else k), v

    def __call__(self, hidden: torch.Tensor, step: LayerPass) -> torch.Tensor:
        """Hidden (1, R, E) -> (1, R, E)."""
        graphs = self.graphs
        heads = None if graphs is None else graphs.before(self._layer, self, hidden)
        if graphs is not None and heads is not None:
            out = step.run(*heads, self._layer, self._scaling, self._softcap)
            return graphs.behind(self._layer, out)
        out = step.run(*self.before(hidden), self._layer, self._scaling, self._softcap)
        return self.behind(hidden, out, step.pause)

    def before(self, hidden: torch.Tensor) -> Heads:
        """Hidden (1, R, E) -> queries, keys and values before RoPE, each (1, heads, R, D)."""
        rows = hidden.shape[1]
        normed = self._first(hidden)
        if self._qkv is not None and rows <= FEW_ROWS:
            heads = self._qkv.product(normed[0]).view(1, rows, -1, self._head_dim).transpose(1, 2)
            q, k, v = torch.split_with_sizes(heads, self._heads, 1)
        else:
            q, k, v = (
                part(normed).view(1, rows, -1, self._head_dim).transpose(1, 2)
                for part in self._projections
            )
        if self._head_norms:
            q, k = (norm(heads) for norm, heads in zip(self._head_norms, (q, k), strict=True))
        return q, k, v

    def behind(
        self, hidden: torch.Tensor, out: torch.Tensor, pause: Pause = no_check
    ) -> torch.Tensor:
        """Hidden (1, R, E) and its attention (1, H, R, D) -> (1, R, E)."""
        rows = hidden.shape[1]
        attended = self._out((out if rows == 1 else out.transpose(1, 2)).reshape(rows, -1))
        hidden = hidden + (attended if self._behind is None else self._behind(attended))
        normed = self._second(hidden)
        if self._gate_up is not None and rows <= FEW_ROWS:
            gate, up = self._gate_up.product(normed[0]).chunk(2, dim=-1)
            computed = self._down(self._act(gate) * up)
        else:
            computed = in_tiles(self._mlp, normed, pause) if self._tiled else self._mlp(normed)
        return hidden + (computed if self._behind_mlp is None else self._behind_mlp(computed))


def _hooks_of(view: torch.nn.Module) -> tuple[dict[int, Any], ...]:
    """What holds the hooks of all modules of a layer, those that are added later, too."""
    own = (
        hooks for part in view.modules() for hooks in (part._forward_hooks, part._forward_pre_hooks)
    )
    return (*own, torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
