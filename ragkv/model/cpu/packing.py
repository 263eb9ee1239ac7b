"""Copies of weights that a CPU multiplies faster, for all linear layers of a model, without
changing a weight.

In bfloat16, oneDNN reorders plain weights in every call, and a packed copy only once. The products
are equal bit for bit.

Copies in float16 are for FBGEMM, which torch brings. It multiplies rows in float32 by weights in
float16 and adds in float32. float16 holds the weights of a bfloat16 checkpoint. If some are tiny,
all are multiplied by a power of two. So on processors without products in bfloat16, a bfloat16
model is as fast as one in float32 (docs/research/speed.md).

A copy takes two bytes for each weight, so the caller sets a limit. A copy does not follow later
changes of the weights.
"""

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import torch

from ragkv.runtime import available_bytes, openmp

from .copied import COPY_BYTES, FEW_ROWS, CopiedLinear, Float16Copy, PackedLinear
from .int4 import ATTRIBUTE, Grid, int4_copy
from .product_speed import gain_of_second, multiplies_bfloat16

log = logging.getLogger(__name__)

SPARE_BYTES = 512 << 20  # free memory that no copy takes
# So many threads copy at a time: each takes another four bytes for each weight of its layer
# meanwhile.
WORKERS = 4
# Rows up to which models in float32 read float16 copies, whatever the processor.
FLOAT32_ROWS = 48
INT4_BYTES = 0.625  # of a copy in four bits, for each weight, with its steps
# Rows of the product that shows whether float16 copies pay for any number of rows in float32.
PASS_ROWS = 256
# inputs and outputs of its layer, and of that for one row
PASS_SHAPE = (1024, 512)
ROW_SHAPE = (2048, 4096)
# A dtype counts as fast as another one that gains less than this, and a second copy has to gain as
# much.
LEVEL = 1.1
EXPONENT = 15  # The greatest weight of a float16 copy is below 2^15, because float16 ends at 2^16.
# The norm of the changes of an output's weights may be this share of their norm: a float32 sum is
# rounded by as much.
LOST = 2.0**-24
# Outputs weaker than this share of the strongest count as strong as this share: hardly anything is
# left of them.
FAINT = 2.0**-14
CHECKED_ROWS = 1024  # So many rows of weights are checked at a time.


@torch.no_grad()
def float16_copy(plain: torch.nn.Linear) -> Float16Copy | None:
    """A copy of a layer's weights; `None` if float16 does not hold them, or if this torch cannot
    multiply by it.
    """
    weights = plain.weight.detach()
    bias = None if plain.bias is None else plain.bias.detach().float()
    greatest = float(weights.abs().amax()) if weights.numel() else 0.0
    if not 0 < greatest < math.inf:
        return None
    largest = EXPONENT - math.frexp(greatest)[1]
    shift = next((shift for shift in (0, largest) if _fits(weights, shift)), None)
    if shift is None:
        return None
    scaled = (weights * 2.0**shift if shift else weights).float()
    try:
        packed = torch.ops.quantized.linear_prepack_fp16(scaled, bias)
        made = Float16Copy(packed, 2.0**-shift, COPY_BYTES * weights.numel())
        made.product(torch.ones((1, plain.in_features)))
    except (AttributeError, RuntimeError):
        return None
    return made


def _fits(weights: torch.Tensor, shift: int) -> bool:
    """Whether float16 holds `weights` (out, in) times 2^shift: see `LOST` and `FAINT`."""
    norms = []
    lost = []
    for part in torch.split(weights, CHECKED_ROWS):
        scaled = part.float() * 2.0**shift
        norms.append(scaled.norm(dim=1))
        lost.append((scaled.half().float() - scaled).norm(dim=1))
    norm = torch.cat(norms)
    return bool((torch.cat(lost) <= LOST * norm.clamp_min(FAINT * float(norm.amax()))).all())


class Copies(NamedTuple):
    """Which copies of a layer's weights are made."""

    packed: bool = False  # in bfloat16, in oneDNN's layout
    # up to how many rows are multiplied by a copy in float16; 0: there is none
    float16_rows: float = 0
    int4_rows: int = 0  # likewise in four bits, where the weights have no more

    @property
    def bytes_per_weight(self) -> float:
        """Of all copies."""
        return COPY_BYTES * (self.packed + bool(self.float16_rows)) + INT4_BYTES * bool(
            self.int4_rows
        )

    @property
    def first(self) -> "Copies":
        """Only the copy for any number of rows, if it is another one than those for few rows."""
        return Copies(packed=True) if self.packed else self._replace(int4_rows=0)

    def of(self, plain: torch.nn.Linear) -> PackedLinear | CopiedLinear | None:
        """The layer over these copies, as far as they can be made."""
        made: PackedLinear | CopiedLinear | None = PackedLinear(plain) if self.packed else None
        int4 = int4_copy(plain) if self.int4_rows else None
        if (
            self.float16_rows > (self.int4_rows if int4 else 0)
            and (half := float16_copy(plain)) is not None
        ):
            made = CopiedLinear(made or plain, half, self.float16_rows)
        return made if int4 is None else CopiedLinear(made or plain, int4, self.int4_rows)


@cache
def useful_copies(dtype: torch.dtype) -> Copies:
    """Which copies make products of layers in `dtype` faster on this processor."""
    if dtype is torch.float32:
        pays = _gain_of(Copies(float16_rows=math.inf), dtype, PASS_SHAPE, PASS_ROWS) >= 1
        return Copies(float16_rows=math.inf if pays else FLOAT32_ROWS)
    if dtype is not torch.bfloat16:
        return Copies()
    int4_rows = (
        FEW_ROWS if _gain_of(Copies(int4_rows=FEW_ROWS), dtype, ROW_SHAPE, 1) >= LEVEL else 0
    )
    if not multiplies_bfloat16():
        return Copies(float16_rows=math.inf, int4_rows=int4_rows)
    pays = _gain_of(Copies(float16_rows=FEW_ROWS), dtype, ROW_SHAPE, 1) >= LEVEL
    return Copies(_packs_bfloat16(), FEW_ROWS if pays else 0, int4_rows)


@cache
def copies_reach_float32() -> bool:
    """Whether a model in bfloat16 that reads float16 copies for any rows here is as fast as the
    same in float32.
    """
    if useful_copies(torch.bfloat16).float16_rows < math.inf:
        return False
    return (
        _gain_of(Copies(float16_rows=math.inf), torch.float32, PASS_SHAPE, PASS_ROWS) >= 1 / LEVEL
    )


@cache
def _packs_bfloat16() -> bool:
    """Whether this torch has oneDNN's operators, which are not public, and bfloat16 is fast here;
    tested by a call.
    """
    try:
        with torch.no_grad():
            PackedLinear(_ones((2, 2), torch.bfloat16))(
                torch.ones((1, 2), dtype=torch.bfloat16, device="cpu")
            )
            return multiplies_bfloat16()
    except (AttributeError, RuntimeError):
        return False


def _gain_of(copies: Copies, dtype: torch.dtype, shape: tuple[int, int], rows: int) -> float:
    """How many times as fast a layer of these inputs and outputs multiplies rows by `copies`; 0 if
    there are none.
    """
    if copies.of(_ones((32, 32), dtype)) is None:
        return 0

    def products() -> list[Callable[[torch.Tensor], torch.Tensor]]:
        plain = _ones(shape, dtype)
        usual = Copies(packed=dtype is torch.bfloat16 and _packs_bfloat16())
        return [each.of(plain) or plain for each in (usual, copies)]

    subject = {"copies": str(copies), "of": list(shape), "dtype": str(dtype)}
    return gain_of_second(
        subject, products, torch.ones((rows, shape[0]), dtype=dtype, device="cpu")
    )


def _ones(shape: tuple[int, int], dtype: torch.dtype) -> torch.nn.Linear:
    layer = torch.nn.Linear(*shape, bias=False, dtype=dtype, device="cpu")
    torch.nn.init.ones_(layer.weight)
    setattr(layer, ATTRIBUTE, Grid.of_one_value(1.0, *reversed(shape)))
    return layer


def with_copies(
    modules: Sequence[torch.nn.Module], limit_bytes: int, device: torch.device
) -> tuple[list[torch.nn.Module], int]:
    """The modules, or views of them with copied linear layers, and the bytes of the copies, at most
    `limit_bytes`.

    Layers whose weights float16 does not hold count as if they were copied.
    """
    if device.type != "cpu" or limit_bytes <= 0:
        return list(modules), 0
    made = _made(_chosen(modules, limit_bytes))
    size = sum(layer.copied_bytes for layer in made.values())
    return [_replaced(module, made) for module in modules], size


def _chosen(modules: Sequence[torch.nn.Module], limit_bytes: int) -> dict[torch.nn.Linear, Copies]:
    """The copies of each plain linear layer: first one of every layer, then second ones with what
    is left.
    """
    parts = dict.fromkeys(part for module in modules for part in module.modules())
    plain = [part for part in parts if isinstance(part, torch.nn.Linear) and _is_plain(part)]
    wanted = {part: _useful_for(part) for part in plain}
    free = available_bytes()
    left = limit = limit_bytes if free is None else min(limit_bytes, max(0, free - SPARE_BYTES))
    chosen = dict.fromkeys(plain, Copies())
    for only_first in (True, False):
        for part, copies in wanted.items():
            copies = copies.first if only_first else copies
            size = int(
                (copies.bytes_per_weight - chosen[part].bytes_per_weight) * part.weight.numel()
            )
            if size <= left:
                chosen[part], left = copies, left - size
    if limit < limit_bytes and chosen != wanted:
        log.warning(
            "Copies of weights, which make products faster, take %.1f GiB and not as much as "
            "packed_bytes allows: "
            "%.1f GiB of memory are free.",
            *((limit - left) / 2**30, (free or 0) / 2**30),
        )
    return {part: copies for part, copies in chosen.items() if copies.bytes_per_weight}


def _useful_for(part: torch.nn.Linear) -> Copies:
    """Which copies of a layer's weights make its products faster: one in four bits needs a grid."""
    copies = useful_copies(part.weight.dtype)
    return copies if hasattr(part, ATTRIBUTE) else copies._replace(int4_rows=0)


def _made(
    chosen: Mapping[torch.nn.Linear, Copies],
) -> dict[torch.nn.Module, PackedLinear | CopiedLinear]:
    """The layers over their copies, but for those of whose weights float16 loses too much.

    Copying is not parallel in itself, and waiting for other threads makes it slow where other work
    runs.
    """
    threads = ThreadPoolExecutor(
        min(WORKERS, torch.get_num_threads()), initializer=openmp.use_one_thread
    )
    with threads:
        layers = threads.map(lambda part: chosen[part].of(part), chosen)
        made: dict[torch.nn.Module, PackedLinear | CopiedLinear] = {
            part: layer for part, layer in zip(chosen, layers, strict=True) if layer is not None
        }
    refused = [
        part
        for part in chosen
        if part not in made and part.weight.dtype is torch.bfloat16 and chosen[part].float16_rows
    ]
    if refused:
        log.warning(
            "%d linear layers in bfloat16 are slow on this processor, because float16 does not "
            "hold their weights. "
            "Set dtype = float32 if its memory suffices.",
            len(refused),
        )
    return made


def _replaced(
    module: torch.nn.Module, made: Mapping[torch.nn.Module, PackedLinear | CopiedLinear]
) -> torch.nn.Module:
    """`module`, or a view of it with what was made for its parts."""
    if module in made:
        return made[module]
    parts = {
        name: None if part is None else _replaced(part, made)
        for name, part in module._modules.items()
    }
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
