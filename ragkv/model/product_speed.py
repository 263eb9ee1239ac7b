"""How fast this processor multiplies matrices of a dtype, measured, and which copies of weights make it faster.

A processor without instructions for bfloat16 converts every number and takes seven times as long as with float32; which
processors have them, and which libraries use them, is nowhere stated reliably. So a few products are timed.
"""

import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from ragkv.runtime import cpu_model

from . import kept_numbers
from .packed_linear import FEW_ROWS, Float16CopyLinear, PackedLinear, float16_copy

ROWS = 64  # of the product that stands for a prompt's rows
SOME_WEIGHTS = 1 << 19  # weights of that product: its time is proportional to them, and this takes milliseconds
MOST_WEIGHTS = 1 << 23  # weights of the product of one row, which should not fit the caches
ROUNDS = 4  # the first one is not counted: kernels are chosen and memory is mapped
SWITCHES = (  # instructions that are allowed
    *("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "FBGEMM_ENABLE_INSTRUCTIONS"),
)
LEAST_S = 2e-4  # one measurement repeats short products until this time has passed
PROMPT_ROWS = 512  # what a request is taken to compute: rows of its prompt ...
STEPS = 64  # ... and decoded tokens, a row each
PASS_ROWS = 256  # of the product that shows whether float16 copies pay for any number of rows in float32
PASS_SHAPE = (1024, 512)  # inputs and outputs of its layer
OTHER_S = 3e-4  # what a step computes for each product besides it: so tiny models, all of whose products are short, tie


@dataclass(frozen=True, slots=True)
class ProductSpeed:
    """The times of one linear layer in one dtype, in seconds."""

    many_s: float  # for `ROWS` rows
    one_s: float  # for one row

    @property
    def request_s(self) -> float:
        """Both in one number: `PROMPT_ROWS` rows computed together, then `STEPS` rows one by one."""
        return self.many_s * PROMPT_ROWS / ROWS + (self.one_s + OTHER_S) * STEPS


@cache
def product_speeds(dtypes: tuple[torch.dtype, ...], inputs: int, outputs: int) -> tuple[ProductSpeed, ...]:
    """The speeds of a linear layer of that shape in each dtype, on the CPU, as they were measured here first.

    They are kept in the user's cache folder: a choice that depends on them does not change while the machine is busy.
    """
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    subject = {**_conditions(), "dtypes": names, "inputs": inputs, "outputs": outputs}
    kept = kept_numbers.read(subject, len(dtypes))
    if kept is not None:
        return tuple(ProductSpeed(*pair) for pair in kept)
    found = measured_speeds(dtypes, inputs, outputs)
    kept_numbers.keep(subject, [(speed.many_s, speed.one_s) for speed in found])
    return found


def _conditions() -> dict[str, Any]:
    """What the speeds depend on besides shape and dtype: the machine, torch, and what torch may use here."""
    return {
        "machine": platform.node(),
        "cpu": cpu_model(),
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "bfloat16 kernels": has_bfloat16_kernels(),
        "switches": {name: os.environ.get(name, "") for name in SWITCHES},
    }


def measured_speeds(dtypes: tuple[torch.dtype, ...], inputs: int, outputs: int) -> tuple[ProductSpeed, ...]:
    """The speeds measured now, which takes some tens of milliseconds.

    The dtypes alternate, and the best of some rounds counts, because other work can only make a product slower. One
    thread computes: if other work takes a processor from one of several threads, all of them wait for it.
    """
    with _one_thread():
        return _speeds(dtypes, inputs, outputs)


def measured_speed(
    product: Callable[[torch.Tensor], torch.Tensor], inputs: int, dtype: torch.dtype = torch.float32
) -> ProductSpeed:
    """The speed of one product of rows (R, inputs), measured now, in the same way."""
    rows = torch.ones((ROWS, inputs), dtype=dtype)
    with _one_thread():
        pairs = [(_seconds(product, rows), _seconds(product, rows[:1])) for _ in range(ROUNDS)][1:]
    many, one = zip(*pairs, strict=True)
    return ProductSpeed(min(many), min(one))


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _speeds(dtypes: tuple[torch.dtype, ...], inputs: int, outputs: int) -> tuple[ProductSpeed, ...]:
    inputs = min(inputs, MOST_WEIGHTS)
    whole = torch.full((min(outputs, max(1, MOST_WEIGHTS // inputs)), inputs), 0.01)
    some = whole[: max(1, SOME_WEIGHTS // inputs)]
    scale = len(whole) / len(some)  # the whole layer's time from that of some of its outputs
    many, one = [float("inf")] * len(dtypes), [float("inf")] * len(dtypes)
    products = [(_product(some.to(dtype)), _product(whole.to(dtype))) for dtype in dtypes]
    for round_ in range(ROUNDS):
        for at, (of_some, of_whole) in enumerate(products):
            rows = torch.ones((ROWS, inputs), dtype=dtypes[at])
            many_s, one_s = _seconds(of_some, rows) * scale, _seconds(of_whole, rows[:1])
            if round_:
                many[at], one[at] = min(many[at], many_s), min(one[at], one_s)
    return tuple(ProductSpeed(*pair) for pair in zip(many, one, strict=True))


def _product(weights: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product of rows (R, in) with weights (out, in) -> (R, out), as a model computes it: packed in bfloat16."""
    if weights.dtype is torch.bfloat16 and has_bfloat16_kernels():
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weights)
            return lambda rows: torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
        except (AttributeError, RuntimeError, NotImplementedError):  # they are not public
            pass
    return lambda rows: functional.linear(rows, weights)


def has_bfloat16_kernels() -> bool:
    """Whether torch's library multiplies bfloat16 here without converting every matrix to float32."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


@cache
def multiplies_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 at least as fast as float32, rather than through it."""
    return has_bfloat16_kernels() and speeds_allow_bfloat16(product_speeds((torch.float32, torch.bfloat16), 512, 512))


def with_copy(plain: torch.nn.Linear) -> torch.nn.Module | None:
    """The layer with a copy of its weights by which it multiplies faster here; `None` if there is none."""
    dtype = plain.weight.dtype
    if dtype is torch.bfloat16 and _packs_bfloat16():
        return PackedLinear(plain)
    if dtype is torch.bfloat16 and multiplies_bfloat16():
        return None
    if dtype in (torch.float32, torch.bfloat16) and (copy := float16_copy(plain)) is not None:
        return Float16CopyLinear(plain, copy, math.inf if dtype is torch.bfloat16 else _float32_rows())
    return None


@cache
def reads_float16_copies() -> bool:
    """Whether models in bfloat16 read float16 copies here, by which they multiply as fast as models in float32."""
    plain = torch.nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    torch.nn.init.ones_(plain.weight)
    return isinstance(with_copy(plain), Float16CopyLinear)


@cache
def _packs_bfloat16() -> bool:
    """Whether this torch has oneDNN's operators, which are not public, and bfloat16 is fast here; tested by a call."""
    try:
        with torch.no_grad():
            PackedLinear(torch.nn.Linear(2, 2, dtype=torch.bfloat16))(torch.ones((1, 2), dtype=torch.bfloat16))
            return multiplies_bfloat16()
    except (AttributeError, RuntimeError):
        return False


@cache
def _float32_rows() -> float:
    """Up to how many rows a float32 layer multiplies faster with a float16 copy of its weights; infinite if always.

    Measured here first and kept, as `product_speeds` is.
    """
    inputs, outputs = PASS_SHAPE
    plain = torch.nn.Linear(inputs, outputs, bias=False)
    torch.nn.init.ones_(plain.weight)
    subject = {**_conditions(), "float16 copy of": list(PASS_SHAPE), "rows": PASS_ROWS}
    kept = kept_numbers.read(subject, 1)
    if kept is None:
        copy, rows = float16_copy(plain), torch.ones((PASS_ROWS, inputs))
        assert copy is not None  # the caller has made one
        with _one_thread():
            times = [(_seconds(plain, rows), _seconds(copy.product, rows)) for _ in range(ROUNDS)][1:]
        kept = ((min(of_plain for of_plain, _ in times), min(of_copy for _, of_copy in times)),)
        kept_numbers.keep(subject, kept)
    plain_s, copy_s = kept[0]
    return math.inf if copy_s <= plain_s else FEW_ROWS


def speeds_allow_bfloat16(speeds: Sequence[ProductSpeed]) -> bool:
    """Whether bfloat16, the second of the speeds, is not slower for many rows than float32, the first."""
    return speeds[1].many_s <= speeds[0].many_s


@torch.no_grad()
def _seconds(product: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> float:
    """Seconds of one call."""
    began, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - began < LEAST_S:
        product(rows)
        count += 1
    return (time.perf_counter() - began) / count
