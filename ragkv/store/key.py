"""The key of what is stored. Knows neither torch nor a tier, so policies and journals may use it.

As text it names files, objects, Redis values and journal lines, and nothing else: `to_text` and `from_text` are called
there alone, and inside the house a key is this value.
"""

import re
from dataclasses import dataclass

SCORE_SLOTS = ("a", "b")  # Scores of two networks may lie next to one entry: those in use, and those being made.
_TEXT = re.compile(rf"([0-9a-f]{{64}})(?:\.([{''.join(SCORE_SLOTS)}]))?")


@dataclass(frozen=True, slots=True, order=True)
class EntryKey:
    """Which entry, and which part of it. What lies next to KV is found, and deleted, by the KV's key alone."""

    chunk: str  # hex digest (blake2b, 32 bytes) of the identity of the KV and of the token ids of the chunk or block
    slot: str = ""  # of scores: one of `SCORE_SLOTS`; "" for KV

    @property
    def is_scores(self) -> bool:
        """Whether this is the key of scores."""
        return bool(self.slot)

    @property
    def kv(self) -> "EntryKey":
        """The key of the KV next to which the scores of this key lie; this key itself if it is KV's."""
        return EntryKey(self.chunk) if self.slot else self

    @property
    def scores(self) -> tuple["EntryKey", ...]:
        """The keys of the scores that may lie next to the KV of this key; none if it is of scores."""
        return () if self.slot else tuple(EntryKey(self.chunk, slot) for slot in SCORE_SLOTS)

    def to_text(self) -> str:
        """This key in a file's name, an object's, a Redis value's or a journal."""
        return f"{self.chunk}.{self.slot}" if self.slot else self.chunk

    @classmethod
    def from_text(cls, text: str) -> "EntryKey | None":
        """Inverse of `to_text`; `None` if no key has this text."""
        match = _TEXT.fullmatch(text)
        return None if match is None else cls(match[1], match[2] or "")

    def __str__(self) -> str:
        """For messages: the first letters, which are enough to find it in a log."""
        return self.chunk[:12]
