"""To look at many collections takes time, so it is done now and then."""

from pathlib import Path

import pytest

from ragkv.api.chat import PassageMatcher
from ragkv.api.documents import known_passages
from ragkv.api.documents.collection_folders import CollectionFolders
from ragkv.api.documents.known_passages import KnownPassages


class CountedFolders(CollectionFolders):
    """Counts how often all names are listed."""

    looks = 0

    def names(self) -> list[str]:
        self.looks += 1
        return super().names()


@pytest.mark.parametrize(("pause", "looks"), [(0, 3), (10**9, 1)])
def test_requests_look_at_the_collections_again_after_a_multiple_of_the_time_that_the_last_look_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause: int, looks: int
) -> None:
    monkeypatch.setattr(known_passages, "PAUSE", pause)
    folders = CountedFolders(tmp_path)
    folders.create("c", lambda _: None)
    folders.looks = 0
    passages = KnownPassages(folders, PassageMatcher(), 1000)
    for _ in range(3):
        assert passages.refresh() == ()
    assert folders.looks == looks
