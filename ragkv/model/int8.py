"""Linear layers in int8: weights rounded once, with a scale for each output; activations as they come, a scale a row.

Many rows are multiplied by oneDNN, through the operators that torch's own compiler uses for quantised models on x86,
and few by FBGEMM, because oneDNN arranges the weights again in each call: one row takes four times as long. Integers
are added exactly, so both give the same bits, and a row has a scale of its own, so its result does not depend on the
rows that are computed with it: the exactness rules hold against the int8 model itself. The output head is rounded too,
because its weights are a large part of what a decoding step reads; logits stay float32. Norms, embeddings, KV, routers
and experts in one tensor stay as they are.
"""

import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import xxhash

from ragkv.errors import ConfigError

from .cpu.packing import call_packed
from .fingerprint import remember_rounded_digest

WEIGHT_STEPS = 127  # A weight has so many steps on each side of zero.
# One module calls these layers on the same rows.
SAME_ROWS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# These layers stay as they are, because a rounded router would choose other experts.
ROUTERS = ("gate", "router", "shared_expert_gate")
LEAST_SCALE = 1e-30  # A row of zeros has this scale.
FEW_ROWS = 48  # FBGEMM multiplies faster up to so many rows (docs/models.md).
BLOCK = 512  # FBGEMM keeps so many inputs together; a part of a block takes the memory of a whole one.

T = TypeVar("T")


class Quantised(NamedTuple):
    """Rows in steps of their own scales."""

    steps: torch.Tensor  # (..., in) float32, whole numbers from -most to most
    scale: torch.Tensor  # (..., 1) float32


class Rounded(NamedTuple):
    """A linear layer in 8 bits."""

    weights: torch.Tensor  # (out, in) int8
    scale: torch.Tensor  # (out,) float32
    bias: torch.Tensor | None  # (out,) float32

    @classmethod
    def of(cls, plain: torch.nn.Linear) -> "Rounded":
        """The weights of a layer, rounded to the nearest of `WEIGHT_STEPS` on each side of zero."""
        weight = plain.weight.detach().float()
        scale = weight.abs().amax(dim=1).clamp_min(LEAST_SCALE) / WEIGHT_STEPS
        bias = None if plain.bias is None else plain.bias.detach().float()
        return cls((weight / scale[:, None]).round().to(torch.int8), scale, bias)


class CopyForFew:
    """The weights of layers that multiply the same rows, in FBGEMM's layout: few rows are multiplied by all at once."""

    def __init__(self, layers: Sequence[Rounded]) -> None:
        self._most = activation_steps()
        self._packed = _packed_for_few(*(torch.cat(parts) for parts in zip(*(one[:2] for one in layers), strict=True)))
        biases = [one.bias if one.bias is not None else torch.zeros_like(one.scale) for one in layers]
        self._bias = None if all(one.bias is None for one in layers) else torch.cat(biases)

    @property
    def works(self) -> bool:
        """Whether this torch has the product."""
        return self._packed is not None

    @staticmethod
    def takes(hidden: torch.Tensor) -> bool:
        """Whether hidden (..., in) has so few rows, at most `FEW_ROWS`, that this copy multiplies them."""
        return hidden.numel() <= FEW_ROWS * hidden.shape[-1]

    def outputs(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden (..., in), few rows, times the weights of all layers -> (..., all out)."""
        rows = quantised(hidden, self._most)
        return _scaled(_product_of_few(rows.steps, self._most, self._packed), rows, self._bias, hidden)


class Int8Linear(torch.nn.Module):
    """A linear layer that multiplies in int8. It cannot be trained or saved."""

    rounds_activations = True
    scale: torch.Tensor

    def __init__(
        self, plain: torch.nn.Linear, rounded: Rounded, for_few: CopyForFew | None = None, place: slice | None = None
    ) -> None:
        """Without a copy `for_few` few rows take several times as long; its outputs at `place` are this layer's."""
        super().__init__()
        self.in_features, self.out_features, self.bias = plain.in_features, plain.out_features, plain.bias
        self.register_buffer("scale", rounded.scale)
        self._digest = xxhash.xxh3_128_hexdigest(rounded.weights.contiguous().numpy().tobytes())
        self._most = activation_steps()
        self._for_many = _packed_for_many(rounded.weights)
        self.for_few, self._place = for_few, place
        self._zero_points = torch.zeros(self.out_features, dtype=torch.int64)
        self._bias = rounded.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden (..., in) -> (..., out), in the same dtype."""
        for_few = self.for_few
        if for_few is not None and for_few.takes(hidden):
            if self._place is None:
                return for_few.outputs(hidden)
            return _last_outputs.of(hidden, for_few, lambda: for_few.outputs(hidden))[..., self._place]
        rows = _last_rows.of(hidden, self._most, lambda: quantised(hidden, self._most))
        steps = rows.steps.reshape(-1, self.in_features)
        product = _product_of_many(steps, self._most, self._for_many, self.scale, self._zero_points)
        return _scaled(product.view(*hidden.shape[:-1], self.out_features), rows, self._bias, hidden)

    def get_extra_state(self) -> dict[str, Any]:
        """What its results depend on besides scales and bias: `weights_digest` reads it."""
        return {"weights": self._digest, "activation_steps": self._most, "rounded_to": "nearest"}


def quantised(hidden: torch.Tensor, most: int) -> Quantised:
    """Rows (..., in) in `most` steps on each side of zero."""
    rows = hidden.float()  # once: each operation with two dtypes converts again
    scale = rows.abs().amax(-1, True).clamp_min_(LEAST_SCALE).div_(_as_tensor(most))  # a norm is far slower
    return Quantised((rows / scale).round_(), scale)


@cache
def _as_tensor(number: float) -> torch.Tensor:
    """A number as torch reads it: to convert it in each call takes longer than to divide by it."""
    return torch.tensor(number, dtype=torch.float32)


class _Last(Generic[T]):
    """What was computed last from some rows: q, k and v, and gate and up, get the same ones one after the other."""

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[torch.Tensor], int, object, T] | None = None  # replaced as one: threads

    def of(self, hidden: torch.Tensor, kind: object, compute: Callable[[], T]) -> T:
        """What `compute` makes of `hidden`; `kind` tells apart what is made of the same rows."""
        if hidden.is_inference():  # it does not count its changes
            return compute()
        last = self._last
        if last is not None and last[0]() is hidden and last[1:3] == (hidden._version, kind):
            return last[3]
        found = compute()
        self._last = (weakref.ref(hidden), hidden._version, kind, found)
        return found


_last_rows: _Last[Quantised] = _Last()
_last_outputs: _Last[torch.Tensor] = _Last()


def _scaled(product: torch.Tensor, rows: Quantised, bias: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor:
    """A product (..., out) float32 of steps, times the scales of its rows, plus the bias (out,), in hidden's dtype."""
    out = product.mul_(rows.scale) if bias is None else torch.addcmul(bias, product, rows.scale)
    return out.type_as(hidden)


def _packed_for_many(rounded: torch.Tensor) -> torch.Tensor:
    """Weights (out, in) int8 in oneDNN's layout."""
    packed: torch.Tensor = torch.ops.onednn.qlinear_prepack(rounded, None)
    return packed


def _packed_for_few(rounded: torch.Tensor, scale: torch.Tensor) -> Any:
    """Weights (out, in) int8 with their scales (out,) in FBGEMM's layout; `None` if this torch has none."""
    before = torch.backends.quantized.engine
    try:
        torch.backends.quantized.engine = "fbgemm"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch announces that tensors of this kind will go; then this is None
            zero_points = torch.zeros(len(scale), dtype=torch.int64)
            weights = torch._make_per_channel_quantized_tensor(rounded, scale.double(), zero_points, 0)
            return torch.ops.quantized.linear_prepack(weights, None)
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    finally:
        torch.backends.quantized.engine = before


def _product_of_many(
    steps: torch.Tensor, most: int, packed: torch.Tensor, scale: torch.Tensor, zero_points: torch.Tensor
) -> torch.Tensor:
    """Steps (R, in) times packed weights (in, out) -> (R, out) float32."""
    out: torch.Tensor = torch.ops.onednn.qlinear_pointwise.default(
        *((steps + (most + 1)).to(torch.uint8), 1.0, most + 1, packed, scale, zero_points, None),
        *(1.0, 0, torch.float32, "none", [], ""),  # of the output; nothing is fused with the product
    )
    return out


def _product_of_few(steps: torch.Tensor, most: int, packed: Any) -> torch.Tensor:
    """Steps (..., in) times packed weights (in, out) -> (..., out) float32."""
    operator = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
    out: torch.Tensor = call_packed(operator, steps, 1.0, most + 1, packed)
    return out


@cache
def activation_steps() -> int:
    """How many steps activations have on each side of zero: 127, or 63 where sums of two products overflow 16 bits.

    They do on processors without instructions for int8 (VNNI), so it is tried. Raises `ConfigError` without kernels.
    """
    inputs, outputs, most = 64, 16, 127
    weights = torch.full((outputs, inputs), WEIGHT_STEPS, dtype=torch.int8)
    scale, zero_points = torch.ones(outputs), torch.zeros(outputs, dtype=torch.int64)
    try:
        for_many, for_few = _packed_for_many(weights), _packed_for_few(weights, scale)
        found = []
        for rows in (1, 64):
            steps = torch.full((rows, inputs), float(most))
            found.append(_product_of_many(steps, most, for_many, scale, zero_points))
            found += [] if for_few is None else [_product_of_few(steps, most, for_few)]
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            "weights = int8 needs torch's oneDNN kernels for quantised linear layers, and this torch on this processor "
            f"has none: {str(error)[:200]}. Set weights = plain."
        ) from error
    exact = float(most * WEIGHT_STEPS * inputs)
    return most if all(bool((product == exact).all()) for product in found) else 63


def int8_layers(plain: Sequence[torch.nn.Linear], *, packs_for_few: bool = True) -> list[Int8Linear]:
    """Layers that multiply the same rows, in int8.

    Without `packs_for_few` they take half of the memory, and few rows take several times as long.
    """
    rounded = [Rounded.of(part) for part in plain]
    copy = CopyForFew(rounded) if packs_for_few else None
    for_few = copy if copy is not None and copy.works else None
    ends = accumulate((part.out_features for part in plain), initial=0)
    places = [None] if len(plain) == 1 else [slice(*pair) for pair in pairwise(ends)]
    return [Int8Linear(part, one, for_few, place) for part, one, place in zip(plain, rounded, places, strict=True)]


def round_weights(model: Any, packed_bytes: int | None = None) -> None:
    """Replace the linear layers of `model`, a transformers causal LM on a CPU, by int8 ones, but for routers.

    A second copy of their weights, for few rows, takes at most `packed_bytes`; `None` is no limit.
    Raises `ConfigError` if it is not on a CPU, or if none of its layers are plain linear ones.
    """
    if (kind := next(model.parameters()).device.type) != "cpu":
        raise ConfigError(
            f"weights = int8 computes on a CPU only, and the model is on {kind!r}. Set weights = plain, or load a "
            "model that torchao or bitsandbytes quantised."
        )
    activation_steps()
    groups = [(owner, names) for owner in model.modules() for names in _groups(owner)]
    if not groups:
        raise ConfigError(
            f"weights = int8: this {type(model).__name__} has no plain linear layers; it may be quantised already. Set "
            "weights = plain."
        )
    remember_rounded_digest(model)
    left = math.inf if packed_bytes is None else packed_bytes
    for owner, names in groups:
        plain = [getattr(owner, name) for name in names]
        size = sum(part.out_features * math.ceil(part.in_features / BLOCK) * BLOCK for part in plain)
        fits = size <= left
        left -= size if fits else 0
        for name, layer in zip(names, int8_layers(plain, packs_for_few=fits), strict=True):
            setattr(owner, name, layer)


def _groups(owner: torch.nn.Module) -> list[tuple[str, ...]]:
    """The names of a module's plain linear layers; together, of those that multiply the same rows."""
    plain = {
        name: part for name, part in owner.named_children() if type(part) is torch.nn.Linear and name not in ROUTERS
    }
    joined = [
        names
        for names in SAME_ROWS
        if set(names) <= plain.keys() and len({plain[name].in_features for name in names}) == 1
    ]
    return [*joined, *((name,) for name in plain if not any(name in names for names in joined))]
