"""Where an answer ends, and its text on the way there: only whole characters, and no part of a stop
string.
"""

from collections.abc import Sequence
from typing import Any

from ragkv.errors import InputError

# After so many tokens those that are certain are decoded no more: to decode all for each token
# would be quadratic.
WINDOW_TOKENS = 64
CUT_TRIES = 16  # at so many places


def end_tokens(model: Any, tokenizer: Any | None) -> tuple[int, ...]:
    """Ids that end an answer: of the generation config, else of the config, else of the
    tokenizer.
    """
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, list | tuple) else (int(found),)
    return ()


class TextStream:
    """Decodes token ids to text; holds back text that may become a stop string or an incomplete
    character.
    """

    def __init__(
        self, tokenizer: Any | None, stop: str | Sequence[str] = (), *, as_written: bool = True
    ) -> None:
        """Unless `as_written`, the text does not begin with white space. Raises `InputError` for
        stop strings without a tokenizer.
        """
        self._tokenizer = tokenizer
        self._stop = tuple(s for s in ([stop] if isinstance(stop, str) else stop) if s)
        if self._stop and tokenizer is None:
            raise InputError(
                "Stop strings were given, but the engine has no tokenizer. Build the engine with "
                "a tokenizer."
            )
        self._before = ""  # text of tokens that need not be decoded again
        self._ids: list[int] = []  # the tokens behind it
        self._as_written = as_written
        # characters of the decoded text that were returned, or left out at its beginning
        self._returned = 0
        self._decoded = ""  # of all tokens so far, cut at a stop string; its end may change
        self.text = ""  # returned so far
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is certain after `token` and was not returned before."""
        if self._tokenizer is None:
            return ""
        self._ids.append(token)
        decoded = self._before + self._text_of(self._ids)
        if len(self._ids) % WINDOW_TOKENS == 0:
            self._settle(decoded)
        # none begins in what was returned: what might become one was held back
        begins = (decoded.find(s, self._returned) for s in self._stop)
        cut = min((at for at in begins if at >= 0), default=None)
        self._decoded = decoded[:cut]
        self.stopped = cut is not None
        return self._hand_out(len(decoded) - self._held_back(decoded) if cut is None else cut)

    def flush(self) -> str:
        """The text that was held back."""
        return self._hand_out(len(self._decoded))

    def _text_of(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(  # type: ignore[union-attr]
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _settle(self, decoded: str) -> None:
        """Decode the first tokens no more, if they can be cut off where the text stays the same.

        Some tokenizers drop a space at the beginning, so not every place will do.
        """
        middle = len(self._ids) // 2
        for cut in range(middle, middle + CUT_TRIES):
            head = self._before + self._text_of(self._ids[:cut])
            is_whole = not head.endswith("\ufffd")
            if is_whole and head + self._text_of(self._ids[cut:]) == decoded:
                self._before = head
                del self._ids[:cut]
                return

    def _hand_out(self, until: int) -> str:
        piece = self._decoded[self._returned : until]
        self._returned = max(self._returned, until)
        if not self._as_written and not self.text:
            piece = piece.lstrip()
        self.text += piece
        return piece

    def _held_back(self, decoded: str) -> int:
        whole = decoded.rstrip("\ufffd")  # an incomplete character: one mark, or one per byte
        unfinished = len(decoded) - len(whole)
        longest = max((len(s) for s in self._stop), default=0) - 1
        for length in range(min(longest, len(whole)), 0, -1):
            if any(s.startswith(whole[-length:]) for s in self._stop):
                return length + unfinished
        return unfinished
