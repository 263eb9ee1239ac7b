"""Copies of weights that make products faster on a CPU, for all linear layers of a model (see `packed_linear`).

A copy needs as much memory as weights of two bytes each, so the caller sets a limit. The model keeps its own weights
and is not changed. Later changes of the weights have no effect on the copies; stored entries would not match them
either (see `fingerprint.py`).
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import torch

from ragkv.runtime import openmp

from .packed_linear import Float16CopyLinear, PackedLinear, float16_copy
from .product_speed import multiplies_bfloat16, second_is_faster

COPY_BYTES = 2  # of a weight
WORKERS = 4  # that copy at a time: each takes another four bytes a weight of its layer meanwhile
FEW_ROWS = 48  # up to which models in float32 read float16 copies, whatever the processor
FEWEST_ROWS = 2  # up to which models in bfloat16 do where bfloat16 is fast: oneDNN is slower for one and two rows
PASS_ROWS = 256  # of the product that shows whether float16 copies pay for any number of rows in float32
PASS_SHAPE, ROW_SHAPE = (1024, 512), (2048, 2048)  # inputs and outputs of its layer, and of that for one row

CopiedLinear = PackedLinear | Float16CopyLinear


class Copies(NamedTuple):
    """Which copies of a layer's weights are made."""

    packed: bool = False  # in bfloat16, in oneDNN's layout
    float16_rows: float = 0  # up to how many rows are multiplied by a copy in float16; 0: there is none

    @property
    def bytes_per_weight(self) -> int:
        """Of all copies."""
        return COPY_BYTES * (self.packed + bool(self.float16_rows))

    def within(self, weights: int, size: int) -> "Copies":
        """As many of the copies of so many weights as take at most `size` bytes."""
        fewer = (self, self._replace(float16_rows=0), Copies())
        return next(copies for copies in fewer if copies.bytes_per_weight * weights <= size)

    def of(self, plain: torch.nn.Linear) -> CopiedLinear | None:
        """The layer over these copies, as far as they can be made."""
        packed = PackedLinear(plain) if self.packed else None
        made = float16_copy(plain) if self.float16_rows else None
        return packed if made is None else Float16CopyLinear(packed or plain, made, self.float16_rows)


@cache
def useful_copies(dtype: torch.dtype) -> Copies:
    """Which copies make products of layers in `dtype` faster on this processor."""
    if dtype not in (torch.float32, torch.bfloat16) or float16_copy(_ones((2, 2), dtype)) is None:
        return Copies(packed=dtype is torch.bfloat16 and _packs_bfloat16())
    if dtype is torch.float32:
        return Copies(float16_rows=math.inf if _copy_is_faster(dtype, PASS_SHAPE, PASS_ROWS) else FEW_ROWS)
    if not multiplies_bfloat16():
        return Copies(float16_rows=math.inf)
    return Copies(_packs_bfloat16(), FEWEST_ROWS if _copy_is_faster(dtype, ROW_SHAPE, 1) else 0)


def reads_float16_copies() -> bool:
    """Whether models in bfloat16 read float16 copies for any rows here: then they are as fast as in float32."""
    return useful_copies(torch.bfloat16).float16_rows == math.inf


@cache
def _packs_bfloat16() -> bool:
    """Whether this torch has oneDNN's operators, which are not public, and bfloat16 is fast here; tested by a call."""
    try:
        with torch.no_grad():
            PackedLinear(_ones((2, 2), torch.bfloat16))(torch.ones((1, 2), dtype=torch.bfloat16))
            return multiplies_bfloat16()
    except (AttributeError, RuntimeError):
        return False


def _copy_is_faster(dtype: torch.dtype, shape: tuple[int, int], rows: int) -> bool:
    """Whether a layer of these inputs and outputs multiplies rows as fast by a float16 copy as without it."""

    def products() -> list[Callable[[torch.Tensor], torch.Tensor]]:
        plain = _ones(shape, dtype)
        without = Copies(packed=dtype is torch.bfloat16 and _packs_bfloat16())
        return [without.of(plain) or plain, without._replace(float16_rows=math.inf).of(plain) or plain]

    subject = {"float16 copy of": list(shape), "dtype": str(dtype), "rows": rows}
    return second_is_faster(subject, products, torch.ones((rows, shape[0]), dtype=dtype))


def _ones(shape: tuple[int, int], dtype: torch.dtype) -> torch.nn.Linear:
    layer = torch.nn.Linear(*shape, bias=False, dtype=dtype)
    torch.nn.init.ones_(layer.weight)
    return layer


def with_copies(
    modules: Sequence[torch.nn.Module], limit_bytes: int, device: torch.device
) -> tuple[list[torch.nn.Module], int]:
    """The modules, or views of them with copied linear layers, and the bytes of the copies, at most `limit_bytes`."""
    made = {} if device.type != "cpu" else _made(list(_chosen(modules, limit_bytes)))
    size = sum(COPY_BYTES * layer.copies * layer.weight.numel() for layer in made.values())
    return [_replaced(module, made) for module in modules], size


def _chosen(modules: Sequence[torch.nn.Module], left: int) -> Iterator[tuple[torch.nn.Linear, Copies]]:
    """The plain linear layers that are copied, with their copies, until these take the bytes that are `left`."""
    for part in dict.fromkeys(part for module in modules for part in module.modules()):
        if isinstance(part, torch.nn.Linear) and _is_plain(part):
            size = part.weight.numel()
            copies = useful_copies(part.weight.dtype).within(size, left)
            left -= copies.bytes_per_weight * size
            if copies.bytes_per_weight:
                yield part, copies


def _made(chosen: Sequence[tuple[torch.nn.Linear, Copies]]) -> dict[torch.nn.Module, CopiedLinear]:
    """The layers over their copies, but for those of whose weights float16 loses too much.

    Copying is not parallel in itself, and waiting for other threads makes it slow where other work runs.
    """
    with ThreadPoolExecutor(min(WORKERS, torch.get_num_threads()), initializer=openmp.use_one_thread) as pool:
        layers = pool.map(lambda pair: pair[1].of(pair[0]), chosen)
        return {plain: made for (plain, _), made in zip(chosen, layers, strict=True) if made is not None}


def _replaced(module: torch.nn.Module, made: Mapping[torch.nn.Module, CopiedLinear]) -> torch.nn.Module:
    """`module`, or a view of it with what was made for its parts."""
    if module in made:
        return made[module]
    parts = {name: None if part is None else _replaced(part, made) for name, part in module._modules.items()}
    return module if parts == module._modules else view_with(module, parts)


def _is_plain(module: torch.nn.Linear) -> bool:
    """Whether it is an ordinary linear layer: no hooks, no quantised weights, no adapters."""
    return (
        type(module) is torch.nn.Linear
        and type(module.weight) is torch.nn.Parameter
        and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
    )


def view_with(module: torch.nn.Module, parts: dict[str, Any]) -> torch.nn.Module:
    """A shallow copy of `module` with other `parts`."""
    view = copy.copy(module)
    view._modules = {**module._modules, **parts}
    return view
