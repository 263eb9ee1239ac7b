"""vLLM's weights as a transformers model, without a copy: its parameters are views of vLLM's own.

vLLM joins the query, key and value matrices of a layer into one, and also the gate and up matrices.
Rows of the joined matrices are the matrices of transformers. That holds for one device and
unquantised weights, as on GPUs. A CPU build of vLLM repacks its matrices into a layout of oneDNN
and deletes the plain ones. Then there is nothing to share. This file knows no vLLM, only the names
of its parameters.
"""

import gc
from typing import Any

import torch
from torch import nn

from ragkv.errors import UnsupportedModelError

JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PLAIN = ("o_proj", "down_proj")
# By which share of the largest product two may differ.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def served_model(name: str, layer: Any) -> nn.Module | None:
    """The model in this process whose submodule `name` is `layer`; vLLM gives connectors no
    reference to it.
    """
    for found in gc.get_objects():
        if issubclass(type(found), nn.Module):
            try:
                if found.get_submodule(name) is layer:
                    return found  # type: ignore[no-any-return]
            except AttributeError:
                continue
    return None


def shared_model(served: nn.Module, config: Any) -> Any:
    """A transformers causal LM of `config` whose parameters are views of those of `served`, vLLM's
    model.

    Raises `UnsupportedModelError`, with the reason, if a parameter cannot be a view.
    """
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    theirs = dict(served.named_parameters())
    first = next(iter(theirs.values()))
    with torch.device("meta"):
        model = auto.from_config(config).to(first.dtype)
    ours = dict(model.named_parameters())
    for name, wanted in ours.items():
        view = _view(name, tuple(wanted.shape), ours, theirs)
        if view.dtype != first.dtype or view.device != first.device:
            raise UnsupportedModelError(f"vLLM keeps {name} in {view.dtype} on {view.device}")
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(view, requires_grad=False))
    model.tie_weights()
    body = model.model
    body.rotary_emb = type(body.rotary_emb)(config).to(first.device)  # its buffers are not weights
    if left := [
        name
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.is_meta
    ]:
        raise UnsupportedModelError(f"vLLM has no {left[0]}")
    _check(served, model)
    return model.eval()


def _view(
    name: str,
    shape: tuple[int, ...],
    ours: dict[str, nn.Parameter],
    theirs: dict[str, nn.Parameter],
) -> torch.Tensor:
    """What `ours[name]`, of `shape`, is in vLLM's parameters."""
    for joined, parts in JOINED.items():
        part = next((part for part in parts if f".{part}." in name), None)
        if part is not None:
            rows = [ours[name.replace(f".{part}.", f".{other}.")].shape[0] for other in parts]
            whole = _parameter(name.replace(f".{part}.", f".{joined}."), theirs)
            if whole.shape != (sum(rows), *shape[1:]):
                raise UnsupportedModelError(
                    f"vLLM's {joined} of {name} has the shape {tuple(whole.shape)}"
                )
            start = sum(rows[: parts.index(part)])
            return whole[start : start + shape[0]]
    own = _parameter(name, theirs)
    if name.startswith(("model.embed_tokens.", "lm_head.")) and own.shape[1:] == shape[1:]:
        own = own[: shape[0]]  # vLLM pads the vocabulary
    if tuple(own.shape) != shape:
        raise UnsupportedModelError(
            f"vLLM's {name} has the shape {tuple(own.shape)} in place of {shape}"
        )
    return own


def _parameter(name: str, theirs: dict[str, nn.Parameter]) -> torch.Tensor:
    found = theirs.get(name)
    if found is None:
        raise UnsupportedModelError(f"vLLM's model has no parameter {name}")
    if not found.numel():
        raise UnsupportedModelError("this build of vLLM repacks its weights")
    return found.detach()


@torch.no_grad()
def _check(served: nn.Module, model: nn.Module) -> None:
    """Compare vLLM's products with those of the views: a backend that keeps another layout is not
    shared.
    """
    for name, module in served.named_modules():
        owner, _, leaf = name.rpartition(".")
        parts = JOINED.get(leaf, (leaf,) if leaf in PLAIN else ())
        if not parts:
            continue
        linears: list[Any] = [model.get_submodule(f"{owner}.{part}") for part in parts]
        weight = linears[0].weight
        row = torch.randn((1, weight.shape[1]), generator=torch.Generator().manual_seed(0))
        row = row.to(weight.dtype).to(weight.device)
        wanted = torch.cat([linear(row) for linear in linears], dim=-1)
        result = module(row)
        # vLLM's linear layers return a pair
        found = result[0] if isinstance(result, tuple) else result
        error = float((found.float() - wanted.float()).abs().max())
        if not error <= TOLERANCE.get(weight.dtype, 0.0) * max(
            1.0, float(wanted.float().abs().max())
        ):
            raise UnsupportedModelError(
                f"vLLM computes other products with {name} than its rows give ({error:.2g})"
            )
