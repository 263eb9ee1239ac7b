"""Loading a model and its tokenizer, or one clear error message."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ragkv.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from ragkv.model.loading import load
from tests import tiny_models
from tests.toy_tokenizers import byte_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_models.model("llama").save_pretrained(tmp_path)
    return tmp_path


def refused(
    name: Any, error: type[Exception] = ModelNotFoundError, device: str = "cpu", dtype: str = "auto"
) -> str:
    with pytest.raises(error) as caught:
        load(name, device, dtype)
    message = str(caught.value)
    assert len(message) < 600
    assert "\n" not in message
    return message


def test_a_model_folder_loads_in_eval_mode_and_in_its_own_dtype(folder: Path) -> None:
    model, tokenizer = load(folder, "cpu", "auto")
    assert (model.training, model.dtype, tokenizer) == (False, torch.float32, None)
    assert load(str(folder), "cpu", "bfloat16")[0].dtype is torch.bfloat16


def test_the_folders_tokenizer_is_loaded_too(folder: Path) -> None:
    byte_tokenizer().save_pretrained(folder)
    _, tokenizer = load(folder, "cpu", "auto")
    assert tokenizer.decode(tokenizer("aé", add_special_tokens=False)["input_ids"]) == "aé"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *(
            (name, "No model folder at")
            for name in ("no-such-model", "./no/such/folder", "/no/such", "~/no/such")
        ),
        ("no-such/model", "no-such/model"),  # as on the hub
        (Path(__file__).parent, "no config.json"),
    ],
)
def test_a_model_that_is_not_there_is_named(name: str | Path, said: str) -> None:
    assert said in refused(name)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": "no-such-type"}', "\x00\x01"])
def test_an_empty_config_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    assert str(folder) in refused(folder)


def test_damaged_weights_are_refused_in_a_sentence(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for size in (0, 4, 1000, len(whole) // 2):
        weights.write_bytes(whole[:size])
        said = refused(folder)
        assert str(folder) in said and "missing or cut" in said
    weights.write_bytes(b"not a tensor " * 99)
    assert str(folder) in refused(folder)
    weights.unlink()
    assert "model.safetensors" in refused(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "weights.gguf"])
def test_a_pointer_in_place_of_a_file_is_named(folder: Path, name: str) -> None:
    (folder / name).write_bytes(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    )
    if name.endswith("gguf"):
        pytest.importorskip("gguf")
        folder = folder / name
    assert f"{name} is a Git LFS pointer" in refused(folder)


def test_incomplete_weights_are_refused_and_not_initialized_at_random(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "1 missing, model.layers.1.mlp.up_proj.weight" in refused(folder)


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.zeros(3)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert str(folder) in refused(folder)


def test_an_unsupported_architecture_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    transformers.T5Config().save_pretrained(tmp_path)  # no weights at all
    assert "encoder-decoder" in refused(tmp_path, UnsupportedModelError)
    transformers.GPT2Config().save_pretrained(tmp_path)
    assert "gpt2" in refused(tmp_path, UnsupportedModelError)


def test_the_message_distinguishes_a_damaged_tokenizer_from_a_damaged_model(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    assert "tokenizer of the model" in refused(folder)


def test_an_unknown_dtype_and_a_device_that_is_not_there_are_refused(folder: Path) -> None:
    for dtype in ("int8", "no-such-dtype", ""):
        assert "'bfloat16'" in refused(folder, ConfigError, dtype=dtype)
    assert load(folder, "cpu", "float")[0].dtype is torch.float32  # torch's own name for it
    for device in ("no-such-device", *(() if torch.cuda.is_available() else ("cuda",))):
        assert f"'{device}'" in refused(folder, ConfigError, device=device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_model_is_moved_to_the_requested_device(folder: Path) -> None:
    assert load(folder, "cuda", "bfloat16")[0].device.type == "cuda"
