"""How fast this processor multiplies matrices, measured once and kept in the user's cache folder.

A processor without instructions for bfloat16 converts every number and takes seven times as long as with float32; which
processors have them, and which libraries use them, is nowhere stated reliably. So a few products are timed. What was
measured is kept, so that a choice that rests on it does not change while the machine is busy. A file that cannot be
read or written is no error: then the products are timed again.
"""

import hashlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ragkv.runtime import cpu_model, make_private_folder, replace_file

from .packed_linear import PackedLinear

log = logging.getLogger(__name__)

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

Product = Callable[[torch.Tensor], torch.Tensor]


class ProductSpeed(NamedTuple):
    """The times of one linear layer in one dtype, in seconds."""

    many_s: float  # for `ROWS` rows
    one_s: float  # for one row

    @property
    def request_s(self) -> float:
        """Both in one number: `PROMPT_ROWS` rows computed together, then `STEPS` rows one by one."""
        return self.many_s * PROMPT_ROWS / ROWS + (self.one_s + OTHER_S) * STEPS


@cache
def product_speeds(dtypes: tuple[torch.dtype, ...], inputs: int, outputs: int) -> tuple[ProductSpeed, ...]:
    """The speeds of a linear layer of that shape in each dtype, on the CPU, as they were measured here first."""
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    inputs = min(inputs, MOST_WEIGHTS)
    whole = min(outputs, max(1, MOST_WEIGHTS // inputs))
    some = min(whole, max(1, SOME_WEIGHTS // inputs))

    def timed() -> list[tuple[Product, torch.Tensor]]:
        found = []
        for dtype in dtypes:
            weights, rows = torch.full((whole, inputs), 0.01, dtype=dtype), torch.ones((ROWS, inputs), dtype=dtype)
            found += [(_product(weights[:some]), rows), (_product(weights), rows[:1])]
        return found

    seconds = kept_seconds({"dtypes": names, "inputs": inputs, "outputs": outputs}, timed, ROUNDS)
    scale = whole / some  # the whole layer's time from that of some of its outputs
    return tuple(ProductSpeed(many * scale, one) for many, one in zip(seconds[::2], seconds[1::2], strict=True))


def measured_speed(product: Product, inputs: int, dtype: torch.dtype = torch.float32) -> ProductSpeed:
    """The speed of one product of rows (R, inputs), measured now."""
    rows = torch.ones((ROWS, inputs), dtype=dtype)
    return ProductSpeed(*measured_seconds([(product, rows), (product, rows[:1])], ROUNDS))


def gain_of_second(subject: Mapping[str, Any], products: Callable[[], Sequence[Product]], rows: torch.Tensor) -> float:
    """How many times as fast as the first of two `products` of rows (R, in) the second one is, as measured here first.

    `subject` names what is measured.
    """

    def timed() -> list[tuple[Product, torch.Tensor]]:
        return [(product, rows) for product in products()]

    first_s, second_s = kept_seconds({**subject, "rows": len(rows)}, timed, PAIR_ROUNDS)
    return first_s / second_s


def kept_seconds(
    subject: Mapping[str, Any], timed: Callable[[], Sequence[tuple[Product, torch.Tensor]]], rounds: int
) -> tuple[float, ...]:
    """The `measured_seconds` of what `timed` makes, as they were measured for `subject` on this machine first."""
    subject = {**_conditions(), **subject}
    name = hashlib.blake2b(json.dumps(subject, sort_keys=True).encode(), digest_size=12).hexdigest()
    file = None
    try:
        file = folder() / f"{name}.json"
        kept = json.loads(file.read_text(encoding="utf-8"))
        found = tuple(float(seconds) for seconds in kept["seconds"])
        if kept["subject"] == subject and found and all(math.isfinite(s) and s > 0 for s in found):
            return found
    except (OSError, RuntimeError, ValueError, TypeError, KeyError):
        pass  # there is none, or it is damaged
    found = measured_seconds(timed(), rounds)
    try:
        if file is not None:
            make_private_folder(file.parent)
            replace_file(file, (json.dumps({"subject": subject, "seconds": found}, indent=1) + "\n").encode())
    except (OSError, RuntimeError) as error:  # no home folder, a read-only one, a full disk
        log.debug("Measured speeds are not kept: %s.", error)
    return found


def folder() -> Path:
    """Where measured times are kept: `ragkv/speeds` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ragkv" / "speeds"


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


def measured_seconds(timed: Sequence[tuple[Product, torch.Tensor]], rounds: int) -> tuple[float, ...]:
    """Seconds of one call of each product with its rows, measured now.

    The products alternate, and the best of some rounds counts, because other work can only make a product slower. One
    thread computes: if other work takes a processor from one of several threads, all of them wait for it.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = [[_seconds(product, rows) for product, rows in timed] for _ in range(rounds)][1:]
    finally:
        torch.set_num_threads(threads)
    return tuple(min(several) for several in zip(*times, strict=True))


@torch.no_grad()
def _seconds(product: Product, rows: torch.Tensor) -> float:
    """Seconds of processor time of one call, in this thread: waiting for a processor that others use does not count."""
    began, count = time.thread_time(), 0
    while count == 0 or time.thread_time() - began < LEAST_S:
        product(rows)
        count += 1
    return (time.thread_time() - began) / count


def _product(weights: torch.Tensor) -> Product:
    """The product of rows (R, in) with weights (out, in) -> (R, out), as a model computes it: packed in bfloat16."""
    outputs, inputs = weights.shape
    plain = torch.nn.Linear(inputs, outputs, bias=False, device="meta")
    plain.weight = torch.nn.Parameter(weights)
    if weights.dtype is torch.bfloat16 and has_bfloat16_kernels():
        try:
            return PackedLinear(plain)
        except (AttributeError, RuntimeError, NotImplementedError):  # the operators are not public
            pass
    return plain


def has_bfloat16_kernels() -> bool:
    """Whether torch's library multiplies bfloat16 here without converting every matrix to float32."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


@cache
def multiplies_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 at least as fast as float32 for many rows, rather than through it."""
    if not has_bfloat16_kernels():
        return False
    wide, narrow = product_speeds((torch.float32, torch.bfloat16), 512, 512)
    return narrow.many_s <= wide.many_s
