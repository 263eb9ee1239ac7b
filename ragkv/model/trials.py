"""What is tried on a model when its adapter is made: which of its parts have a faster way."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from .device.graphs import Graphs, capture_on
from .device.norms import is_close
from .layer_views import plain_layers
from .layers import PlainLayer
from .rows import Rows

if TYPE_CHECKING:
    from .adapter import Adapter


def rotates_in_halves(adapter: "Adapter", rotary_dims: int) -> bool:
    """Whether the model's rotary function equals `rotate_halves`; tested on random numbers."""
    generator = torch.Generator().manual_seed(0)
    raw, cos, sin = (
        torch.randn((1, 3, rotary_dims), generator=generator).to(adapter.device) for _ in range(3)
    )
    raw = torch.stack((raw, -2 * raw), dim=1)  # (1, 2, 3, rotary dims)
    return rotary_dims % 2 == 0 and torch.allclose(
        adapter.rotate_by_model(raw, cos, sin), adapter.rotate_halves(raw, cos, sin), atol=1e-5
    )


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
    return adapter.run_layer(0, adapter.embed(tokens), rows, kv, adapter.rope.tables(3))


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
