"""Builds an adapter and tests it: a few tokens run through it must give the model's own logits.

This also catches unknown architectures: a model whose logits are not reproduced is refused with the
reason. Models may be wrapped by PEFT, or have quantised weights (docs/models.md lists the kinds). A
kind works if a token's KV depends on the tokens before it and on nothing else. Quantisation of
activations with one scale for all rows of a pass breaks this rule, because then a row's result
depends on the other rows.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ragkv.errors import UnsupportedModelError
from ragkv.runtime import no_check

from .adapter import Adapter
from .families import ADAPTERS
from .fingerprint import flattens
from .layer_views import run_layer
from .promptkv import KVShape, PromptKV
from .recording import Recording
from .rows import Pause, Rows

DEVICES = ("cpu", "cuda")  # Fusing is tested on these kinds of device.
PROBE_TOKENS = 32
# How far logits may be off: root mean square, relative to the logits' spread.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
# In half precision rounding alone moves logits by some percent of their spread.
_TOLERANCE_COARSE = 0.15
# Steps of activations amplify that, to .13 in SmolLM2's int8 weights. A wrong mask: 1.
_TOLERANCE_STEPS = 0.25
# The modules of torch's eager quantisation have one scale for a whole tensor.
_ONE_SCALE = ("torch.ao.nn.quantized", "torch.nn.quantized")


def refuse_unsupported(config: Any) -> None:
    """Raise `UnsupportedModelError` with the reason for an architecture without an adapter."""
    kind = getattr(config, "model_type", None)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{kind} is an encoder-decoder model; only decoder-only models have a prompt KV."
        )
    if kind not in ADAPTERS:
        raise UnsupportedModelError(
            f"No adapter for the architecture {kind!r}: {_why_not(config)}. Fusing needs "
            "attention layers with "
            f"rotary positions and a KV per token. Known: {', '.join(sorted(ADAPTERS))}."
        )


def adapt(model: Any, packed_bytes: int = 0) -> Adapter:
    """A tested adapter of a loaded transformers model; raises `UnsupportedModelError`.

    `packed_bytes` limits the memory of copies of weights, which make products faster (see
    `packing`).
    """
    model = driven_model(model)
    config = getattr(model, "config", None)
    refuse_unsupported(config)
    model_type = config.model_type  # type: ignore[union-attr]
    if not hasattr(model, "lm_head") and model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no language-model head; load it as a causal LM."
        )
    if (kind := next(model.parameters()).device.type) not in DEVICES:
        raise UnsupportedModelError(
            f"The model is on device {kind!r}, and fusing is tested on {' and '.join(DEVICES)} "
            "only: move it, for "
            "example with model.to('cpu')."
        )
    model.eval()
    try:
        adapter = ADAPTERS[model_type](model, packed_bytes)
        off = _deviation(adapter)
    except (RuntimeError, TypeError, AttributeError, ValueError, KeyError) as error:
        raise UnsupportedModelError(
            f"This {model_type} model cannot be run layer by layer: {error}"
        ) from error
    allowed = (
        _TOLERANCE_STEPS
        if rounds_activations(model)
        else _TOLERANCE.get(adapter.dtype, _TOLERANCE_COARSE)
    )
    if not off <= allowed:
        raise UnsupportedModelError(
            f"This {model_type} model gives other logits when it is run layer by layer (off by "
            f"{off:.2g} of their "
            f"spread over {PROBE_TOKENS} tokens), so fused answers would be wrong."
        )
    return adapter


def driven_model(model: Any) -> Any:
    """The transformers model whose layers can be driven: `model`, or the one that PEFT wrapped,
    with its adapters.

    Raises `UnsupportedModelError` for a kind whose rows are not independent.
    """
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        if any(config.is_prompt_learning for config in model.peft_config.values()):
            raise UnsupportedModelError(
                "This PEFT adapter learns a prompt (prompt tuning, prefix tuning, p-tuning), "
                "whose KV is in no layer. "
                "Use an adapter of weights, such as LoRA, or the model without it."
            )
        model = model.get_base_model()
    modules = model.named_modules() if isinstance(model, torch.nn.Module) else ()
    for name, module in modules:
        if type(module).__module__.startswith(_ONE_SCALE):
            raise UnsupportedModelError(
                f"{name} is quantised by torch.ao.quantization with one scale for all rows of a "
                "pass, so a token's KV "
                "would depend on the tokens computed with it, and stored KV could not be exact. "
                "Load the model "
                "unquantised, or quantise it with torchao (Int8DynamicActivationInt8WeightConfig "
                "has a scale a row)."
            )
    return model


def rounds_activations(model: torch.nn.Module) -> bool:
    """Whether some weights are quantised: then activations may be rounded in steps, which amplify
    tiny differences.
    """
    return any(getattr(module, "rounds_activations", False) for module in model.modules()) or any(
        flattens(parameter)
        or not parameter.is_floating_point()
        or hasattr(parameter, "quant_state")
        for parameter in model.parameters()
    )


def _why_not(config: Any) -> str:
    """The reason for the refusal, as far as a config shows it."""
    if getattr(config, "kv_lora_rank", None):
        return "it stores a compressed latent of keys and values (MLA)"
    if any(hasattr(config, name) for name in ("state_size", "ssm_state_size", "mamba_d_state")):
        return "it has a recurrent state (state-space layers), which cannot be fused from parts"
    if getattr(config, "alibi", False) or getattr(config, "model_type", "") in ("bloom", "mpt"):
        return "its positions are attention biases (ALiBi)"
    if getattr(config, "rope_parameters", None) is None:
        return "it has no rotary positions (they are learned or absolute)"
    return "running it layer by layer was never tested"


@torch.no_grad()
def full_pass(
    adapter: Adapter,
    token_ids: torch.Tensor | Sequence[int],
    kv: PromptKV,
    start: int = 0,
    record: Recording | None = None,
    between: Pause = no_check,
) -> torch.Tensor:
    """Run `token_ids` (R,) at positions start ... through every layer: last hidden (1, R, E).

    `record` collects the raw KV. `between` is called between layers, so that others may compute.
    """
    token_ids = torch.as_tensor(token_ids, device=adapter.device)
    stop = start + token_ids.numel()
    rows = Rows.span(start, stop, adapter.device)
    tables = adapter.rope.tables(stop, start)
    hidden = adapter.embed(token_ids)
    for layer in range(adapter.layer_count):
        hidden = run_layer(adapter, layer, hidden, rows, kv, tables, record)
        between()
    kv.length = stop
    return hidden


def grown(kv: PromptKV, positions: int) -> PromptKV:
    """A copy of `kv`, all of it on the device, with space for so many positions behind the valid
    ones.
    """
    like = kv.keys[0]
    shape = KVShape(len(kv.keys), *like.shape[1::2])
    made = PromptKV(shape, kv.length + positions, like.dtype, like.device)
    for layer in range(shape.layers):
        made.put(layer, 0, *kv.view(layer, kv.length))
    made.length = kv.length
    return made


@torch.no_grad()
def _deviation(adapter: Adapter) -> float:
    """Root mean square difference of the adapter's logits from the model's, relative to their
    spread.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, adapter.vocabulary, (PROBE_TOKENS,), generator=generator).to(
        adapter.device
    )
    expected = adapter.model(tokens.unsqueeze(0), use_cache=False).logits[0].float()
    kv = adapter.new_kv(PROBE_TOKENS)
    got = adapter.logits(full_pass(adapter, tokens, kv))
    spread = float(expected.std()) or 1.0
    return float((got - expected).square().mean().sqrt()) / spread
