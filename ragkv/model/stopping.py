"""Text as it is decoded: whole characters only, and nothing of a stop string."""

from collections.abc import Sequence
from typing import Any

from ragkv.errors import InputError


class TextStream:
    """Turns token ids into text piece by piece; holds back what may still become a stop string or a character."""

    def __init__(self, tokenizer: Any | None, stop: str | Sequence[str] = ()) -> None:
        """Raises `InputError` for stop strings without a tokenizer."""
        self._tokenizer, self._stop = tokenizer, tuple(s for s in ([stop] if isinstance(stop, str) else stop) if s)
        if self._stop and tokenizer is None:
            raise InputError("Stop strings were given, but the engine has no tokenizer: build it with one.")
        self._ids: list[int] = []
        self._given = 0  # characters already handed out
        self.text = ""  # everything decoded so far, cut at a stop string
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that became certain with `token`."""
        self._ids.append(token)
        if self._tokenizer is None:
            return ""
        self.text = self._tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
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
        whole = self.text.rstrip("\ufffd")  # bytes of a character still to come: one mark, or one a byte
        unfinished = len(self.text) - len(whole)
        longest = max((len(s) for s in self._stop), default=0) - 1
        for length in range(min(longest, len(whole)), 0, -1):
            if any(s.startswith(whole[-length:]) for s in self._stop):
                return length + unfinished
        return unfinished
