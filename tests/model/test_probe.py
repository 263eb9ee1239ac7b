"""Models whose logits are not reproduced layer by layer are refused with the reason when the engine
is built.
"""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from ragkv import Engine
from ragkv.errors import InputError, UnsupportedModelError
from ragkv.model import adapt
from tests import tiny_models

SMALL = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
UNSUPPORTED: dict[str, tuple[type[Any], Any, str]] = {
    "bloom": (
        transformers.BloomForCausalLM,
        lambda: transformers.BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=2),
        "ALiBi",
    ),
    "deepseek_v3": (
        transformers.DeepseekV3ForCausalLM,
        lambda: transformers.DeepseekV3Config(
            **SMALL,
            intermediate_size=16,
            moe_intermediate_size=16,
            num_key_value_heads=2,
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            n_routed_experts=2,
            num_experts_per_tok=1,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=2,
        ),
        "MLA",
    ),
    "mamba": (
        transformers.MambaForCausalLM,
        lambda: transformers.MambaConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4
        ),
        "state-space",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_architecture_that_cannot_be_fused_is_refused_with_the_reason(name: str) -> None:
    model_class, config, reason = UNSUPPORTED[name]
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        Engine(model_class(config()))
    assert name in str(caught.value)


def test_what_is_no_language_model_is_refused() -> None:
    for thing, error, said in (
        (nn.Linear(2, 2), UnsupportedModelError, "No adapter"),
        (None, UnsupportedModelError, "No adapter"),
        # the call that takes a name
        ("path/to/model", InputError, r"Engine\.from_pretrained\('path/to/model'\)"),
        (tiny_models.model("llama").model, UnsupportedModelError, "causal LM"),  # it has no head
    ):
        with pytest.raises(error, match=said):
            Engine(thing)


class ScaledEmbeddings(transformers.LlamaForCausalLM):
    """Claims to be a llama but scales its embeddings."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(inputs_embeds=self.get_input_embeddings()(input_ids) * 3.0, **kwargs)


class CappedLogits(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = torch.tanh(out.logits)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("altered", [ScaledEmbeddings, CappedLogits])
def test_a_model_whose_forward_does_more_than_its_family_is_refused(
    altered: type[Any], dtype: torch.dtype
) -> None:
    model = altered(tiny_models.config("llama")).eval()
    model.load_state_dict(tiny_models.weights("llama"))
    model.to(dtype)
    with pytest.raises(UnsupportedModelError, match="gives other logits"):
        adapt(model)


@pytest.mark.parametrize("altered", ["frequencies", "not a number"])
def test_a_model_whose_parts_were_altered_is_refused(altered: str) -> None:
    model = tiny_models.model("llama")
    if altered == "frequencies":
        model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 2
    else:
        model.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(UnsupportedModelError, match="gives other logits"):
        adapt(model)


def test_bidirectional_attention_is_refused() -> None:
    model = transformers.Gemma3ForCausalLM(
        tiny_models.config("gemma3_text", use_bidirectional_attention=True)
    )
    with pytest.raises(UnsupportedModelError, match="both directions"):
        adapt(model)


def test_dropout_is_off_once_an_engine_is_built() -> None:
    config = tiny_models.config("gpt_neox", hidden_dropout=0.5, attention_dropout=0.5)
    model = transformers.GPTNeoXForCausalLM(config).train()
    with Engine(model) as engine:
        assert not model.training
        first, second = (engine.prefill([5, 6, 7], reuse="none").logits for _ in range(2))
    assert torch.equal(first, second)
