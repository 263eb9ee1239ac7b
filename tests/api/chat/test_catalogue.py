"""The catalogue remembers ingested texts, and the latest of the texts that came with requests."""

from collections.abc import Iterator

import pytest

from ragkv.api.chat import ChatDocument
from ragkv.api.chat.catalogue import ChunkCatalogue
from tests.engine.helpers import text_engine

TEXTS = tuple(f"This is text number {number} of all." for number in range(5))


@pytest.fixture
def catalogue() -> Iterator[ChunkCatalogue]:
    with text_engine() as engine:
        yield ChunkCatalogue(engine)


def found(catalogue: ChunkCatalogue) -> list[str]:
    return [match.text for match in catalogue.find("\n".join(TEXTS))]


def test_beyond_the_limit_the_oldest_texts_of_requests_are_forgotten(
    catalogue: ChunkCatalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragkv.api.chat.catalogue.MAX_REQUEST_TEXTS", 2)
    catalogue.register([ChatDocument(TEXTS[0], {})])
    for text in TEXTS[:4]:
        catalogue.remember([ChatDocument(text, {})])
    catalogue.remember([ChatDocument(TEXTS[2], {}), ChatDocument(TEXTS[4], {})])
    assert found(catalogue) == [TEXTS[0], TEXTS[2], TEXTS[4]]
