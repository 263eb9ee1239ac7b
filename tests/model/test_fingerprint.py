"""The identity of an entry: changes that affect KV change it, and no others do."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from ragkv import Engine, EngineConfig, PromptConfig, StoreConfig
from ragkv.model import adapt
from ragkv.model.fingerprint import (
    architecture_digest,
    rope_parameters_digest,
    tokenizer_digest,
    weights_digest,
)
from ragkv.store.entry import Identity
from tests import tiny_models
from tests.toy_tokenizers import byte_tokenizer, fallback_tokenizer


def digests(model: Any) -> tuple[str, str, str]:
    adapter = adapt(model)
    return weights_digest(model), architecture_digest(adapter), rope_parameters_digest(adapter)


def changed(family: str, **changes: Any) -> Any:
    """A model with the family's weights and a changed config."""
    model = type(tiny_models.model(family))(tiny_models.config(family, **changes)).eval()
    model.load_state_dict(tiny_models.weights(family), strict=False)
    return model


def identity(model: Any, tokenizer: Any = None, **config: Any) -> Identity:
    with Engine(model, tokenizer, EngineConfig(**config)) as engine:
        return engine.entries.encoder.identity


def test_a_change_of_any_weight_changes_the_identity() -> None:
    model = tiny_models.model("llama")
    before = weights_digest(model)
    for name, weight in model.named_parameters():
        with torch.no_grad():
            first = weight.view(-1)[:1]
            old = first.clone()
            first.add_(1e-3)
            assert weights_digest(model) != before, name
            first.copy_(old)
    assert weights_digest(model) == before


def test_equal_bytes_with_another_name_shape_or_dtype_change_the_identity() -> None:
    def digest(**weights: torch.Tensor) -> str:
        module = torch.nn.Module()
        for name, weight in weights.items():
            module.register_buffer(name, weight)
        return weights_digest(module)

    zeros = torch.zeros(4)
    variants = [
        digest(a=zeros),
        digest(b=zeros),
        digest(a=zeros.view(2, 2)),
        digest(a=zeros.int()),
        digest(a=zeros[:2], b=zeros[2:]),
        digest(),
    ]
    assert len(set(variants)) == len(variants)
    assert digest(a=zeros, b=zeros + 1) == digest(b=zeros + 1, a=zeros)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", dict(rope_parameters={"rope_type": "default", "rope_theta": 20_000.0})),
        (
            "llama",
            dict(rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}),
        ),
        (
            "gemma3_text",
            dict(
                rope_parameters={
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                    "full_attention": {
                        "rope_type": "linear",
                        "rope_theta": 1_000_000.0,
                        "factor": 4.0,
                    },
                }
            ),
        ),
        ("llama-dynamic", dict(max_position_embeddings=64)),
    ],
    ids=["theta", "type", "one of two tables", "original length"],
)
def test_any_rope_parameter_changes_the_identity(family: str, changes: dict[str, Any]) -> None:
    found = digests(changed(family, **changes))
    plain = digests(tiny_models.model(family))
    assert found[:2] == plain[:2] and found[2] != plain[2]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", dict(sliding_window=25)),
        ("mistral", dict(sliding_window=None)),
        ("qwen2", dict(layer_types=["full_attention"] * 4)),
        ("llama", dict(rms_norm_eps=1e-3)),
        ("llama", dict(hidden_act="gelu")),
        ("granite", dict(attention_multiplier=0.3)),
        ("gemma2", dict(attn_logit_softcapping=7.0)),
    ],
    ids=["window", "no window", "layer types", "epsilon", "activation", "scale", "soft cap"],
)
def test_any_setting_of_the_computation_changes_the_identity(
    family: str, changes: dict[str, Any]
) -> None:
    found = digests(changed(family, **changes))
    plain = digests(tiny_models.model(family))
    assert found[::2] == plain[::2] and found[1] != plain[1]


def test_settings_without_effect_on_kv_keep_the_identity() -> None:
    model = tiny_models.model("llama")
    before = digests(model)
    settings = dict(
        eos_token_id=7,
        use_cache=False,
        attention_dropout=0.5,
        initializer_range=0.9,
        id2label={0: "a"},
    )
    settings |= dict(max_position_embeddings=1024, output_hidden_states=True)
    for name, value in settings.items():
        setattr(model.config, name, value)
        assert digests(model) == before, name


@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "phi3", "gpt_neox", "qwen3_moe", "cohere2"]
)
def test_saving_and_loading_a_model_keeps_its_identity(family: str, tmp_path: Path) -> None:
    model = tiny_models.model(family)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert digests(loaded) == digests(model)
    loaded.set_attn_implementation("eager")
    assert digests(loaded) == digests(model)


def test_using_a_model_keeps_its_identity() -> None:
    model = tiny_models.model("llama-dynamic")
    before = digests(model)
    model(torch.tensor([tiny_models.tokens(100)]))  # grows the rotary table
    assert digests(model) == before


def test_dtype_adapter_tenant_tokenizer_prefix_and_tokens_change_the_key_of_an_entry(
    tmp_path: Path,
) -> None:
    def key(*, dtype: torch.dtype = torch.float32, tokenizer: Any = None, **config: Any) -> str:
        return identity(tiny_models.model("llama").to(dtype), tokenizer, **config).key([5, 6])

    byte = byte_tokenizer()
    keys = [
        key(),
        key(dtype=torch.bfloat16),
        key(dtype=torch.float16),
        key(adapter_id="lora"),
        key(store=StoreConfig(tenant="a")),
        key(store=StoreConfig(tenant="b")),
        key(tokenizer=fallback_tokenizer()),
        identity(changed("llama", bos_token_id=3)).key([5, 6]),  # another prefix
        identity(tiny_models.model("llama")).key([6, 5]),
    ]
    assert len(set(keys)) == len(keys)
    assert key() == key(store=StoreConfig(directory=str(tmp_path)), device="elsewhere")
    text_model = transformers.LlamaForCausalLM(tiny_models.config("llama", vocab_size=300)).eval()
    systems = {
        identity(text_model, byte, prompt=PromptConfig(system=text)).seen_digest
        for text in ("", "a", "ab")
    }
    assert len(systems) == 3


class TestTokenizer:
    def test_the_vocabulary_and_the_rules_change_the_tokenizer_digest(self) -> None:
        more = byte_tokenizer()
        more.add_tokens(["more"])
        assert (
            len({tokenizer_digest(t) for t in (byte_tokenizer(), fallback_tokenizer(), more)}) == 3
        )

    def test_using_saving_and_loading_a_tokenizer_keeps_its_digest(self, tmp_path: Path) -> None:
        tokenizer = byte_tokenizer()
        before = tokenizer_digest(tokenizer)
        tokenizer(["a", "bcd"], padding="max_length", truncation=True, max_length=2)
        tokenizer.save_pretrained(tmp_path)
        assert tokenizer_digest(tokenizer) == before
        assert tokenizer_digest(transformers.AutoTokenizer.from_pretrained(tmp_path)) == before


FOUR_KEYS = """
import json
from ragkv import Engine
from ragkv.model.fingerprint import tokenizer_digest
from tests import tiny_models
from tests.toy_tokenizers import byte_tokenizer

keys = [tokenizer_digest(byte_tokenizer())]
for family in ("llama", "gemma3_text", "mixtral"):
    with Engine(tiny_models.model(family)) as engine:
        keys.append(engine.entries.encoder.identity.key([5, 6]).digest)
"""


def test_keys_are_the_same_in_every_process() -> None:
    here: dict[str, Any] = {}
    exec(FOUR_KEYS, here)
    root = Path(__file__).parents[2]
    another = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FOUR_KEYS + "print(json.dumps(keys))"]
    ran = subprocess.run(command, env=another, cwd=root, capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == here["keys"]
    assert len(set(here["keys"])) == 4
