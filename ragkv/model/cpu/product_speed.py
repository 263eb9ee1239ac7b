"""Measures how fast this processor multiplies matrices, once, and keeps the result in the user's
cache folder.

A processor without instructions for bfloat16 takes seven times as long as with float32. No source
says reliably which processors have them, and which libraries use them. So a few products are timed.
The result is kept, so that a choice does not change while the machine is busy.
"""

import hashlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.nn import functional

from ragkv.runtime import DAMAGED, cache_folder, cpu_model, make_private_folder, replace_file

log = logging.getLogger(__name__)

ROWS = 64  # of the product that is timed in place of a prompt's
LAYER = (512, 1024)  # The inputs and outputs of its layer: it takes milliseconds.
# So many rounds are timed; the first one is not counted: kernels are chosen and memory is mapped.
ROUNDS = 4
PAIR_ROUNDS = 16  # of timing two products that may differ by little
SWITCHES = (  # These variables limit the instructions that libraries may use.
    "ONEDNN_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "FBGEMM_ENABLE_INSTRUCTIONS",
)
LEAST_S = 2e-4  # A measurement repeats short products for at least this time.

Product = Callable[[torch.Tensor], torch.Tensor]


@cache
def product_seconds(dtypes: tuple[torch.dtype, ...]) -> tuple[float, ...]:
    """The times of `ROWS` rows times the weights of `LAYER` in each dtype on the CPU, as they were
    measured first.
    """
    inputs, outputs = LAYER

    def timed() -> list[tuple[Product, torch.Tensor]]:
        weights = [torch.full((outputs, inputs), 0.01, dtype=dtype) for dtype in dtypes]
        ones = [torch.ones((ROWS, inputs), dtype=dtype) for dtype in dtypes]
        return [
            (partial(functional.linear, weight=one), rows)
            for one, rows in zip(weights, ones, strict=True)
        ]

    return kept_seconds(
        {"dtypes": [str(dtype) for dtype in dtypes], "layer": list(LAYER)}, timed, ROUNDS
    )


def gain_of_second(
    subject: Mapping[str, Any], products: Callable[[], Sequence[Product]], rows: torch.Tensor
) -> float:
    """How many times as fast as the first of two `products` of rows (R, in) the second one is, as
    measured here first.

    `subject` names what is measured.
    """
    first_s, second_s = kept_seconds(
        {**subject, "rows": len(rows)},
        lambda: [(product, rows) for product in products()],
        PAIR_ROUNDS,
    )
    return first_s / second_s


def kept_seconds(
    subject: Mapping[str, Any],
    timed: Callable[[], Sequence[tuple[Product, torch.Tensor]]],
    rounds: int,
) -> tuple[float, ...]:
    """The `measured_seconds` of what `timed` makes, as they were measured for `subject` on this
    machine first.
    """
    text = json.dumps({**_conditions(), **subject}, sort_keys=True)
    file = None
    try:
        file = (
            cache_folder("speeds")
            / f"{hashlib.blake2b(text.encode(), digest_size=12).hexdigest()}.json"
        )
        found = tuple(
            float(seconds) for seconds in json.loads(file.read_text(encoding="utf-8"))["seconds"]
        )
        if found and all(math.isfinite(seconds) and seconds > 0 for seconds in found):
            return found
    except (OSError, RuntimeError, *DAMAGED):
        pass  # there is none, or it is damaged
    found = measured_seconds(timed(), rounds)
    try:
        if file is not None:
            make_private_folder(file.parent)
            replace_file(
                file, json.dumps({"subject": json.loads(text), "seconds": found}, indent=1).encode()
            )
    except (OSError, RuntimeError) as error:  # no home folder, a read-only one, a full disk
        log.debug("Measured speeds are not kept: %s.", error)
    return found


def _conditions() -> dict[str, Any]:
    """What the speeds depend on besides shape and dtype: the machine, torch, and what torch may use
    here.
    """
    return {
        "clock": "processor time",
        "machine": platform.node(),
        "cpu": cpu_model(),
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "bfloat16 kernels": has_bfloat16_kernels(),
        "switches": {name: os.environ.get(name, "") for name in SWITCHES},
    }


def measured_seconds(
    timed: Sequence[tuple[Product, torch.Tensor]], rounds: int
) -> tuple[float, ...]:
    """Seconds of one call of each product with its rows, measured now.

    The products alternate, and the best of some rounds counts, because other work can only make a
    product slower. One thread computes: if other work takes a processor from one of several
    threads, all of them wait for it.
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
    """Seconds of processor time of one call, in this thread: waiting for a processor that others
    use does not count.
    """
    began = time.thread_time()
    count = 0
    while count == 0 or time.thread_time() - began < LEAST_S:
        product(rows)
        count += 1
    return (time.thread_time() - began) / count


def has_bfloat16_kernels() -> bool:
    """Whether torch's library multiplies bfloat16 here without converting every matrix to
    float32.
    """
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


@cache
def multiplies_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 at least as fast as float32 for many rows, rather
    than through it.
    """
    if not has_bfloat16_kernels():
        return False
    wide_s, narrow_s = product_seconds((torch.float32, torch.bfloat16))
    return narrow_s <= wide_s
