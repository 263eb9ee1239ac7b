"""The tokenizer as the compiler of grammars sees it: the bytes of each token, and the tokens that end an answer.

It is built once for a loaded model, at the first constrained answer, and shared by all engines on the model.
"""

import json
import threading
from collections.abc import Sequence
from typing import Any

from ragkv.errors import InputError, MissingExtraError

_SAMPLE = '{"a": [1, -2.5, true], "b c": {"d": "é \\" 漢"}}'


class ConstraintTokenizer:
    """One model's tokenizer for constrained answers. Thread-safe."""

    def __init__(self, tokenizer: Any | None, vocabulary: int, end_tokens: Sequence[int]) -> None:
        """`vocabulary` is V, the width of the logits. Nothing is built yet."""
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._lock = threading.Lock()
        self._built: Any = None
        own_end = getattr(tokenizer, "eos_token_id", None)
        self.end_tokens = tuple(end_tokens) or (() if own_end is None else (int(own_end),))

    @property
    def vocabulary(self) -> int:
        """V."""
        return self._vocabulary

    def get(self) -> Any:
        """The compiler's tokenizer. Raises `MissingExtraError`, and `InputError` for a tokenizer it cannot use."""
        with self._lock:
            if self._built is None:
                self._built = self._build()
            return self._built

    def _build(self) -> Any:
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise MissingExtraError("llguidance", "structured", "Structured output") from error
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise InputError("Structured output needs a fast tokenizer (tokenizers library), and this engine has none.")
        if not self.end_tokens:
            raise InputError("Structured output needs an end token, and neither the model nor its tokenizer names one.")
        try:
            built = LLTokenizer(
                _without_added_space(backend.to_str()), n_vocab=self._vocabulary, eos_token=list(self.end_tokens)
            )
        except (ValueError, RuntimeError) as error:
            raise InputError(f"Structured output does not support this tokenizer: {error}.") from error
        self._check(built)
        return built

    def _check(self, built: Any) -> None:
        """Raise `InputError` if the compiler and the tokenizer disagree about the bytes of tokens."""
        ids = self._tokenizer(_SAMPLE, add_special_tokens=False)["input_ids"]  # type: ignore[misc]
        decoded = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)  # type: ignore[union-attr]
        if built.decode_bytes(list(ids)).decode("utf-8", "replace").strip() != decoded.strip():
            raise InputError("Structured output does not support this tokenizer: the bytes of its tokens are unknown.")


def _without_added_space(tokenizer: str) -> str:
    """A tokenizer's JSON that puts no space before a text: the compiler would force that space into answers."""
    parts = json.loads(tokenizer)
    parts["truncation"] = parts["padding"] = None
    parts["normalizer"] = _without_prepend(parts.get("normalizer"))
    for step in _steps(parts.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] == "ByteLevel":
            step["add_prefix_space"] = False
        elif step["type"] == "Metaspace":
            step["prepend_scheme"] = "never"
            step.pop("add_prefix_space", None)
    return json.dumps(parts, ensure_ascii=False)


def _without_prepend(normalizer: Any) -> Any:
    if not normalizer or normalizer["type"] == "Prepend":
        return None
    if normalizer["type"] == "Sequence":
        steps = [step for step in normalizer["normalizers"] if step["type"] != "Prepend"]
        return {**normalizer, "normalizers": steps}
    return normalizer


def _steps(step: Any, inner: str) -> list[Any]:
    if not step:
        return []
    return [one for part in step[inner] for one in _steps(part, inner)] if step["type"] == "Sequence" else [step]
