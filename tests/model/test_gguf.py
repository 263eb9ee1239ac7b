"""GGUF files: unpacked once, whole or not at all, with the grids of weights in four bits."""

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from ragkv import Engine
from ragkv.errors import ModelNotFoundError
from ragkv.model import gguf_files, loading
from ragkv.model.cpu.int4 import ATTRIBUTE, Grid, int4_copy
from tests import tiny_models

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages that are tested here

IDS = tiny_models.tokens(45)
QUESTION = IDS[:5]
CHUNKS = [IDS[5:25], IDS[25:45]]
SIZES: dict[str, Any] = dict(  # rows fill the blocks of GGUF
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=tiny_models.VOCABULARY,
    max_position_embeddings=512,
    initializer_range=0.1,
)


@pytest.fixture(autouse=True)
def _cache_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def gguf() -> Any:
    pytest.importorskip("accelerate")
    return pytest.importorskip("gguf")


def qwen2() -> Any:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(**SIZES, bos_token_id=4, eos_token_id=5, tie_word_embeddings=False)
    ).eval()


def values(grid: Grid) -> torch.Tensor:
    """The weights (out, in) float32 that stand on a grid."""
    blocks = grid.unpacked().unflatten(1, (-1, 32)) - 8
    return (blocks * grid.steps.float()[..., None] + grid.middles.float()[..., None]).flatten(1)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_the_layers_of_a_file_in_four_bits_have_its_own_grids(
    gguf: Any, tmp_path: Path, kind: str
) -> None:
    _write_gguf(gguf, tmp_path / "tiny.gguf", qwen2(), kind=kind)
    model = loading.load(tmp_path / "tiny.gguf", "cpu", "auto")[0]
    layers = [part for part in model.modules() if isinstance(part, torch.nn.Linear)]
    assert len(layers) == 3 * 7 + 1
    for layer in layers:
        grid = getattr(layer, ATTRIBUTE)
        assert grid.counts.shape == (layer.out_features, layer.in_features // 2)
        # both are rounded to bfloat16, the weights themselves and the step and middle of a block
        assert (values(grid) - layer.weight).abs().max() < 2**-7 * layer.weight.abs().max()
        assert grid.holds(layer.weight, grid.unpacked())
    in_float32 = loading.load(tmp_path / "tiny.gguf", "cpu", "float32")[0]
    assert not hasattr(in_float32.lm_head, ATTRIBUTE)


def test_an_unpacked_file_is_a_folder_that_other_engines_read_as_a_model(
    gguf: Any, tmp_path: Path
) -> None:
    _write_gguf(gguf, tmp_path / "tiny.gguf", qwen2(), kind="Q4_1")
    folder = gguf_files.unpacked(tmp_path / "tiny.gguf")
    # vLLM takes every file of these endings for weights
    weights = {
        each.name for ending in ("safetensors", "bin", "pt") for each in folder.glob(f"*.{ending}")
    }
    assert weights == {"model.safetensors"}
    assert (folder / gguf_files.GRIDS).is_file()


@torch.no_grad()
def test_weights_that_were_changed_after_loading_are_not_copied_from_their_old_grid(
    gguf: Any, tmp_path: Path
) -> None:
    _write_gguf(gguf, tmp_path / "tiny.gguf", qwen2(), kind="Q4_1")
    layer = loading.load(tmp_path / "tiny.gguf", "cpu", "auto")[0].model.layers[0].mlp.gate_proj
    if int4_copy(layer) is None:
        pytest.skip("torch has no int4 for CPUs")
    layer.weight[3] += 0.1  # as a merged LoRA adapter does
    assert int4_copy(layer) is None


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_rows_that_a_model_reordered_or_joined_have_their_grids(gguf: Any, kind: str) -> None:
    from ragkv.model.gguf_blocks import grids_of

    stored = gguf.GGMLQuantizationType[kind]
    numbers, size = gguf.GGML_QUANT_SIZES[stored]
    tensors = [tensor_of_blocks(gguf, stored, seed, 6, 512 // numbers * size) for seed in (1, 2)]
    first, second = (gguf.dequantize(one.data, stored) for one in tensors)
    rows = torch.cat(list(map(torch.from_numpy, (first, second)))).bfloat16()
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 12, dtype=torch.bfloat16), torch.nn.Linear(512, 6).bfloat16()
    )
    order = torch.randperm(12)
    model[0].weight.data = rows[order]
    model[1].weight.data = rows[:6].T.reshape(6, 512)  # other rows than the file's
    (found,) = grids_of(tensors, model).items()
    assert found[0] == "0" and torch.allclose(
        values(found[1]), rows[order].float(), atol=2**-6 * float(rows.abs().max())
    )


def tensor_of_blocks(gguf: Any, kind: Any, seed: int, rows: int, size: int) -> Any:
    """A tensor of gguf's reader with random bytes, in which all scales are finite."""
    chance = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows, size), generator=chance, dtype=torch.uint8)
    numbers, block = gguf.GGML_QUANT_SIZES[kind]
    scales = 2 if kind.name == "Q4_0" else 4
    blocks = data.view(rows, -1, block)
    blocks[..., 1:scales:2] = 0x2C + blocks[..., 1:scales:2] % 4  # of float16: 1/16 to 1/4
    return SimpleNamespace(data=data.numpy(), tensor_type=kind, shape=(rows, numbers))


def test_other_threads_see_ggufs_own_functions_while_a_file_is_unpacked(
    gguf: Any, tmp_path: Path
) -> None:
    own = (gguf.GGUFReader, gguf.get_tensor_name_map)
    _write_gguf(gguf, tmp_path / "tiny.gguf", qwen2())
    seen = set()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            seen.add((gguf.GGUFReader, gguf.get_tensor_name_map))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        gguf_files.unpacked(tmp_path / "tiny.gguf")
    finally:
        done.set()
        watcher.join()
    assert seen == {own}


def test_an_unpacker_that_ends_before_it_says_why_is_an_error_with_its_last_words(
    gguf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_gguf(gguf, tmp_path / "tiny.gguf", qwen2())
    monkeypatch.setattr(gguf_files, "UNPACKER", "ragkv.no_such_module")
    with pytest.raises(ModelNotFoundError, match=r"ended with status 1; .*no_such_module"):
        loading.load(tmp_path / "tiny.gguf", "cpu", "auto")
    cache = gguf_files.cache_folder("models")
    assert [file.suffix for file in cache.iterdir()] == [".lock"]  # no draft is left


def test_what_a_killed_process_had_unpacked_is_removed_by_the_next_one(
    gguf: Any, tmp_path: Path
) -> None:
    _write_gguf(gguf, tmp_path / "tiny.gguf", qwen2())
    made = gguf_files.unpacked(tmp_path / "tiny.gguf")
    (made / gguf_files.MANIFEST).unlink()
    killed = made.with_name(f"{made.name}.k1ll3d")
    (killed / "model").mkdir(parents=True)
    (killed / "model" / "model.safetensors").write_bytes(b"half")
    others = made.with_name("other-0.k1ll3d")
    others.mkdir()
    assert gguf_files.unpacked(tmp_path / "tiny.gguf") == made
    assert not killed.exists() and others.exists() and made.is_dir()


def test_a_gguf_file_is_unpacked_once_and_gives_the_logits_of_the_model_it_was_made_of(
    gguf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = qwen2()
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
    gguf: Any, tmp_path: Path, is_read: bool
) -> None:
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
    gguf: Any,
    path: Path,
    model: Any,
    tokens: Sequence[str] = (),
    merges: Sequence[str] = (),
    kind: str = "F32",
) -> None:
    """Write a Qwen2 model with a vocabulary of toy tokens to a GGUF file, matrices in `kind`."""
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
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        stored = gguf.GGMLQuantizationType[kind if tensor.dim() == 2 else "F32"]
        writer.add_tensor(found, gguf.quantize(tensor.float().numpy(), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
