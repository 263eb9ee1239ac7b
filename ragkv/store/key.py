"""The key of what is stored. Knows neither torch nor a tier, so policies and journals may use it.

As text it names files, objects, Redis values and journal lines. `to_text` and `from_text` are
called only there; everywhere else a key is this value.
"""

import re
from dataclasses import dataclass

_TEXT = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, order=True)
class EntryKey:
    """Which entry."""

    # hex digest (blake2b, 32 bytes) of the identity of the KV and of the token ids of the chunk or
    # block
    digest: str

    def to_text(self) -> str:
        """This key in a file's name, an object's, a Redis value's or a journal."""
        return self.digest

    @classmethod
    def from_text(cls, text: str) -> "EntryKey | None":
        """Inverse of `to_text`; `None` if no key has this text."""
        return cls(text) if _TEXT.fullmatch(text) else None

    def __str__(self) -> str:
        """For messages: the first letters, which are enough to find it in a log."""
        return self.digest[:12]
