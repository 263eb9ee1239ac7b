"""Chooses the dtype for "auto". On a CPU it is the one in which this processor computes the model
fastest.

Only dtypes that hold every weight of the checkpoint unchanged are candidates: the checkpoint's own,
and float32. A processor that does not multiply bfloat16 may compute a bfloat16 model as fast as in
float32, if all its weights are copied or in int8. Then the model keeps its dtype. Otherwise both
are measured. Other devices keep the checkpoint's dtype.
"""

import os
from dataclasses import replace
from typing import Any

import torch

from ragkv.runtime import available_bytes

from .cpu.copied import COPY_BYTES
from .cpu.packing import LEVEL, copies_reach_float32
from .cpu.product_speed import product_seconds
from .loading import DtypeChoice, config_of, device_of, float_dtype

# A copy of a weight takes as long to make as this processor multiplies some 1,200 rows by the
# weight. So for one question copies pay where plain products take more than so many times as long
# as those in float32: where bfloat16 goes through float32, it is seven times.
SLOW = 2.0
SPARE_BYTES = 512 << 20  # So many bytes are left for activations and the rest of the process.


def choose_dtype(
    name: str | os.PathLike[str],
    device: str,
    dtype: str,
    store_bytes: int,
    packed_bytes: int = 0,
    weights: str = "plain",
) -> DtypeChoice:
    """What `dtype` means for the model `name` on `device`, with `weights` of that kind.

    `store_bytes` of memory are for the store, and at most `packed_bytes` for copies of weights.
    """
    choice = _choice(name, device, dtype, store_bytes, packed_bytes, weights)
    return (
        choice
        if weights == "plain"
        else replace(choice, why=f"{choice.why}; linear layers are in {weights}")
    )


def copies_pay_at_once(dtype: str) -> bool:
    """Whether copies of weights in `dtype` save more in one answer than making them takes."""
    if dtype != "bfloat16":
        return False
    wide_s, narrow_s = product_seconds((torch.float32, torch.bfloat16))
    return narrow_s > SLOW * wide_s


def _choice(
    name: str | os.PathLike[str],
    device: str,
    dtype: str,
    store_bytes: int,
    packed_bytes: int,
    weights: str,
) -> DtypeChoice:
    if dtype != "auto":
        float_dtype(dtype)
        return DtypeChoice(dtype, f"{dtype}, as the settings say")
    config = config_of(name)
    own = getattr(config, "dtype", None)
    if (
        device_of(device).type != "cpu"
        or not isinstance(own, torch.dtype)
        or not own.is_floating_point
    ):
        return DtypeChoice("auto", "the checkpoint's own dtype")
    own_name = str(own).removeprefix("torch.")
    if getattr(config, "quantization_config", None) is not None:
        return DtypeChoice("auto", f"{own_name}, the checkpoint's own: its weights are quantised")
    if own.itemsize >= 4:
        why = (
            f"{own_name}, the checkpoint's own: a narrower one would round its weights (dtype "
            "= bfloat16 does so)"
        )
        return DtypeChoice(own_name, why)
    return faster_dtype(config, own, store_bytes, packed_bytes, weights)


def faster_dtype(
    config: Any, own: torch.dtype, store_bytes: int, packed_bytes: int, weights: str = "plain"
) -> DtypeChoice:
    """`own`, a checkpoint's dtype of less than four bytes, or float32: in which this CPU computes
    the model faster.
    """
    own_name = str(own).removeprefix("torch.")
    config = config.get_text_config()
    if own is torch.bfloat16 and copies_reach_float32() and _heads_share_keys(config):
        copies = _copied_bytes(_without_weights(config))
        if copies is not None and (weights == "int8" or copies <= packed_bytes):
            with_copies = (
                ""
                if weights == "int8"
                else "; with copies of its weights this processor is as fast as in float32"
            )
            return DtypeChoice(own_name, f"{own_name}, the checkpoint's own{with_copies}")
    wide_s, narrow_s = product_seconds((torch.float32, own))
    gain = narrow_s / wide_s
    if gain < LEVEL:  # float32 needs twice the memory, and its entries twice the bytes
        return DtypeChoice(
            own_name, f"{own_name}, the checkpoint's own and as fast as float32 here"
        )
    free = available_bytes()
    needed = (
        4 * sum(weight.numel() for weight in _without_weights(config).parameters())
        + store_bytes
        + SPARE_BYTES
    )
    if free is not None and needed > free:
        why = (
            f"{own_name}, the checkpoint's own: float32 would be {gain:.1f} times as fast on "
            "this processor, but it "
            f"needs {needed / 2**30:.1f} GiB with the store, and {free / 2**30:.1f} GiB are "
            "free. Give the store less "
            "memory (store.memory_bytes), or set dtype = float32"
        )
        return DtypeChoice(own_name, why, measured=True)
    return DtypeChoice(
        "float32", f"float32, in which this processor is {gain:.1f} times as fast", True
    )


def _copied_bytes(model: torch.nn.Module) -> int | None:
    """Bytes of the copies of all linear layers; `None` if some weights cannot be copied: experts in
    one tensor.
    """
    if any(parameter.dim() > 2 for parameter in model.parameters()):
        return None
    return sum(
        COPY_BYTES * part.weight.numel()
        for part in model.modules()
        if isinstance(part, torch.nn.Linear)
    )


def _heads_share_keys(config: Any) -> bool:
    """Whether query heads share keys: else torch's attention of one row in bfloat16 takes several
    times as long.
    """
    heads = getattr(config, "num_attention_heads", None)
    return getattr(config, "num_key_value_heads", heads) != heads


def _without_weights(config: Any) -> torch.nn.Module:
    """The model, all of its weights without memory."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model: torch.nn.Module = auto.from_config(config)
    return model
