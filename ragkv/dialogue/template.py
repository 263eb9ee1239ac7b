"""Turns to text, as the model's chat template writes them, and that text's fixed parts.

A model without a template gets the turns one after the other, a blank line between them. Templates without a system
role get the system text at the beginning of the first user turn. Knows no LangChain.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ragkv.errors import InputError, UnsupportedError

_MARK = "\u27e6ragkv-here\u27e7"


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side said."""

    role: str  # "system", "user" or "assistant"
    text: str


class Template:
    """One tokenizer's chat template and the application's system text."""

    def __init__(self, tokenizer: Any | None, system: str) -> None:
        if tokenizer is None:
            raise InputError("A chat model needs a tokenizer, and the engine has none: build the engine with one.")
        self._tokenizer = tokenizer
        self._system = system
        self.is_chat = bool(getattr(tokenizer, "chat_template", None))
        self.opening = functools.lru_cache(64)(self._opening)  # the same few system texts come again and again
        self.own_opening = self._opening(system)  # of the engine's prefix, behind which its entries were encoded
        self.tail = self._render([Turn("user", _MARK)]).split(_MARK)[1] if self.is_chat else ""
        self.adds_space = self.encode("a") == self.encode(" a")  # each run of text gets a space in front

    def turns(self, turns: Sequence[Turn]) -> list[Turn]:
        """The turns as they are rendered: runs of one side merged, the application's system text if none is given."""
        merged: list[Turn] = []
        for turn in turns:
            if merged and merged[-1].role == turn.role:
                merged[-1] = replace(turn, text="\n".join(filter(None, (merged[-1].text, turn.text))))
            else:
                merged.append(turn)
        if self._system and not any(turn.role == "system" for turn in merged):
            merged.insert(0, Turn("system", self._system))
        return merged

    def render(self, turns: Sequence[Turn]) -> str:
        """The whole prompt of `turns`, up to where the answer begins; `InputError` if the template refuses them."""
        try:
            text = self._render(self._folded(turns))
        except Exception as error:  # the template's own language: it raises what it likes
            roles = ", ".join(turn.role for turn in turns)
            raise InputError(f"The model's chat template refuses these messages ({roles}): {error}.") from error
        if not text.endswith(self.tail):
            raise UnsupportedError(f"The model's chat template opens this answer otherwise than with {self.tail!r}.")
        return text

    def head(self, turns: Sequence[Turn]) -> str:
        """The text before what the last turn says."""
        return self.render([*turns[:-1], replace(turns[-1], text=_MARK)]).split(_MARK)[0]

    def next_head(self, turns: Sequence[Turn], answer: str) -> str:
        """The text before what the next user turn would say, had `turns` been answered so."""
        return self.head([*turns, Turn("assistant", answer), Turn("user", "")])

    def opening_ids(self, text: str) -> tuple[int, ...]:
        """The ids of an opening, with BOS where the template does not write it."""
        bos = () if self.is_chat or self._tokenizer.bos_token_id is None else (int(self._tokenizer.bos_token_id),)
        return bos + self.encode(text)

    def encode(self, text: str) -> tuple[int, ...]:
        """Text as ids, nothing added."""
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _opening(self, system: str) -> str:
        """The text before what the first user turn says."""
        if not self.is_chat:
            return system
        turns = [Turn("system", system)] if system else []
        if system and not self._has_system_role:
            return self._opening("") + system
        return self._render([*turns, Turn("user", _MARK)]).split(_MARK)[0]

    @functools.cached_property
    def _has_system_role(self) -> bool:
        try:
            return _MARK in self._render([Turn("system", _MARK), Turn("user", "a")])
        except Exception:  # as above
            return False

    def _folded(self, turns: Sequence[Turn]) -> list[Turn]:
        """The turns without a system role, where the template has none."""
        if not self.is_chat or self._has_system_role:
            return list(turns)
        system = "\n\n".join(turn.text for turn in turns if turn.role == "system")
        others = [turn for turn in turns if turn.role != "system"]
        if not system:
            return others
        if not others or others[0].role != "user":
            others.insert(0, Turn("user", ""))
        return [Turn("user", f"{system}\n\n{others[0].text}"), *others[1:]]

    def _render(self, turns: Sequence[Turn]) -> str:
        if not self.is_chat:
            return "\n\n".join(turn.text for turn in turns)
        messages = [{"role": turn.role, "content": turn.text} for turn in turns]
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text
