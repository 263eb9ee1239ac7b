"""The fusor's parameters are views of vLLM's, where vLLM keeps plain matrices; else the reason is
said.
"""

from typing import Any

import pytest
import torch
from torch import nn

from ragkv.errors import UnsupportedModelError
from ragkv.model.fingerprint import weights_digest
from ragkv.vllm.shared_weights import JOINED, served_model, shared_model
from tests import tiny_models

from .serving import needs_vllm, run

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
PADDING = 57  # rows that vLLM adds to the vocabulary


class Served(nn.Module):
    """A model with the parameter names of vLLM's: joined matrices, a padded vocabulary, layers that
    return a pair.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        left = dict(model.named_parameters())
        for name in list(left):
            for joined, parts in JOINED.items():
                if f".{parts[0]}." in name:
                    names = [name.replace(f".{parts[0]}.", f".{part}.") for part in parts]
                    rows = torch.cat([left.pop(one).detach() for one in names])
                    left[name.replace(f".{parts[0]}.", f".{joined}.")] = nn.Parameter(
                        rows, requires_grad=False
                    )
        for name, tensor in left.items():
            owner, _, leaf = name.rpartition(".")
            rows = tensor.detach().clone()
            if owner in ("model.embed_tokens", "lm_head"):
                rows = torch.cat((rows, torch.zeros((PADDING, rows.shape[1]))))
            _made(self, owner).register_parameter(leaf, nn.Parameter(rows, requires_grad=False))


class Part(nn.Module):
    """A linear layer of vLLM: it returns its product and a bias that was not added."""

    def forward(self, row: torch.Tensor) -> tuple[torch.Tensor, None]:
        return nn.functional.linear(row, self.weight, getattr(self, "bias", None)), None


def _made(root: nn.Module, path: str) -> nn.Module:
    for name in path.split("."):
        if name not in dict(root.named_children()):
            root.add_module(name, Part())
        root = root.get_submodule(name)
    return root


def config_of(model: Any) -> Any:
    return type(model.config).from_dict(model.config.to_dict())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_a_view_and_the_model_is_the_same(family: str) -> None:
    model = tiny_models.model(family)
    served = Served(model)
    found = shared_model(served, config_of(model))
    held = {tensor.untyped_storage().data_ptr() for tensor in served.parameters()}
    assert {tensor.untyped_storage().data_ptr() for tensor in found.parameters()} <= held
    ids = torch.tensor([tiny_models.tokens(40, seed=1)])
    with torch.no_grad():
        assert torch.equal(found(ids).logits, model(ids).logits)
    # so entries that others ingested are found
    assert weights_digest(found) == weights_digest(model)


def _empty(served: Served) -> None:
    served.get_submodule("model.layers.0.self_attn.qkv_proj").weight = nn.Parameter(torch.empty(0))


def _transposed(served: Served) -> None:
    part = served.get_submodule("model.layers.1.mlp.gate_up_proj")
    part.weight = nn.Parameter(part.weight.t().contiguous())


def _shuffled(served: Served) -> None:
    part = served.get_submodule("model.layers.1.mlp.gate_up_proj")
    plain = part.weight.detach().clone()
    part.forward = lambda row: (nn.functional.linear(row, plain), None)  # type: ignore[method-assign]
    part.weight.copy_(plain.flip(0))


def _other_dtype(served: Served) -> None:
    part = served.get_submodule("model.layers.1.mlp.down_proj")
    part.weight = nn.Parameter(part.weight.to(torch.float16))


def _missing(served: Served) -> None:
    del served.get_submodule("model.norm").weight


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_empty, "repacks its weights"),
        (_transposed, "gate_up_proj .* has the shape"),
        (_shuffled, "other products"),
        (_other_dtype, "float16"),
        (_missing, "no parameter model.norm.weight"),
    ],
)
def test_weights_in_another_form_are_not_shared_and_the_reason_is_said(
    change: Any, said: str
) -> None:
    served = Served(model := tiny_models.model("llama"))
    with torch.no_grad():
        change(served)
    with pytest.raises(UnsupportedModelError, match=said):
        shared_model(served, config_of(model))


def test_the_model_of_a_layer_is_found_in_the_process() -> None:
    served = Served(tiny_models.model("llama"))
    other = Served(tiny_models.model("llama"))
    name = "model.layers.1.self_attn"
    assert served_model(name, served.get_submodule(name)) is served
    assert served_model(name, other.get_submodule(name)) is other
    assert served_model(name, Part()) is None


@needs_vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_vllms_own_plain_matrices_are_shared_and_give_the_tokens_of_ragkv(family: str) -> None:
    found = run("shared", family)
    assert found["views"] == found["parameters"]
    assert found["equal"] == found["fused"] == found["prompts"]
    assert found["fused differ from full"] > found["prompts"] / 2
