"""Checks arguments of callers, and tokenizes texts from outside without control tokens, so that no
document or message can forge a turn.

A tokenizer makes one token of a text such as "<|im_start|>", wherever it occurs. In text from
outside, such a text is cut after its first character, and the parts are tokenized separately. A
text without control tokens keeps its ids.
"""

import functools
import operator
import re
import unicodedata
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

from ragkv.errors import InputError

_IN_WORDS = {
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "NoneType": "None",
    "Iterable": "a list",
}


def check_kind(name: str, value: object, *kinds: type) -> None:
    """Raise `InputError` unless what a caller gave as `name` is of one of `kinds`."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(_IN_WORDS.get(kind.__name__, kind.__name__) for kind in kinds)
        raise InputError(f"{name} must be {wanted}, not {value!r:.80}.")


def check_words(name: str, value: object) -> None:
    """Raise `InputError` unless what a caller gave as `name` is a text that is not blank."""
    check_kind(name, value, str)
    if not str(value).strip():
        raise InputError(f"The {name} is empty. Give at least one word.")


def markup_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """The ids of what a chat template writes, control tokens included; without special tokens
    around it.
    """
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def token_ids(tokenizer: Any | None, text: str | Sequence[int]) -> tuple[int, ...]:
    """The ids of `text`, without special tokens around it and control tokens in it; ids as they
    are.

    Raises `InputError` for anything else, and for text without a tokenizer.
    """
    if not isinstance(text, str):
        try:
            return tuple(operator.index(token) for token in text)
        except TypeError as error:
            raise InputError(
                f"Give text or a sequence of integer token ids, not {text!r:.80}."
            ) from error
    if tokenizer is None:
        raise InputError(
            "Text was given, but the engine has no tokenizer. Give token ids, or build the "
            "engine with a tokenizer."
        )
    pieces = pieces_of(tokenizer, text)
    if len(pieces) == 1:
        return markup_ids(tokenizer, text)
    return tuple(chain.from_iterable(tokenizer(pieces, add_special_tokens=False)["input_ids"]))


def pieces_of(tokenizer: Any, text: str) -> list[str]:
    """`text` in pieces without a control token; mostly it is one."""
    control = _control_tokens(tokenizer, str(getattr(tokenizer, "chat_template", "")))
    if control is None:
        return [text]
    normal = text if text.isascii() else unicodedata.normalize("NFKC", text)
    if normal != text and len(control.findall(text)) < len(control.findall(normal)):
        text = normal  # a tokenizer that normalizes would make control tokens of another writing
    boundaries = [match.start() + 1 for match in control.finditer(text)]
    return [text[start:end] for start, end in pairwise((0, *boundaries, len(text)))]


def boundaries_between(pieces: list[str]) -> tuple[int, ...]:
    """Where the pieces behind the first one begin in their joined text."""
    return tuple(accumulate(map(len, pieces[:-1])))


@functools.lru_cache(16)
def _control_tokens(tokenizer: Any, chat_template: str) -> re.Pattern[str] | None:
    """Matches where a control token begins: a special token, or an added one that the chat template
    writes.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    found = {token.content for token in added if token.special or token.content in chat_template}
    # one character cannot be cut
    control = [content for content in found if len(content.strip()) > 1]
    # most text has none of them: it is faster
    first = "".join(sorted({re.escape(content[0]) for content in control}))
    return re.compile(rf"(?=[{first}])(?={'|'.join(map(re.escape, control))})") if control else None
