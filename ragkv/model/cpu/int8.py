"""Linear layers in int8. Weights are rounded once, with a scale for each output, and activations in
each call, with a scale for each row.

Many rows are multiplied by oneDNN, through the operators that torch's own compiler uses for
quantised models on x86. Few rows are multiplied by FBGEMM, because oneDNN arranges the weights
again in each call: one row takes four times as long. Integers are added exactly, so both give the
same bits. Each row has its own scale, so its result does not depend on the other rows of a pass. So
the exactness rules hold against the int8 model itself.

In real models a few inputs are a hundred times as large as the others. A common scale would leave
few steps to the others. So each input is divided, and its weights are multiplied, by a power of two
(SmoothQuant, arXiv 2211.10438). Random tokens show the ranges. The output head is rounded too,
because its weights are a large part of what a decoding step reads. Logits stay float32. Norms,
embeddings, KV, routers and experts in one tensor are not rounded.
"""

import math
import warnings
from functools import cache
from typing import Any

import torch
import xxhash

from ragkv.errors import ConfigError

from .copied import call_packed

# These layers stay as they are, because a rounded router would choose other experts.
ROUTERS = ("gate", "router", "shared_expert_gate")
WEIGHT_STEPS = 127  # of a weight on each side of zero
LEAST_SCALE = 1e-30  # A row of zeros has this scale.
FBGEMM_ROWS = 48  # up to which FBGEMM multiplies faster (docs/research/weights.md)
# Inputs that FBGEMM keeps together; a part of a block takes the memory of a whole one.
BLOCK = 512
TRIED_TOKENS = 128  # So many random tokens show the range of each input.


class Int8Linear(torch.nn.Module):
    """A linear layer that multiplies in int8. It cannot be trained or saved."""

    rounds_activations = True
    scale: torch.Tensor
    smoothing: torch.Tensor

    def __init__(
        self, plain: torch.nn.Linear, ranges: torch.Tensor | None = None, packs_for_few: bool = True
    ) -> None:
        """`ranges` (in,) is how large inputs become. Without a copy for few rows these take several
        times as long.
        """
        super().__init__()
        self.in_features = plain.in_features
        self.out_features = plain.out_features
        self.bias = plain.bias
        weight = plain.weight.detach().float()
        smoothing = _smoothing(weight, ranges)
        weight = weight / smoothing
        scale = weight.abs().amax(dim=1).clamp_min(LEAST_SCALE) / WEIGHT_STEPS
        self.register_buffer("scale", scale)
        self.register_buffer("smoothing", smoothing)
        rounded = (weight / scale[:, None]).round().to(torch.int8)
        self._digest = xxhash.xxh3_128_hexdigest(rounded.contiguous().numpy().tobytes())
        self._most = activation_steps()
        self._for_many = _packed_for_many(rounded)
        self.for_few = _packed_for_few(rounded, scale) if packs_for_few else None
        self._zero_points = torch.zeros(self.out_features, dtype=torch.int64)
        self._bias = None if plain.bias is None else plain.bias.detach().float()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden (..., in) -> (..., out), in the same dtype."""
        rows = hidden.reshape(-1, self.in_features) * self.smoothing  # float32
        # a norm is far slower
        scale = rows.abs().amax(-1, True).clamp_min_(LEAST_SCALE).div_(self._most)
        steps = rows.div_(scale).round_()
        if self.for_few is not None and len(steps) <= FBGEMM_ROWS:
            product = _product_of_few(steps, self._most, self.for_few)
        else:
            product = _product_of_many(
                steps, self._most, self._for_many, self.scale, self._zero_points
            )
        out = (
            product.mul_(scale) if self._bias is None else torch.addcmul(self._bias, product, scale)
        )
        return out.type_as(hidden).view(*hidden.shape[:-1], self.out_features)

    def get_extra_state(self) -> dict[str, Any]:
        """What its results depend on besides scales and bias: `weights_digest` reads it."""
        return {"weights": self._digest, "activation_steps": self._most, "rounded_to": "nearest"}


def _smoothing(weight: torch.Tensor, ranges: torch.Tensor | None) -> torch.Tensor:
    """The factors of the inputs, (in,), with which inputs and weights (out, in) have ranges of the
    same size.
    """
    if ranges is None or not weight.numel():
        return torch.ones(weight.shape[1])
    least = ranges.amax().clamp_min(LEAST_SCALE) * 2.0**-20
    both = weight.abs().amax(dim=0).clamp_min(LEAST_SCALE) / ranges.clamp_min(least)
    return torch.exp2(both.log2().div_(2).round_())


@torch.no_grad()
def input_ranges(model: Any) -> dict[torch.nn.Module, torch.Tensor]:
    """How large each input of the plain linear layers becomes, (in,) float32, over some random
    tokens.
    """
    found = dict[torch.nn.Module, torch.Tensor]()

    def note(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...], _: object) -> None:
        found[layer] = inputs[0].detach().abs().flatten(0, -2).amax(dim=0).float()

    hooks = [
        part.register_forward_hook(note)
        for part in model.modules()
        if type(part) is torch.nn.Linear
    ]
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(
        0, vocabulary, (1, TRIED_TOKENS), generator=torch.Generator().manual_seed(0)
    )
    try:
        model(tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _packed_for_many(rounded: torch.Tensor) -> torch.Tensor:
    """Weights (out, in) int8 in oneDNN's layout."""
    packed: torch.Tensor = torch.ops.onednn.qlinear_prepack(rounded, None)
    return packed


def _packed_for_few(rounded: torch.Tensor, scale: torch.Tensor) -> Any:
    """Weights (out, in) int8 with their scales (out,) in FBGEMM's layout; `None` if this torch has
    none.
    """
    before = torch.backends.quantized.engine
    try:
        torch.backends.quantized.engine = "fbgemm"
        with warnings.catch_warnings():
            # torch announces that tensors of this kind will go; then this is None
            warnings.simplefilter("ignore")
            zero_points = torch.zeros(len(scale), dtype=torch.int64)
            weights = torch._make_per_channel_quantized_tensor(
                rounded, scale.double(), zero_points, 0
            )
            return torch.ops.quantized.linear_prepack(weights, None)
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    finally:
        torch.backends.quantized.engine = before


def _product_of_many(
    steps: torch.Tensor,
    most: int,
    packed: torch.Tensor,
    scale: torch.Tensor,
    zero_points: torch.Tensor,
) -> torch.Tensor:
    """Steps (R, in) times packed weights (in, out) -> (R, out) float32."""
    out: torch.Tensor = torch.ops.onednn.qlinear_pointwise.default(
        *((steps + (most + 1)).to(torch.uint8), 1.0, most + 1, packed, scale, zero_points, None),
        # of the output; nothing is fused with the product
        *(1.0, 0, torch.float32, "none", [], ""),
    )
    return out


def _product_of_few(steps: torch.Tensor, most: int, packed: Any) -> torch.Tensor:
    """Steps (R, in) times packed weights (in, out) -> (R, out) float32."""
    operator = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
    out: torch.Tensor = call_packed(operator, steps, 1.0, most + 1, packed)
    return out


@cache
def activation_steps() -> int:
    """How many steps activations have on each side of zero: 127, or 63 where sums of two products
    overflow 16 bits.

    They do on processors without instructions for int8 (VNNI), so it is tried. Raises `ConfigError`
    without kernels.
    """
    inputs = 64
    outputs = 16
    most = 127
    weights = torch.full((outputs, inputs), WEIGHT_STEPS, dtype=torch.int8)
    scale = torch.ones(outputs)
    zero_points = torch.zeros(outputs, dtype=torch.int64)
    try:
        for_many = _packed_for_many(weights)
        for_few = _packed_for_few(weights, scale)
        found = []
        for rows in (1, 64):
            steps = torch.full((rows, inputs), float(most))
            found.append(_product_of_many(steps, most, for_many, scale, zero_points))
            found += [] if for_few is None else [_product_of_few(steps, most, for_few)]
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            "weights = int8 needs torch's oneDNN kernels for quantised linear layers, and this "
            "torch on this processor "
            f"has none: {str(error)[:200]}. Set weights = plain."
        ) from error
    exact = float(most * WEIGHT_STEPS * inputs)
    return most if all(bool((product == exact).all()) for product in found) else 63


def round_weights(model: Any, packed_bytes: int | None = None) -> None:
    """Replace the linear layers of `model`, a transformers causal LM on a CPU, by int8 ones, but
    for routers.

    A second copy of their weights, for few rows, takes at most `packed_bytes`; `None` is no limit.
    Raises `ConfigError` if it is not on a CPU, or if none of its layers are plain linear ones.
    """
    if (kind := next(model.parameters()).device.type) != "cpu":
        raise ConfigError(
            f"weights = int8 computes on a CPU only, and the model is on {kind!r}. Set weights = "
            "plain, or load a "
            "model that torchao or bitsandbytes quantised."
        )
    activation_steps()
    found = [
        (owner, name, part)
        for owner in model.modules()
        for name, part in owner.named_children()
        if type(part) is torch.nn.Linear and name not in ROUTERS
    ]
    if not found:
        raise ConfigError(
            f"weights = int8: this {type(model).__name__} has no plain linear layers; it may be "
            "quantised already. Set "
            "weights = plain."
        )
    ranges = input_ranges(model)
    left = math.inf if packed_bytes is None else packed_bytes
    for owner, name, part in found:
        size = part.out_features * math.ceil(part.in_features / BLOCK) * BLOCK
        fits = size <= left
        left -= size if fits else 0
        setattr(owner, name, Int8Linear(part, ranges.get(part), fits))
