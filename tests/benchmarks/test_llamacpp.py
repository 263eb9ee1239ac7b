"""The parts of benchmarks/llamacpp.py that work without llama.cpp: GGUF files, our side and its process, the table."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from benchmarks import gguf_file, llamacpp, llamacpp_sides
from tests import tiny_models

needs_gguf = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("gguf", "accelerate")), reason="needs the extra gguf"
)


def tiny_qwen(**settings: Any) -> Any:
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4)
    config = Qwen2Config(
        **{
            **sizes,
            "num_key_value_heads": 2,
            "vocab_size": tiny_models.VOCABULARY,
            "tie_word_embeddings": True,
            **settings,
        }
    )
    model = Qwen2ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)  # zeros would hide a lost bias
    return model


@needs_gguf
@pytest.mark.parametrize(("kind", "tolerance"), [("f16", 1e-3), ("q8_0", 2e-2)])
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_gives_the_model_it_was_written_from(
    tmp_path: Path, kind: str, tolerance: float, tied: bool
) -> None:
    model = tiny_qwen(tie_word_embeddings=tied, rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    gguf_file.write(model, tmp_path / "model.gguf", kind)
    auto: Any = AutoModelForCausalLM
    read = auto.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    ids = torch.tensor([tiny_models.tokens(40)])
    with torch.no_grad():
        wanted, found = model(ids).logits, read(ids).logits
    assert float((found - wanted).norm() / wanted.norm()) < tolerance


def test_other_families_and_kinds_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    with pytest.raises(ValueError, match="qwen2 family"):
        gguf_file.write(tiny_models.model("llama"), tmp_path / "model.gguf", "f16")
    with pytest.raises(ValueError, match=r"'q4_0'.*Known: q8_0, f16"):
        gguf_file.write(tiny_qwen(), tmp_path / "model.gguf", "q4_0")


def test_our_side_computes_the_checkpoints_model_in_a_process_of_its_own(tmp_path: Path) -> None:
    model = tiny_qwen()
    model.save_pretrained(tmp_path)
    with llamacpp_sides.Remote(llamacpp_sides.Ours, tmp_path, "float32", "plain", 2, 16) as side:
        assert side.name == "ragkv float32"
        side.call("threads", 1)
        side.call("full")
        side.call("warm", 0.15)
        for chunks in (1, 2, 1):
            side.call("decode", chunks)
        ids = tiny_models.tokens(10)
        found = torch.tensor(side.call("logits", ids))
        with pytest.raises(RuntimeError, match="no attribute 'nothing'"):
            side.call("nothing")
    with torch.no_grad():
        torch.testing.assert_close(found, model(torch.tensor([ids])).logits[0, -1], atol=1e-4, rtol=1e-4)


@needs_gguf
def test_llama_cpp_computes_the_same_logits_from_the_gguf_file(tmp_path: Path) -> None:
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed")
    model, ids = tiny_qwen(), tiny_models.tokens(20)
    gguf_file.write(model, tmp_path / "f16.gguf", "f16")
    arguments = (tmp_path / "f16.gguf", 2, 16, 5, tiny_models.VOCABULARY)
    with llamacpp_sides.Remote(llamacpp_sides.LlamaCpp, *arguments) as side:
        for call in (("threads", 1), ("full",), ("decode", 1), ("decode", 2)):
            side.call(*call)
        found = torch.tensor(side.call("logits", ids))
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0, -1]
    assert float((found - wanted).norm() / wanted.norm()) < 0.01


def test_the_table_compares_warm_first_tokens_with_full_prefills_and_rates_with_rates() -> None:
    medians = {
        ("ragkv int8", "full prefill"): 4.0,
        ("ragkv int8", "warm at 0.15"): 0.5,
        ("ragkv int8", "tokens/s behind 544"): 0.8,
        ("llama.cpp q8_0", "full prefill"): 5.0,
        ("llama.cpp q8_0", "tokens/s behind 544"): 0.4,
        ("llama.cpp f16", "full prefill"): 8.0,
        ("llama.cpp f16", "tokens/s behind 544"): 1.6,
    }
    head, rows = llamacpp.rows_of(medians)
    assert head[3:] == ("against llama.cpp f16", "against llama.cpp q8_0")
    shown = {row[:2]: row[2:] for row in rows}
    assert shown["ragkv int8", "full prefill"] == ("4000", "2.00x", "1.25x")
    assert shown["ragkv int8", "warm at 0.15"] == ("500", "16.00x", "10.00x")
    assert shown["ragkv int8", "tokens/s behind 544"] == ("20.0", "2.00x", "0.50x")
    assert [row[1] for row in rows] == ["full prefill"] * 3 + ["warm at 0.15"] + ["tokens/s behind 544"] * 3
