"""Which conversations there are, and how many of their histories have a block."""

from collections import Counter
from collections.abc import Iterable

from ragkv.store import EntryKey

from .manifest import Summary


class References:
    """The summaries of all conversations of an engine. Not safe for threads: its owner has a lock."""

    def __init__(self) -> None:
        self.saved: dict[str, Summary] = {}  # by id
        self.unsaved: dict[str, Summary] = {}  # by id
        self._counts: Counter[EntryKey] = Counter()  # how many histories have a block

    def set(self, session_id: str, new: Summary | None, *, saved: bool = True) -> set[EntryKey]:
        """Record what a conversation consists of; returns the keys that its history has no more."""
        table = self.saved if saved else self.unsaved
        old = table.pop(session_id, None)
        if new is not None:
            table[session_id] = new
            self._counts.update(new.keys)
        self._counts.subtract(old.keys if old else ())
        return set(old.keys if old else ()) - set(new.keys if new else ())

    def set_saved(self, summaries: Iterable[Summary]) -> None:
        """Record all conversations that are saved, in place of those known before."""
        self.saved = {summary.session_id: summary for summary in summaries}
        histories = (*self.saved.values(), *self.unsaved.values())
        self._counts = Counter(key for summary in histories for key in summary.keys)

    def release(self, key: EntryKey) -> bool:
        """Whether no history has the block `key`; then it is counted no more."""
        if self._counts[key] > 0:
            return False
        del self._counts[key]
        return True
