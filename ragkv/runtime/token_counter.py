"""How many tokens a text from outside has, for processes that have no model."""

from dataclasses import dataclass, field
from typing import Any

from .outside import token_ids


@dataclass(eq=False)
class TokenCounter:
    """How many tokens a text from outside has. Pickled, it needs neither the model nor its
    library.
    """

    tokenizer: Any | None
    _pickled: tuple[str, str] | None = field(default=None, init=False)

    def __call__(self, text: str) -> int:
        """The tokens of `text`, without special tokens. Raises `InputError` without a tokenizer."""
        return len(token_ids(self.tokenizer, text))

    @property
    def can_be_pickled(self) -> bool:
        """Whether the tokenizer is one of the library tokenizers, as almost all are."""
        return hasattr(self.tokenizer, "backend_tokenizer")

    def __reduce__(self) -> Any:
        assert self.tokenizer is not None
        template = str(getattr(self.tokenizer, "chat_template", ""))
        self._pickled = self._pickled or (self.tokenizer.backend_tokenizer.to_str(), template)
        return _counter_of, self._pickled


class _BareTokenizer:
    """A tokenizer of the library tokenizers, called like one of transformers."""

    def __init__(self, serialized: str, chat_template: str) -> None:
        from tokenizers import Tokenizer

        self.chat_template = chat_template
        self._tokenizer = Tokenizer.from_str(serialized)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.added_tokens_decoder = self._tokenizer.get_added_tokens_decoder()

    def __call__(self, text: str | list[str], add_special_tokens: bool = True) -> dict[str, Any]:
        if isinstance(text, list):
            return {"input_ids": [self(one, add_special_tokens)["input_ids"] for one in text]}
        return {
            "input_ids": self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        }


def _counter_of(serialized: str, chat_template: str) -> TokenCounter:
    return TokenCounter(_BareTokenizer(serialized, chat_template))
