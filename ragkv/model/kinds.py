"""Kinds of models that people load: wrapped by PEFT, or with quantised weights. docs/models.md lists them.

A kind works if a token's KV depends on the tokens before it and on nothing else. Quantisation of activations with one
scale for all rows of a pass breaks this: then a row's result depends on which rows are computed with it.
"""

from typing import Any

import torch

from ragkv.errors import UnsupportedModelError

# The modules of torch's eager quantisation have one scale for a whole tensor.
_ONE_SCALE = ("torch.ao.nn.quantized", "torch.nn.quantized")


def driven_model(model: Any) -> Any:
    """The transformers model whose layers can be driven: `model`, or the one that PEFT wrapped, with its adapters.

    Raises `UnsupportedModelError` for a kind whose rows are not independent.
    """
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        if any(config.is_prompt_learning for config in model.peft_config.values()):
            raise UnsupportedModelError(
                "This PEFT adapter learns a prompt (prompt tuning, prefix tuning, p-tuning), whose KV is in no layer. "
                "Use an adapter of weights, such as LoRA, or the model without it."
            )
        model = model.get_base_model()
    modules = model.named_modules() if isinstance(model, torch.nn.Module) else ()
    for name, module in modules:
        if type(module).__module__.startswith(_ONE_SCALE):
            raise UnsupportedModelError(
                f"{name} is quantised by torch.ao.quantization with one scale for all rows of a pass, so a token's KV "
                "would depend on the tokens computed with it, and stored KV could not be exact. Load the model "
                "unquantised, or quantise it with torchao (Int8DynamicActivationInt8WeightConfig has a scale a row)."
            )
    return model


def rounds_activations(model: torch.nn.Module) -> bool:
    """Whether some weights are quantised: then activations may be rounded in steps, which amplify tiny differences."""
    return any(getattr(module, "rounds_activations", False) for module in model.modules()) or any(
        flattens(parameter) or not parameter.is_floating_point() or hasattr(parameter, "quant_state")
        for parameter in model.parameters()
    )


def flattens(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor of several tensors, such as torchao's: integers and their scales."""
    return hasattr(tensor, "__tensor_flatten__")


def adapter_state(module: Any) -> str | None:
    """What of a PEFT layer changes its results and is no tensor: active adapters and their scales; `None` elsewhere."""
    if not hasattr(module, "active_adapters") or not hasattr(module, "scaling"):
        return None
    scales = {name: float(value) for name, value in sorted(module.scaling.items()) if name in module.active_adapters}
    disabled, merged = getattr(module, "disable_adapters", False), getattr(module, "merged_adapters", [])
    return f"{module.active_adapters}:{scales}:{disabled}:{merged}"


__all__ = ["adapter_state", "driven_model", "flattens", "rounds_activations"]
