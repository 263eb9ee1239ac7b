"""Models as people load them: quantised, wrapped by PEFT. Each works or is refused
in a sentence.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.errors import MissingExtraError, ModelNotFoundError, UnsupportedModelError
from ragkv.model import loading
from ragkv.model.fingerprint import weights_digest
from tests import tiny_models

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages that are tested here

IDS = tiny_models.tokens(45)
QUESTION = IDS[:5]
CHUNKS = [IDS[5:25], IDS[25:45]]
COARSE = 0.02  # of the logits' spread: int8 rounds tiny differences up to a step


def off(model: Any, config: EngineConfig | None = None) -> float:
    """How far the logits at ratio 1 are from those of a full prefill, relative to their spread."""
    with Engine(model, config=config) as engine:
        fused = engine.prefill(QUESTION, CHUNKS, ratio=1.0)
        full = engine.prefill(QUESTION, CHUNKS, reuse="none").logits
        assert fused.reuse.recomputed or fused.reuse.computed
        return float((fused.logits - full).abs().max() / full.std())


SIZES: dict[str, Any] = dict(  # rows fill the blocks of quantising libraries
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=tiny_models.VOCABULARY,
    max_position_embeddings=512,
    initializer_range=0.1,
)


def wide() -> Any:
    """A random llama."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 1e-4), (torch.bfloat16, COARSE), (torch.float16, COARSE)]
)
def test_dense_weights_work_in_every_dtype(dtype: torch.dtype, most: float) -> None:
    assert off(tiny_models.model("llama").to(dtype)) < most


def test_one_scale_for_all_rows_is_refused() -> None:
    model = torch.ao.quantization.quantize_dynamic(
        tiny_models.model("llama"), {torch.nn.Linear}, dtype=torch.qint8
    )
    with pytest.raises(
        UnsupportedModelError, match=r"q_proj is quantised .* one scale for all rows .* torchao"
    ):
        Engine(model)


@pytest.mark.parametrize(
    ("name", "most"),
    [("Int8WeightOnlyConfig", 1e-4), ("Int8DynamicActivationInt8WeightConfig", COARSE)],
)
def test_torchao_int8_works(name: str, most: float) -> None:
    quantization = importlib.import_module(
        pytest.importorskip("torchao").__name__ + ".quantization"
    )
    model = tiny_models.model("llama")
    quantization.quantize_(model, getattr(quantization, name)())
    assert off(model) < most


def test_torchao_weights_that_differ_in_their_activations_alone_have_different_digests() -> None:
    quantization = importlib.import_module(
        pytest.importorskip("torchao").__name__ + ".quantization"
    )
    digests = []
    for config in (
        quantization.Int8WeightOnlyConfig,
        quantization.Int8DynamicActivationInt8WeightConfig,
    ):
        for _ in range(2):
            model = tiny_models.model("llama")
            quantization.quantize_(model, config())
            digests.append(weights_digest(model))
    assert digests[0] == digests[1] != digests[2] == digests[3]


@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes_works(bits: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    transformers = importlib.import_module("transformers")
    settings = transformers.BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    wide().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=settings, device_map="cpu"
    )
    assert off(model) < 0.1


def _lora(seed: int, **settings: Any) -> Any:
    """A model wrapped by PEFT with a random LoRA adapter."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    lora = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **settings
    )
    return peft.get_peft_model(tiny_models.model("llama"), lora)


FORMS: dict[str, Callable[[Any], Any]] = {
    "wrapped": lambda model: model,
    "inner": lambda model: model.get_base_model(),
    "merged": lambda model: model.merge_and_unload(),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_peft_model_works_wrapped_inner_and_merged(form: str) -> None:
    model = FORMS[form](_lora(1))
    assert off(model) < 1e-4
    with Engine(model) as engine:
        expected = model(torch.tensor([[*CHUNKS[0], *QUESTION]])).logits[0, -1]
        found = engine.prefill([*CHUNKS[0], *QUESTION], reuse="none").logits
        assert not torch.allclose(found, expected, atol=1e-4)  # it begins with BOS
        with_bos = model(torch.tensor([[1, *CHUNKS[0], *QUESTION]])).logits[0, -1]
        assert torch.allclose(found, with_bos, atol=1e-3)


def test_adapters_that_differ_in_their_scale_alone_have_different_digests() -> None:
    model = _lora(1, lora_alpha=8)
    digest = weights_digest(model.get_base_model())
    assert digest == weights_digest(_lora(1, lora_alpha=8).get_base_model())
    assert digest != weights_digest(_lora(1, lora_alpha=16).get_base_model())
    with model.disable_adapter():
        assert digest != weights_digest(model.get_base_model())


def test_an_adapter_that_learns_a_prompt_is_refused() -> None:
    peft = pytest.importorskip("peft")
    tuned = peft.get_peft_model(
        tiny_models.model("llama"),
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    )
    with pytest.raises(UnsupportedModelError, match="learns a prompt"):
        Engine(tuned)


def test_an_adapter_of_the_settings_is_merged_and_two_adapters_have_entries_apart(
    tmp_path: Path,
) -> None:
    pytest.importorskip("peft")
    tiny_models.model("llama").save_pretrained(tmp_path / "base")
    for seed in (1, 2):
        _lora(seed).save_pretrained(tmp_path / f"lora{seed}")
    store = StoreConfig(directory=str(tmp_path / "kv"))
    found = []
    for adapter in ("", str(tmp_path / "lora1"), str(tmp_path / "lora2"), str(tmp_path / "lora1")):
        with Engine.from_pretrained(
            tmp_path / "base", EngineConfig(store=store, adapter=adapter)
        ) as engine:
            first = engine.prefill(QUESTION, CHUNKS, ratio=1.0)
            found.append((first.reuse.computed, first.logits))
            engine.flush()
    missed = [count for count, _ in found]
    logits = [each for _, each in found]
    # only the adapter used before finds its entries
    assert missed[0] == missed[1] == missed[2] > missed[3]
    assert not torch.allclose(logits[1], logits[2], atol=1e-3)
    assert torch.allclose(logits[1], logits[3], atol=1e-3)


def test_a_folder_that_is_no_adapter_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    tiny_models.model("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"LoRA adapter .*adapter_config\.json"):
        Engine.from_pretrained(tmp_path, EngineConfig(adapter=str(tmp_path)))


def test_without_its_package_an_adapter_and_a_gguf_file_name_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_models.model("llama").save_pretrained(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")

    real_import = importlib.import_module

    def import_module(name: str, package: str | None = None) -> Any:
        if name.split(".")[0] in ("peft", "gguf"):
            raise ImportError(name)
        return real_import(name, package)

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(MissingExtraError, match=r"peft: pip install .ragkv\[lora\]"):
        loading.load(tmp_path, "cpu", "float32", lora="lora")
    with pytest.raises(MissingExtraError, match=r"gguf: pip install .ragkv\[gguf\]"):
        loading.load(tmp_path / "model.gguf", "cpu", "auto")


def test_a_checkpoint_whose_quantising_package_is_missing_is_refused_with_the_reason(
    tmp_path: Path,
) -> None:
    model = tiny_models.model("llama")
    for method, bits in (("gptq", 4), ("awq", 4)):
        model.config.quantization_config = {
            "quant_method": method,
            "bits": bits,
            "group_size": 32,
            "zero_point": True,
        }
        model.save_pretrained(tmp_path / method)
        with pytest.raises(ModelNotFoundError, match="Cannot load a causal LM") as caught:
            loading.load(tmp_path / method, "cpu", "auto")
        assert len(str(caught.value)) < 400
