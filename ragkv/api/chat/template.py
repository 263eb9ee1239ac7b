"""Renders turns as text with the model's chat template, and gives the fixed parts of that text.

A model without a template gets the turns one after another with a blank line between them. For a template without a
system role, the system text goes to the beginning of the first user turn. This module knows no LangChain.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ragkv.errors import InputError, UnsupportedError
from ragkv.prompt.constraints import CallSyntax

from .tools import Tool, ToolCall, instructions, response_text, syntax_of

_MARK = "\u27e6ragkv-here\u27e7"


@dataclass(frozen=True, slots=True)
class Turn:
    """One side's contribution to a dialogue."""

    role: str  # "system", "user", "assistant", or "tool": the result of a call
    text: str
    calls: tuple[ToolCall, ...] = ()  # of an assistant
    call_id: str = ""  # of a tool: the call that this is the result of
    name: str = ""  # of a tool: its name


class Template:
    """One tokenizer's chat template and the application's system text."""

    def __init__(self, tokenizer: Any | None, system: str, tools: Sequence[Tool] = ()) -> None:
        """`tools` stand in every prompt, where the chat template puts them."""
        if tokenizer is None:
            raise InputError("A chat model needs a tokenizer, and the engine has none: build the engine with one.")
        self._tokenizer = tokenizer
        self._system, self._tools = system, list(tools)
        self.is_chat = bool(getattr(tokenizer, "chat_template", None))
        self.opening = functools.lru_cache(64)(self._opening)  # most requests have one of few system texts
        self.own_opening = self._opening(system)  # the engine's prefix, after which stored entries were encoded
        self.tail = self._render([Turn("user", _MARK)]).split(_MARK)[1] if self.is_chat else ""
        self.adds_space = self.encode("a") == self.encode(" a")  # the tokenizer puts a space before every text

    def with_tools(self, tools: Sequence[Tool]) -> "Template":
        """This template, with tools in every prompt."""
        return Template(self._tokenizer, self._system, tools) if tools else self

    @functools.cached_property
    def knows_tools(self) -> bool:
        """Whether the chat template writes tools into the prompt."""
        probe = {"type": "function", "function": {"name": _MARK, "description": "", "parameters": {"type": "object"}}}
        try:
            text = self._apply([{"role": "user", "content": "a"}], [probe]) if self.is_chat else ""
        except Exception:  # templates raise errors of any type
            return False
        return _MARK in text

    @property
    def call_syntax(self) -> CallSyntax:
        """The form in which the model writes calls."""
        return syntax_of(getattr(self._tokenizer, "chat_template", None), self.knows_tools)

    def turns(self, turns: Sequence[Turn]) -> list[Turn]:
        """The turns to render: adjacent turns of one role merged, the application's system text added if missing.

        Calls and results are text where the prompt has no tools, or the chat template knows none.
        """
        merged: list[Turn] = []
        for turn in turns if self._tools and self.knows_tools else filter(None, map(self._as_text, turns)):
            plain = turn.role != "tool" and not turn.calls
            if plain and merged and merged[-1].role == turn.role and not merged[-1].calls:
                merged[-1] = replace(turn, text="\n".join(filter(None, (merged[-1].text, turn.text))))
            else:
                merged.append(turn)
        if self._system and not any(turn.role == "system" for turn in merged):
            merged.insert(0, Turn("system", self._system))
        if self._tools and not self.knows_tools:
            return self._described(merged)
        return merged

    def _as_text(self, turn: Turn) -> Turn | None:
        """A turn without calls: they are text if the prompt describes tools, else left out. `None`: nothing is left."""
        if turn.role == "tool":
            return Turn("user", response_text(turn.text) if self._tools else turn.text)
        calls = [call.as_text for call in turn.calls] if self._tools else []
        if turn.calls and not (turn.text or calls):
            return None
        return Turn(turn.role, "\n".join(filter(None, (turn.text, *calls))))

    def _described(self, turns: list[Turn]) -> list[Turn]:
        """The turns, with the tools described at the end of the system text."""
        text = instructions(self._tools)
        if turns and turns[0].role == "system":
            return [Turn("system", f"{turns[0].text}\n\n{text}"), *turns[1:]]
        return [Turn("system", text), *turns]

    def render(self, turns: Sequence[Turn]) -> str:
        """The prompt of `turns`, up to the answer. Raises `InputError` if the template refuses the turns."""
        try:
            text = self._render(self._folded(turns))
        except Exception as error:  # templates raise errors of any type
            roles = ", ".join(turn.role for turn in turns)
            raise InputError(f"The model's chat template refuses these messages ({roles}): {error}.") from error
        if not text.endswith(self.tail):
            raise UnsupportedError(f"The model's chat template does not begin this answer with {self.tail!r}.")
        return text

    def head(self, turns: Sequence[Turn]) -> str:
        """The rendered text before the text of the last turn."""
        return self.render([*turns[:-1], replace(turns[-1], text=_MARK)]).split(_MARK)[0]

    def opening_ids(self, text: str) -> tuple[int, ...]:
        """The ids of an opening, with BOS if the template does not write it."""
        bos = () if self.is_chat or self._tokenizer.bos_token_id is None else (int(self._tokenizer.bos_token_id),)
        return bos + self.encode(text)

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of `text` without special tokens."""
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _opening(self, system: str) -> str:
        """The text before the text of the first user turn, with `system` as the system text."""
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
        """The turns, with the system text moved to the first user turn if the template has no system role."""
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
        return self._apply([_message(turn) for turn in turns], self._tools if self._tools and self.knows_tools else [])

    def _apply(self, messages: list[dict[str, Any]], tools: Sequence[Tool]) -> str:
        more = {"tools": [dict(tool) for tool in tools]} if tools else {}
        apply = self._tokenizer.apply_chat_template
        text: str = apply(messages, tokenize=False, add_generation_prompt=True, **more)
        return text


def _message(turn: Turn) -> dict[str, Any]:
    """A turn as chat templates read it: arguments are objects, not text."""
    message: dict[str, Any] = {"role": turn.role, "content": turn.text}
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments or "{}")},
            }
            for call in turn.calls
        ]
    if turn.role == "tool":
        message |= {"tool_call_id": turn.call_id, "name": turn.name}
    return message
