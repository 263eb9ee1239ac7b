"""How fast this processor multiplies matrices of a dtype, measured.

A processor without instructions for bfloat16 converts every number and takes seven times as long as with float32; which
processors have them, and which libraries use them, is nowhere stated reliably. So a few products are timed.
"""

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

ROWS = 64  # A product of so many rows stands for a prompt's rows.
# That product has so many weights: its time is proportional to them, and this takes milliseconds.
SOME_WEIGHTS = 1 << 19
MOST_WEIGHTS = 1 << 23  # The product of one row has so many weights, which should not fit the caches.
ROUNDS = 4  # So many rounds are timed; the first one is not counted: kernels are chosen and memory is mapped.
PAIR_ROUNDS = 16  # Two products that may differ by little are timed in so many rounds.
SWITCHES = (  # These variables limit the instructions that libraries may use.
    "ONEDNN_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "FBGEMM_ENABLE_INSTRUCTIONS",
)
LEAST_S = 2e-4  # One measurement repeats short products until so many seconds have passed.
# A request is taken to compute `PROMPT_ROWS` rows of its prompt, and `STEPS` decoded tokens, a row each. A step
# computes for `OTHER_S` seconds besides each product: so tiny models, all of whose products are short, tie.
PROMPT_ROWS = 512
STEPS = 64
OTHER_S = 3e-4


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
        "clock": "processor time",
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


def gain_of_second(
    subject: dict[str, Any],
    products: Callable[[], Sequence[Callable[[torch.Tensor], torch.Tensor]]],
    rows: torch.Tensor,
) -> float:
    """How many times as fast as the first of two `products` of rows (R, in) the second one is.

    Measured here first and kept, as `product_speeds` is; `subject` names what is measured.
    """
    subject = {**_conditions(), **subject, "rows": len(rows)}
    kept = kept_numbers.read(subject, 1)
    if kept is None:
        pair = products()
        with _one_thread():
            times = [[_seconds(product, rows) for product in pair] for _ in range(PAIR_ROUNDS)][1:]
        first_s, second_s = (min(several) for several in zip(*times, strict=True))
        kept = ((first_s, second_s),)
        kept_numbers.keep(subject, kept)
    first_s, second_s = kept[0]
    return first_s / second_s


def speeds_allow_bfloat16(speeds: Sequence[ProductSpeed]) -> bool:
    """Whether bfloat16, the second of the speeds, is not slower for many rows than float32, the first."""
    return speeds[1].many_s <= speeds[0].many_s


@torch.no_grad()
def _seconds(product: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> float:
    """Seconds of processor time of one call, in this thread: waiting for a processor that others use does not count."""
    began, count = time.thread_time(), 0
    while count == 0 or time.thread_time() - began < LEAST_S:
        product(rows)
        count += 1
    return (time.thread_time() - began) / count
