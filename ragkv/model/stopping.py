"""Text as it is decoded: whole characters only, and nothing of a stop string."""

from collections.abc import Sequence
from typing import Any


class TextStream:
    """Turns token ids into text piece by piece; holds back what may still become a stop string or a character."""

    def __init__(self, tokenizer: Any | None, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(s for s in stop if s)
        self._ids: list[int] = []
        self._given = 0  # characters already handed out
        self.text = ""  # everything decoded so far, cut at a stop string
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that became certain with `token`."""
        self._ids.append(token)
        if self._tokenizer is None:
            return ""
        self.text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        cut = min((at for s in self._stop if (at := self.text.find(s)) >= 0), default=None)
        if cut is not None:
            self.text, self.stopped = self.text[:cut], True
            return self._hand_out(cut)
        return self._hand_out(len(self.text) - self._held_back())

    def finish(self) -> str:
        """What was held back."""
        return self._hand_out(len(self.text))

    def _hand_out(self, until: int) -> str:
        piece = self.text[self._given : until]
        self._given = max(self._given, until)
        return piece

    def _held_back(self) -> int:
        if self.text.endswith("\ufffd"):  # bytes of a character still to come
            return 1
        longest = max((len(s) for s in self._stop), default=0) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            if any(s.startswith(self.text[-length:]) for s in self._stop):
                return length
        return 0
