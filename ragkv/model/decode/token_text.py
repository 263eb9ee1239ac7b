"""The text and bytes of single tokens, and log probabilities in the form that OpenAI's clients
read.
"""

from collections.abc import Sequence
from typing import Any

from ragkv.types import TokenLogprob

LEAST_LOGPROB = -9999.0  # This number stands for minus infinity, which JSON does not have.
_SPACE = "\u2581"  # This character is sentencepiece's mark of a space.


class TokenText:
    """The texts of one tokenizer's tokens."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        characters: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
        # GPT-2's characters for bytes
        self._alphabet = {char: byte for byte, char in characters.items()}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._is_byte_level = "ByteLevel" in str(getattr(backend, "decoder", ""))

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes that a token adds to a text, also a part of a character; `None` if the
        tokenizer does not say.
        """
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(piece, str):
            return None
        if token in self._special:
            return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        if self._is_byte_level and all(char in self._alphabet for char in piece):
            return bytes(self._alphabet[char] for char in piece)
        if _SPACE in piece:
            return piece.replace(_SPACE, " ").encode()
        text = str(self._tokenizer.decode([token]))
        return None if "\ufffd" in text else text.encode()

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        """A token with its log probability: `token`, `logprob` and `bytes`."""
        data = self.bytes_of(token)
        text = (
            str(self._tokenizer.decode([token]))
            if data is None
            else data.decode("utf-8", "replace")
        )
        return {
            "token": text,
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": None if data is None else list(data),
        }

    def entries(self, tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """The tokens of an answer: each as an `entry`, with those of the most probable tokens as
        `top_logprobs`.
        """
        return [
            {
                **self.entry(one.token_id, one.logprob),
                "top_logprobs": [self.entry(*other) for other in one.top],
            }
            for one in tokens
        ]
