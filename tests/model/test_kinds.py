"""Models as people load them: quantised, wrapped by PEFT, in a GGUF file. Each works or is refused
in a sentence.
"""

import importlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.errors import MissingExtraError, ModelNotFoundError, UnsupportedModelError
from ragkv.model import gguf_files, loading
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
        loading.load(tmp_path, "cpu", "float32", adapter="lora")
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


def test_a_gguf_file_is_unpacked_once_and_gives_the_logits_of_the_model_it_was_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(**SIZES, bos_token_id=4, eos_token_id=5, tie_word_embeddings=False)
    ).eval()
    _write_gguf(gguf, tmp_path / "tiny.gguf", model)
    with Engine.from_pretrained(tmp_path / "tiny.gguf") as engine:
        assert len(engine.chunk("abab").token_ids) == 2
        assert engine.prefill(QUESTION, CHUNKS).reuse.tokens >= len(IDS)
        loaded = engine.model.adapter.model
    with torch.no_grad():
        found, expected = (each(torch.tensor([IDS])).logits for each in (loaded, model))
    assert torch.allclose(found, expected, atol=1e-3)
    made = gguf_files.unpacked(tmp_path / "tiny.gguf")
    weights = made / "model.safetensors"
    before = weights.stat().st_ino
    assert gguf_files.unpacked(tmp_path / "tiny.gguf") == made and weights.stat().st_ino == before
    flipped = bytes(255 - byte for byte in weights.read_bytes()[-4:])
    weights.write_bytes(weights.read_bytes()[:-4] + flipped)
    monkeypatch.setattr(gguf_files, "_checked", set())  # as in another process
    assert loading.locate(tmp_path) == str(tmp_path / "tiny.gguf")  # the only one of its folder
    damaged = loading.load(tmp_path, "cpu", "float32")[0]
    assert weights.stat().st_ino != before and torch.equal(
        damaged.lm_head.weight, loaded.lm_head.weight
    )
    cut = (tmp_path / "tiny.gguf").read_bytes()[:-4_000]
    (tmp_path / "tiny.gguf").write_bytes(cut)
    with pytest.raises(
        ModelNotFoundError, match=r"Cannot load a causal LM from .*tiny\.gguf"
    ) as caught:
        loading.load(tmp_path / "tiny.gguf", "cpu", "auto")
    assert len(str(caught.value)) < 400
    (tmp_path / "other.gguf").write_bytes(cut)
    with pytest.raises(
        ModelNotFoundError, match=r"has no config\.json and 2 GGUF files: give one of them"
    ):
        loading.locate(tmp_path)


@pytest.mark.parametrize("is_read", [True, False])
def test_a_gguf_file_whose_tokenizer_splits_words_of_its_own_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_read: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    word = "\u0120house"
    merges = [f"{word[:end]} {word[end]}" for end in range(1, len(word))] if is_read else []
    tokens = [*"hous\u0120", "e", *(word[:end] for end in range(2, len(word) + 1))]
    model = Qwen2ForCausalLM(
        Qwen2Config(**SIZES, bos_token_id=40, eos_token_id=41, tie_word_embeddings=False)
    )
    _write_gguf(gguf, tmp_path / "tiny.gguf", model, tokens, merges)
    says = pytest.raises(
        ModelNotFoundError, match=r"splits 2 of 2 words that are tokens, such as 'hous'"
    )
    with nullcontext() if is_read else says:
        assert loading.load(tmp_path / "tiny.gguf", "cpu", "auto")[1].tokenize("a house") == [
            "a",
            word,
        ]


def _write_gguf(
    gguf: Any, path: Path, model: Any, tokens: Sequence[str] = (), merges: Sequence[str] = ()
) -> None:
    """Write a Qwen2 model with a vocabulary of toy tokens to a GGUF file."""
    config = model.config
    words = ["a", "b", "ab", *tokens]
    words += [f"w{number}" for number in range(len(words), config.vocab_size)]
    writer = gguf.GGUFWriter(str(path), "qwen2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    writer.add_token_merges(["a b", *merges])
    writer.add_token_types([1] * len(words))
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight", ".bias")), tensor.float().numpy()
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
