"""The contract of every retriever, the arithmetic of each, and recall on a tiny corpus."""

from collections.abc import Iterator

import numpy as np
import pytest

from ragkv.errors import ConfigError, InputError
from ragkv.registry import RETRIEVERS
from ragkv.retrieval import Document, Index
from ragkv.retrieval.retrievers import ScoredText, merge_ranks, terms
from tests.retrieval.fakes import HashEmbedder, word_splitter

FACTS = {
    "paris": "Paris is the capital of France.",
    "berlin": "Berlin is the capital of Germany.",
    "rhine": "The river Rhine flows through Germany and France.",
    "hugo": "Victor Hugo wrote The Hunchback of Notre-Dame.",
    "goethe": "Goethe wrote Faust in two parts.",
    "zh": "\u5317\u4eac\u662f\u4e2d\u56fd\u7684\u9996\u90fd\u3002",
}
QUESTIONS = {
    "What is the capital of Germany?": "berlin",
    "Who wrote Faust?": "goethe",
    "Which river flows through France?": "rhine",
    "Who wrote The Hunchback?": "hugo",
    "\u4e2d\u56fd\u7684\u9996\u90fd\u662f\u54ea\u91cc\uff1f": "zh",
}
KINDS = {
    "paris": "place",
    "berlin": "place",
    "rhine": "place",
    "hugo": "person",
    "goethe": "person",
    "zh": "place",
}


@pytest.fixture
def index() -> Iterator[Index]:
    with Index(None, splitter=word_splitter(), embedder=HashEmbedder(256)) as index:
        index.writer.ingest(
            Document(name, text, metadata={"kind": KINDS[name]}) for name, text in FACTS.items()
        )
        yield index


@pytest.mark.parametrize("name", sorted(RETRIEVERS))
class TestRetrieverContract:
    def test_hits_are_ranked_from_1_by_falling_score_with_each_text_once(
        self, index: Index, name: str
    ) -> None:
        hits = index.search("the capital of France", k=4, retriever=name)
        assert [hit.rank for hit in hits] == list(range(1, len(hits) + 1))
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
        assert len({hit.passage.text for hit in hits}) == len(hits)
        assert hits[0].passage.document_id == "paris"

    def test_a_large_k_returns_at_most_the_texts_that_exist(self, index: Index, name: str) -> None:
        assert 1 <= len(index.search("Faust", k=100, retriever=name)) <= len(FACTS)

    def test_a_filter_applies_before_the_ranking_so_that_k_hits_are_returned(
        self, index: Index, name: str
    ) -> None:
        hits = index.search(
            "who wrote the capital of France", k=2, retriever=name, where={"kind": "person"}
        )
        assert {hit.passage.document_id for hit in hits} == {"hugo", "goethe"}

    def test_a_blank_query_and_an_empty_index_find_nothing(self, index: Index, name: str) -> None:
        assert index.search(" \n", retriever=name) == []
        index.writer.delete(index.contents.document_ids())
        assert index.search("capital", retriever=name) == []

    def test_equal_scores_are_ordered_by_ingestion(self, index: Index, name: str) -> None:
        index.writer.delete(index.contents.document_ids())
        index.writer.ingest(
            [Document("x", "same one"), Document("y", "same two"), Document("z", "same six")]
        )
        for k in (1, 2, 3):
            hits = index.search("same", k=k, retriever=name)
            assert [hit.passage.document_id for hit in hits] == ["x", "y", "z"][:k]


def test_bm25_finds_the_right_passage_first_for_every_question(index: Index) -> None:
    found = {q: index.search(q, k=1, retriever="bm25")[0].passage.document_id for q in QUESTIONS}
    assert found == QUESTIONS


def test_terms_are_words_and_pairs_of_characters_where_words_are_not_spaced() -> None:
    assert terms("The KV-Cache of 2024") == ["the", "kv", "cache", "of", "2024"]
    assert terms("\u5317\u4eacx") == ["\u5317", "\u4eac", "\u5317\u4eac", "x"]
    assert terms("\u5317 \u4eac") == ["\u5317", "\u4eac"]
    assert terms("\uc11c\uc6b8\uc740") == ["\uc11c\uc6b8\uc740", "\uc11c\uc6b8", "\uc6b8\uc740"]


def test_words_that_differ_in_their_marks_are_different_words() -> None:
    with Index(None, splitter=word_splitter()) as index:
        index.writer.ingest([Document("x", "\u0926\u093f\u0928 \u0915\u093e \u0915\u093e\u092e")])
        assert index.search("\u0926\u093e\u0928") == []


def test_a_query_may_hold_anything() -> None:
    with Index(None, splitter=word_splitter()) as index:
        index.writer.ingest([Document("x", "word AND \u2474 near"), Document("y", "none")])
        for query in (
            'word" OR *',
            "NEAR(word)",
            "-word",
            "\u2474",
            "near " * 900,
            " ".join(map(str, range(2000))) + " near",
        ):
            assert [hit.passage.document_id for hit in index.search(query)] in (["x"], [])
        assert index.search('"word" NOT terms:*')[0].passage.document_id == "x"


def test_merged_ranks_add_the_reciprocals_of_60_plus_rank() -> None:
    first = [ScoredText(1, 9.0), ScoredText(2, 8.0)]
    second = [ScoredText(2, 0.5), ScoredText(3, 0.4)]
    assert merge_ranks([first, second]) == [
        ScoredText(2, 1 / 62 + 1 / 61),
        ScoredText(1, 1 / 61),
        ScoredText(3, 1 / 62),
    ]
    # equal: by number
    assert [s.number for s in merge_ranks([[ScoredText(5, 1.0)], [ScoredText(4, 1.0)]])] == [4, 5]


def test_a_long_text_scores_as_its_best_window_and_k_texts_are_still_returned() -> None:
    with Index(None, splitter=word_splitter(), embedder=HashEmbedder(256, window_words=2)) as index:
        index.writer.ingest(
            [Document("long", "one two blue whale five six"), Document("short", "blue sky")]
        )
        hits = index.search("blue whale", k=2, retriever="dense")
    assert [hit.passage.document_id for hit in hits] == ["long", "short"]
    np.testing.assert_allclose([hit.score for hit in hits], [1.0, 0.5], atol=1e-6)


def test_a_search_that_cannot_be_made_is_refused_with_the_reason() -> None:
    with Index(None, splitter=word_splitter()) as index:
        with pytest.raises(InputError, match="needs an embedder"):
            index.search("x", retriever="dense")
        for unknown in ("nearest", "fused"):
            with pytest.raises(ConfigError, match="Known: bm25, dense, hybrid"):
                index.search("x", retriever=unknown)
        with pytest.raises(InputError, match="k is 0"):
            index.search("x", k=0)
        assert index.search("absent", k=2**63 - 1, retriever="bm25") == []
        with pytest.raises(InputError, match="at most 9223372036854775807 passages"):
            index.search("x", k=2**63)
