"""The training model and its export give the same results as the model that transformers loads."""

from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from training.batches import Encoder, Stream
from training.model import Reader, Shape, bias, load
from training.tokenizer import build
from training.train import losses, save_reader

SMALL = Shape(
    vocabulary=len(build()), hidden=32, layers=8, heads=2, kv_heads=1, head_dim=16, inner=48
)


def reader() -> Reader:
    torch.manual_seed(0)
    made = Reader(SMALL)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return made


def test_the_export_gives_the_same_logits_in_transformers(tmp_path: Path) -> None:
    save_reader(reader(), tmp_path)
    exported = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    trained = load(tmp_path)
    ids = torch.randint(5, SMALL.vocabulary, (2, 40), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(40).expand(2, 40)
    with torch.inference_mode():
        hidden, _ = trained(
            ids, positions, bias(torch.zeros_like(ids), torch.float32), torch.float32
        )
        torch.testing.assert_close(
            trained.logits(hidden), exported(ids).logits, atol=2e-4, rtol=2e-4
        )


def test_the_exported_tokenizer_equals_the_one_used_in_training(tmp_path: Path) -> None:
    save_reader(reader(), tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "Talus lives in Kelmouth. She works there."
    assert loaded.encode(text, add_special_tokens=False) == Encoder(build()).ids(text)
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token) == ("<bos>", "<end>", "<pad>")


def test_a_training_step_has_a_gradient_for_every_parameter() -> None:
    made = reader()
    batch = next(iter(Stream(1, {1: 1.0}, 1500)))
    total, shown = losses(made, batch, auxiliary=1.0, attention=1.0)
    torch.autograd.backward(total)
    assert all(parameter.grad is not None for parameter in made.parameters())
    assert 0 <= shown["accuracy"] <= 1
