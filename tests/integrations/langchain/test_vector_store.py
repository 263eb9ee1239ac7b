"""What LangChain's suite does not test: filters, scores, diversity, files and KV."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding

from ragkv.errors import InputError, StoreError
from ragkv.integrations.langchain import RagKVEmbeddings, RagKVVectorStore
from ragkv.integrations.langchain.filters import matches
from ragkv.retrieval import Document as Source
from ragkv.retrieval import Index
from ragkv.retrieval.testing import HashEmbedder, word_splitter

from .helpers import chat

EMBEDDING = RagKVEmbeddings(embedder=HashEmbedder())
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("the mill makes paper", {"year": 1820, "topic": ["mill", "paper"], "open": True}),
    ("the mill makes rope", {"year": 1901, "topic": ["mill"], "open": False}),
    ("the town has a harbour", {"year": 1901.5, "lang": "en"}),
    ("a harbour for paper boats", {"lang": "fr", "year": "unknown"}),
]


def store(**how: Any) -> RagKVVectorStore:
    texts, metadatas = zip(*ROWS, strict=True)
    return RagKVVectorStore.from_texts(list(texts), EMBEDDING, list(metadatas), ids=list("abcd"), **how)


def ids(documents: list[Document]) -> list[str | None]:
    return [one.id for one in documents]


def test_scores_are_cosines_and_results_are_sorted_best_first() -> None:
    found = store().similarity_search_with_score("the mill makes paper", 4)
    assert found[0][0].id == "a"
    assert found[0][1] == pytest.approx(1.0)
    assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)
    scaled = store().similarity_search_by_vector_with_score([5 * x for x in EMBEDDING.embed_query("rope")], 1)
    assert scaled[0][0].id == "b"
    assert 0 <= store().similarity_search_with_relevance_scores("rope", 1)[0][1] <= 1


FILTERS: list[dict[str, Any]] = [
    {"lang": "en"},
    {"topic": "paper"},
    {"topic": ["paper", "boats"]},
    {"year": {"gte": 1820, "lt": 1901.2}},
    {"year": {"gt": "a"}},
    {"year": {"ne": 1820}},
    {"open": True},
    {"open": 1},
    {"nothing": "x"},
    {"lang": {"in": ["en", "fr"]}, "year": {"gt": 0}},
]


@pytest.mark.parametrize("wanted", FILTERS, ids=str)
def test_a_filter_selects_the_same_documents_as_in_the_index(wanted: dict[str, Any]) -> None:
    index = Index(None, splitter=word_splitter())
    index.ingest(Source(name, text, "", metadata) for name, (text, metadata) in zip("abcd", ROWS, strict=True))
    by_index = {hit.passage.document_id for hit in index.search("the mill town harbour paper", 9, where=wanted)}
    assert set(ids(store().similarity_search("the mill town harbour paper", 9, filter=wanted))) == by_index


def test_a_filter_is_applied_before_the_ranking() -> None:
    assert ids(store().similarity_search("the mill makes paper", 1, filter={"lang": "fr"})) == ["d"]
    assert ids(store().similarity_search("paper", 9, filter=lambda one: "boats" in one.page_content)) == ["d"]
    with pytest.raises(InputError, match="about"):
        matches(Document(page_content=""), {"year": {"about": 3}})


def test_max_marginal_relevance_follows_its_formula() -> None:
    made = RagKVVectorStore(DeterministicFakeEmbedding(size=8))
    made.add_texts([f"text {n}" for n in range(30)], ids=[str(n) for n in range(30)])
    query = made.embeddings.embed_query("q")
    near = made.similarity_search_by_vector_with_score(query, 10)
    vectors = {str(one.id): np.array(made.embeddings.embed_documents([one.page_content])[0]) for one, _ in near}
    vectors = {name: vector / np.linalg.norm(vector) for name, vector in vectors.items()}
    chosen: list[str] = []
    left = {str(one.id): score for one, score in near}
    while len(chosen) < 5:
        gain = {n: 0.3 * s - 0.7 * max((vectors[n] @ vectors[c] for c in chosen), default=0) for n, s in left.items()}
        chosen.append(max(gain, key=lambda name: gain[name]))
        del left[chosen[-1]]
    assert ids(made.max_marginal_relevance_search_by_vector(query, 5, 10, 0.3)) == chosen
    assert ids(made.max_marginal_relevance_search("q", 3, 10, 1.0)) == ids(made.similarity_search("q", 3))


class TestFiles:
    def test_a_loaded_store_gives_the_results_of_the_saved_one(self, tmp_path: Path) -> None:
        made = store()
        made.delete(["b"])
        made.save(tmp_path)
        again = RagKVVectorStore.load(tmp_path, EMBEDDING)
        assert [(one.id, score) for one, score in again.similarity_search_with_score("the mill", 9)] == [
            (one.id, score) for one, score in made.similarity_search_with_score("the mill", 9)
        ]
        assert again.get_by_ids(["a"])[0].metadata == ROWS[0][1]
        assert again.add_texts(["new"], ids=["a"]) == ["a"]

    def test_saving_replaces_the_old_state_and_an_interrupted_save_keeps_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = store()
        made.save(tmp_path)
        made.add_texts(["one more"], ids=["e"])
        with monkeypatch.context() as patched:
            written: list[str] = []
            original = Path.replace

            def replace(self: Path, target: Any) -> Path:
                written.append(str(target))
                if len(written) == 2:
                    raise OSError("the power is gone")
                return original(self, target)

            patched.setattr(Path, "replace", replace)
            with pytest.raises(OSError):
                made.save(tmp_path)
        assert len(RagKVVectorStore.load(tmp_path, EMBEDDING)) == 4
        made.save(tmp_path)
        assert len(RagKVVectorStore.load(tmp_path, EMBEDDING)) == 5
        assert len(list(tmp_path.glob("vectors-*.safetensors"))) == 1

    @pytest.mark.parametrize("harm", ["flip", "cut", "json", "gone", "count"])
    def test_a_damaged_or_incomplete_store_is_refused(self, tmp_path: Path, harm: str) -> None:
        store().save(tmp_path)
        (vectors,), documents = tmp_path.glob("vectors-*"), tmp_path / "documents.json"
        data = bytearray(vectors.read_bytes())
        if harm == "flip":
            data[-1] ^= 1
            vectors.write_bytes(data)
        elif harm == "cut":
            vectors.write_bytes(data[:-8])
        elif harm == "json":
            documents.write_text(documents.read_text()[:-5])
        elif harm == "gone":
            documents.unlink()
        else:
            saved = json.loads(documents.read_text())
            documents.write_text(json.dumps({**saved, "documents": saved["documents"][1:]}))
        with pytest.raises(StoreError, match="cannot be loaded"):
            RagKVVectorStore.load(tmp_path, EMBEDDING)

    def test_saved_files_hold_no_pickle_and_are_private(self, tmp_path: Path) -> None:
        store().save(tmp_path)
        for file in tmp_path.iterdir():
            assert file.suffix in (".json", ".safetensors")
            assert file.stat().st_mode & 0o077 == 0

    def test_metadata_that_is_not_json_is_refused_and_the_old_files_stay(self, tmp_path: Path) -> None:
        made = store()
        made.save(tmp_path)
        made.add_texts(["x"], [{"what": object()}])
        with pytest.raises(InputError, match="JSON"):
            made.save(tmp_path)
        assert len(RagKVVectorStore.load(tmp_path, EMBEDDING)) == 4


def test_an_empty_store_can_be_searched_saved_and_loaded(tmp_path: Path) -> None:
    made = RagKVVectorStore(EMBEDDING)
    assert made.similarity_search("x") == []
    assert made.max_marginal_relevance_search("x") == []
    assert made.add_texts([]) == []
    made.save(tmp_path)
    assert len(RagKVVectorStore.load(tmp_path, EMBEDDING)) == 0


@pytest.mark.parametrize("given", [{"ids": ["1"]}, {"metadatas": [{}]}])
def test_metadatas_or_ids_of_another_length_than_the_texts_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="2 texts"):
        RagKVVectorStore(EMBEDDING).add_texts(["a", "b"], **given)


def test_adding_encodes_kv_and_deleting_the_last_document_of_a_text_deletes_it(tiny: str) -> None:
    llm = chat(tiny)
    text, other = "The mill of Marl makes hats.", "The mill of Marl makes ink."
    made = RagKVVectorStore.from_texts([text, text, other], EMBEDDING, ids=["1", "2", "3"], llm=llm)
    chunk = llm.shared.engine.chunk(text)
    assert llm.shared.engine.warm([chunk]).present == 1
    made.delete(["1"])
    assert llm.shared.catalogue.find(text)
    made.delete(["2"])
    assert not llm.shared.catalogue.find(text)
    assert llm.shared.engine.warm([chunk]).encoded == 1
    llm.shared.engine.delete([chunk])
    made.add_texts([text], ids=["3"])  # replaces the other text
    assert not llm.shared.catalogue.find(other)
    assert llm.shared.catalogue.find(text)


def test_threads_can_add_search_and_delete_at_the_same_time() -> None:
    made = store()

    def work(seed: int) -> bool:
        rng = random.Random(seed)
        for n in range(20):
            made.add_texts([f"text {seed} {n}"], ids=[f"{seed}-{n}"])
            assert made.similarity_search(f"text {seed}", rng.randint(1, 9))
            made.max_marginal_relevance_search("text", 3)
            if n % 2:
                made.delete([f"{seed}-{n}"])
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert len(made) == 4 + 8 * 10
