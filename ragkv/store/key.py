"""The key of what is stored. Knows neither torch nor a tier, so policies and journals may use it.

As text it names files, objects, Redis values and journal lines, and nothing else: `to_text` and
`from_text` are called there alone, and inside the house a key is this value.
"""

import re
from dataclasses import dataclass

_SCORES = ".a"  # The text of a key of scores ends with `_SCORES`.
_TEXT = re.compile(rf"([0-9a-f]{{64}})({re.escape(_SCORES)})?")


@dataclass(frozen=True, slots=True, order=True)
class EntryKey:
    """Which entry, and which part of it. What lies next to KV is found, and deleted, by the KV's
    key alone.
    """

    # hex digest (blake2b, 32 bytes) of the identity of the KV and of the token ids of the chunk or
    # block
    chunk: str
    is_scores: bool = False  # whether it is of the scores next to the KV

    @property
    def kv(self) -> "EntryKey":
        """The key of the KV next to which the scores of this key lie; this key itself if it is
        KV's.
        """
        return EntryKey(self.chunk)

    @property
    def scores(self) -> "EntryKey":
        """The key of the scores next to the KV of this key; this key itself if it is of scores."""
        return EntryKey(self.chunk, is_scores=True)

    @property
    def with_scores(self) -> tuple["EntryKey", ...]:
        """What is deleted with this key: the scores, then the KV; scores alone if it is of
        scores.
        """
        return (self,) if self.is_scores else (self.scores, self)

    def to_text(self) -> str:
        """This key in a file's name, an object's, a Redis value's or a journal."""
        return self.chunk + _SCORES if self.is_scores else self.chunk

    @classmethod
    def from_text(cls, text: str) -> "EntryKey | None":
        """Inverse of `to_text`; `None` if no key has this text."""
        match = _TEXT.fullmatch(text)
        return None if match is None else cls(match[1], match[2] is not None)

    def __str__(self) -> str:
        """For messages: the first letters, which are enough to find it in a log."""
        return self.chunk[:12]
