"""Conversations found by their text: what is to be deleted stays so until it is confirmed."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ragkv.chat.finder import ConversationFinder, FoundConversation
from ragkv.engine import Engine
from ragkv.errors import SessionUnavailableError
from ragkv.sessions import Session


class Saved:
    """The saved conversations of a server that may be away. `meanwhile` is called once, in the
    middle of the next deletion.
    """

    def __init__(self, *names: str) -> None:
        self.names = set(names)
        self.is_away = False
        self.meanwhile: Callable[[], None] = lambda: None
        self.jobs: list[Callable[[], object]] = []

    def in_background(self, action: Callable[[], object]) -> bool:
        self.jobs.append(action)
        return True

    def ids(self, *, idle: bool = False) -> list[str]:
        self._check()
        return sorted(self.names)

    def delete_all(self, names: Iterable[str]) -> None:
        self._check()
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        self.is_away = False
        self.names -= set(names)

    def _check(self) -> None:
        if self.is_away:
            raise SessionUnavailableError("The server does not answer.")


def finder_of(saved: Saved) -> ConversationFinder:
    return ConversationFinder(cast(Engine, SimpleNamespace(sessions=cast(Any, saved))))


def test_a_deletion_of_all_that_fails_during_another_one_is_done_later() -> None:
    saved = Saved("chat-1", "named-1")
    finder = finder_of(saved)

    def another_thread() -> None:
        saved.names.add("chat-2")
        saved.is_away = True
        finder.delete_all()

    saved.meanwhile = another_thread
    finder.delete_all()
    assert saved.names == {"chat-2", "named-1"}, "it was saved after the first list"
    finder.delete("any text")  # the next time that something is deleted
    assert saved.names == {"named-1"}


def test_a_deletion_of_one_that_fails_during_another_one_is_done_later() -> None:
    saved = Saved()
    finder = finder_of(saved)

    def another_thread() -> None:
        saved.is_away = True
        finder.delete("a text")

    def save_again(names: Iterable[str]) -> None:
        delete_all(names)
        saved.names |= set(names)  # as a turn does that ends between the two deletions

    saved.meanwhile = another_thread
    delete_all, saved.delete_all = saved.delete_all, save_again  # type: ignore[method-assign]
    finder.delete("a text")
    saved.delete_all = delete_all  # type: ignore[method-assign]
    assert len(saved.names) == 1
    finder.delete("another text")
    assert saved.names == set()


def test_no_turn_waits_for_the_deletion_of_old_conversations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ragkv.chat.finder.MAX_SAVED", 1)
    monkeypatch.setattr("ragkv.chat.finder.TRIMMED", 1)
    saved = Saved("chat-1", "chat-2", "named-1")
    finder = finder_of(saved)
    turn = SimpleNamespace(fork=lambda _: None, delete=lambda: None)
    saved.is_away = True  # whoever asks it now fails
    assert finder.save("text", FoundConversation(cast(Session, turn), 0)) == ()
    (job,) = saved.jobs
    job()
    assert saved.names == {"chat-1", "chat-2", "named-1"}, "the next time that it is due"
    saved.is_away = False
    job()
    assert saved.names == {"chat-1", "named-1"}
