"""Views of a model's layers: shallow copies that share every weight. The model itself is never
changed.

A view attends through `row_attention` and runs its MLP in tiles of rows, which needs less memory in
long passes. `plain_layers` finds the views whose parts can be called directly.
"""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import AttentionInterface, Cache

from ragkv.runtime import no_check

from .attention import Watch
from .cpu.packing import view_with
from .device.graphs import Graphs, capture_on
from .device.norms import is_close
from .layers import Part, PlainLayer, in_tiles
from .promptkv import PromptKV, PromptPart
from .recording import Recording
from .rope import RotaryTables
from .rows import LayerPass, Pause, Rows

if TYPE_CHECKING:
    from .adapter import Adapter

IMPLEMENTATION = "ragkv_rows"  # of attention, as transformers knows it

# The names of the norms of a layer: before and behind attention, before and behind the MLP.
LAYER_NORMS: tuple[tuple[str, str | None, str, str | None], ...] = (
    ("input_layernorm", None, "post_attention_layernorm", None),  # llama and most others
    # gemma
    (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    # glm4
    (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
)

# The parts of a usual attention.
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}


class TilePause:
    """What the MLPs of one model call between two tiles.

    A layer of transformers takes no argument for it. The passes over a model run one after another,
    so the adapter sets it for the layer that runs.
    """

    def __init__(self) -> None:
        self.pause: Pause = no_check


class InTiles(torch.nn.Module):
    """An MLP that runs in tiles of rows."""

    def __init__(self, whole: torch.nn.Module, now: TilePause) -> None:
        super().__init__()
        self.whole = whole
        self._now = now

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden (1, R, E) -> the same shape."""
        return in_tiles(cast(Part, self.whole), hidden, self._now.pause)


def attending_view(
    layer: torch.nn.Module, attention_name: str, tiles: TilePause | None
) -> torch.nn.Module:
    """`layer` attending through `row_attention`; with `tiles` a dense MLP runs in tiles of rows."""
    attn = copy.copy(getattr(layer, attention_name))
    attn.config = copy.copy(attn.config)
    attn.config._attn_implementation = IMPLEMENTATION
    changed: dict[str, Any] = {attention_name: attn}
    mlp = layer._modules.get("mlp")
    if tiles is not None and mlp is not None and _is_dense(mlp):
        changed["mlp"] = InTiles(mlp, tiles)
    return view_with(layer, changed)


def _is_dense(mlp: torch.nn.Module) -> bool:
    """Whether all its weights are in linear layers. Experts are not tiled: they run better with
    many rows.
    """
    own = (part for part in mlp.modules() if next(part.parameters(recurse=False), None) is not None)
    return all(isinstance(part, torch.nn.Linear) for part in own)


def plain_layers(
    views: list[torch.nn.Module], attention_name: str, fuse_norms: bool = False
) -> list[PlainLayer] | None:
    """The layers of `views`; `None` if they have other parts than usual, or are not all of one
    kind.

    `plain_layers_of` tests that the first one gives the same numbers. With `fuse_norms` a norm is
    one launch where torch has it.
    """
    parts = views[0]._modules
    attentions = [getattr(view, attention_name) for view in views]
    if any(
        a._modules.keys() - HEAD_NORMS != PROJECTIONS or "forward" in vars(a) for a in attentions
    ):
        return None
    kinds = {
        (type(view), *(type(getattr(part, "whole", part)) for part in view._modules.values()))
        for view in views
    }
    norms = next(
        (one for one in LAYER_NORMS if {attention_name, "mlp", *filter(None, one)} == parts.keys()),
        None,
    )
    if norms is None or None in parts.values() or len(kinds) > 1:
        return None
    return [PlainLayer(view, attention_name, norms, fuse_norms) for view in views]


@torch.no_grad()
def plain_layers_of(adapter: "Adapter") -> list[PlainLayer] | None:
    """The layers without what changes no bit of the first: a rotation by 0, and torch's calls
    between parts; `None` if they cannot be called so.

    A device fuses norms, too, which rounds in another place, and CUDA captures graphs.
    """
    on_host = adapter.device.type == "cpu"
    wanted = _first_layer(adapter, None)
    plain = plain_layers(adapter.layers, adapter.attention_name, fuse_norms=not on_host)
    same = torch.equal if on_host else is_close
    if plain is None or not _is_same(lambda: _first_layer(adapter, plain), wanted, same):
        return None
    if adapter.device.type == "cuda":
        use_graphs(plain, Graphs(capture_on(adapter.device)))
    return plain


def run_layer(
    adapter: "Adapter",
    layer: int,
    hidden: torch.Tensor,
    rows: Rows,
    kv: PromptKV,
    tables: RotaryTables,
    record: Recording | None = None,
    watch: Watch | None = None,
) -> torch.Tensor:
    """Run `layer` over hidden (1, R, E) of `rows`: writes their KV to `kv`, and they attend over
    all of it.
    """
    part = PromptPart(kv, rows, adapter.windows, record, watch)
    step = adapter.joint_pass(layer, [part], *tables.of(adapter.rope_kind(layer), rows))
    return adapter.call_layer(layer, hidden, rows, step)


def use_graphs(layers: list[PlainLayer], graphs: Graphs | None) -> None:
    """Let `layers` run as `graphs`; `None`: part by part."""
    for layer in layers:
        layer.graphs = graphs


def _first_layer(adapter: "Adapter", plain: list[PlainLayer] | None) -> torch.Tensor:
    """What the first layer makes of some tokens, (1, 3, E)."""
    tokens = torch.arange(3, device=adapter.device) % adapter.vocabulary
    rows = Rows.span(0, 3, adapter.device)
    kv = adapter.new_kv(3)
    adapter._plain = plain
    return run_layer(adapter, 0, adapter.embed(tokens), rows, kv, adapter.rope.tables(3))


def _is_same(
    compute: Callable[[], torch.Tensor],
    wanted: torch.Tensor,
    same: Callable[[torch.Tensor, torch.Tensor], bool],
) -> bool:
    """Whether `compute` returns the numbers `wanted`, and does not fail."""
    try:
        return same(compute(), wanted)
    except (RuntimeError, ValueError, TypeError, AttributeError):
        return False


class Captured(Exception):
    """Raised by `CaptureCache` to stop a layer before its attention."""

    def __init__(self, k_raw: torch.Tensor, v: torch.Tensor) -> None:
        super().__init__()
        self.k_raw = k_raw
        self.v = v


class CaptureCache(Cache):
    """Stops a layer when it has made its keys and values."""

    def __init__(self, step: LayerPass | None) -> None:
        """`step` is given them, too."""
        super().__init__(layers=[])
        self._step = step

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Raise `Captured` with k_raw and v, each (1, G, R, D)."""
        if self._step is not None:
            self._step.update(key_states, value_states, layer_idx)
        raise Captured(key_states, value_states)


def row_attention(
    module: torch.nn.Module,  # noqa: ARG001 - the interface's signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: LayerPass,
    scaling: float,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls: query (1, H, R, D) before RoPE -> (1, R, H, D)."""
    out = attention_mask.attend(query, key, value, scaling, softcap)
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers. Safe to call twice."""
    AttentionInterface.register(IMPLEMENTATION, row_attention)
