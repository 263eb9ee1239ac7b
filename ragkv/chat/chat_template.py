"""Renders messages as text with the model's chat template, and gives the fixed parts of that text.

A model without a template gets the messages one after another with a blank line between them. For a
template without a system role, the system text goes to the beginning of the first user message.
Messages and tools are text from outside. Where they write a control token, the rendered text has a
cut. This module knows no LangChain.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import Any

from ragkv.config import MIB
from ragkv.errors import InputError, UnsupportedError
from ragkv.prompt.constraints import CallSyntax
from ragkv.runtime import cached_by_bytes
from ragkv.runtime.outside import boundaries_between, markup_ids, pieces_of

from .tools import Tool, ToolCall, instructions, response_text, syntax_of

KEPT_BYTES = MIB  # of openings that are kept
_MARK = "\u27e6ragkv-here\u27e7"
_PROBE_ID = "ragkv0000"  # nine letters and digits: some chat templates accept no other ids
# A boundary while messages are rendered: a code point that stands for no character.
_BOUNDARY = "\ufdd1"


@dataclass(frozen=True, slots=True)
class PlainMessage:
    """One message of a chat as plain text, with calls of tools."""

    role: str  # "system", "user", "assistant", or "tool": the result of a call
    text: str
    calls: tuple[ToolCall, ...] = ()  # of an assistant
    call_id: str = ""  # of a tool: the call that this is the result of
    name: str = ""  # of a tool: its name


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as text, and the messages that it was made of."""

    template: "Template"
    messages: tuple[PlainMessage, ...]
    text: str
    # offsets at which the text is tokenized apart: text from outside is no control token
    boundaries: tuple[int, ...] = ()

    @property
    def stop(self) -> int:
        """Where the last message ends, and the template goes on with the answer."""
        return len(self.text) - len(self.template.tail)

    @property
    def head(self) -> str:
        """The text before the last question: a user's turn, or the results of tools.

        A stored conversation ends where a user's turn begins. Templates that write results inside a
        user's turn continue it.
        """
        if results := results_at_end(self.messages):
            head = self.template.next_head(self.messages[:-results])
            if head is not None and self.text.startswith(head):
                return head
            return self.template.head(self.messages)
        is_question = self.messages[-1].role == "user"
        return self.template.head(self.messages) if is_question else self.text

    @property
    def system_opening(self) -> str:
        """The text before the first user turn."""
        systems = [message.text for message in self.messages if message.role == "system"]
        return self.template.opening("\n\n".join(systems))

    def token_ids(self, start: int, stop: int, apart: str = "") -> tuple[int, ...]:
        """The ids of a part of the text. If it begins with `apart`, that is tokenized by itself."""
        part = self.text[start:stop]
        boundaries = {at - start for at in self.boundaries if start < at < stop}
        if apart and part.startswith(apart):
            boundaries |= {len(apart)} - {len(part)}
        return self.template.token_ids(part, sorted(boundaries))


class Template:
    """One tokenizer's chat template and the application's system text."""

    def __init__(self, tokenizer: Any | None, system: str, tools: Sequence[Tool] = ()) -> None:
        """`tools` stand in every prompt, where the chat template puts them."""
        if tokenizer is None:
            raise InputError(
                "A chat model needs a tokenizer, and the engine has none: build the engine with "
                "one."
            )
        self._tokenizer = tokenizer
        self._system = system
        self._tools = list(tools)
        self.is_chat = bool(getattr(tokenizer, "chat_template", None))
        # most requests have one of few system texts
        self.opening = cached_by_bytes(self._opening, KEPT_BYTES)
        # the engine's prefix, after which stored entries were encoded
        self.own_opening = self._opening(system)
        self.tail = (
            self._render([PlainMessage("user", _MARK)]).split(_MARK)[1] if self.is_chat else ""
        )
        # the tokenizer puts a space before every text
        self.adds_space = self.token_ids("a") == self.token_ids(" a")

    @functools.cached_property
    def knows_tools(self) -> bool:
        """Whether the chat template writes tools into the prompt, and ends a prompt after a result
        as after a question.

        The engine ends every prompt alike. Mistral's templates write nothing after a result, so for
        them tools are described, and calls and results are text.
        """
        probe = {
            "type": "function",
            "function": {"name": _MARK, "description": "", "parameters": {"type": "object"}},
        }
        question = PlainMessage("user", "a")
        call = PlainMessage("assistant", "", (ToolCall(_MARK, "{}", _PROBE_ID),))
        result = PlainMessage("tool", "a", call_id=_PROBE_ID, name=_MARK)

        def written(*messages: PlainMessage) -> str:
            return self._apply([_message(message) for message in messages], [probe])

        try:
            if not (self.is_chat and _MARK in written(question)):
                return False
            tail = written(PlainMessage("user", _MARK)).rpartition(_MARK)[2]
            return written(question, call, result).endswith(tail)
        except Exception:  # templates raise errors of any type
            return False

    @property
    def call_syntax(self) -> CallSyntax:
        """The form in which the model writes calls."""
        return syntax_of(getattr(self._tokenizer, "chat_template", None), self.knows_tools)

    def messages(self, messages: Sequence[PlainMessage]) -> list[PlainMessage]:
        """The messages to render: adjacent messages of one role merged, the application's system
        text added if missing.

        Calls and results are text where the prompt has no tools, or the chat template knows none.
        """
        merged: list[PlainMessage] = []
        if not (self._tools and self.knows_tools):
            messages = list(filter(None, map(self._as_text, messages)))
        for message in messages:
            plain = message.role != "tool" and not message.calls
            if plain and merged and merged[-1].role == message.role and not merged[-1].calls:
                merged[-1] = replace(
                    message, text="\n".join(filter(None, (merged[-1].text, message.text)))
                )
            else:
                merged.append(message)
        if self._system and not any(message.role == "system" for message in merged):
            merged.insert(0, PlainMessage("system", self._system))
        if self._tools and not self.knows_tools:
            return self._described(merged)
        return merged

    def _as_text(self, message: PlainMessage) -> PlainMessage | None:
        """A message without calls: they are text if the prompt describes tools. `None`: nothing is
        left.
        """
        if message.role == "tool":
            return PlainMessage(
                "user", response_text(message.text) if self._tools else message.text
            )
        calls = [call.as_text for call in message.calls] if self._tools else []
        if message.calls and not (message.text or calls):
            return None
        return PlainMessage(message.role, "\n".join(filter(None, (message.text, *calls))))

    def _described(self, messages: list[PlainMessage]) -> list[PlainMessage]:
        """The messages, with the tools described at the end of the system text."""
        text = instructions(self._tools)
        if messages and messages[0].role == "system":
            return [PlainMessage("system", f"{messages[0].text}\n\n{text}"), *messages[1:]]
        return [PlainMessage("system", text), *messages]

    def render(self, messages: Sequence[PlainMessage]) -> Rendered:
        """The prompt of `messages`, up to the answer. Raises `InputError` if the template refuses
        the messages.
        """
        try:
            text = self._render(self._folded(messages))
        except Exception as error:  # templates raise errors of any type
            roles = ", ".join(message.role for message in messages)
            raise InputError(
                f"The model's chat template refuses these messages ({roles}): {error}."
            ) from error
        if not text.endswith(self.tail):
            raise UnsupportedError(
                f"The model's chat template does not begin this answer with {self.tail!r}."
            )
        pieces = text.split(_BOUNDARY)
        return Rendered(self, tuple(messages), "".join(pieces), boundaries_between(pieces))

    def head(self, messages: Sequence[PlainMessage]) -> str:
        """The rendered text before the text of the last message."""
        return self.render([*messages[:-1], replace(messages[-1], text=_MARK)]).text.split(_MARK)[0]

    def next_head(self, messages: Sequence[PlainMessage]) -> str | None:
        """The rendered text up to the text of a user's message after `messages`; `None` if the
        template refuses one there, as some do after a call.
        """
        try:
            return self.head([*messages, PlainMessage("user", "")])
        except InputError:
            return None

    @property
    def bos_ids(self) -> tuple[int, ...]:
        """What an opening begins with that the template does not write."""
        bos = self._tokenizer.bos_token_id
        return () if self.is_chat or bos is None else (int(bos),)

    def token_ids(self, text: str, boundaries: Sequence[int] = ()) -> tuple[int, ...]:
        """The ids of rendered text, tokenized apart at `boundaries`, without special tokens around
        it.
        """
        bounds = (0, *boundaries, len(text))
        return tuple(
            token
            for start, end in pairwise(bounds)
            for token in markup_ids(self._tokenizer, text[start:end])
        )

    def _opening(self, system: str) -> str:
        """The text before the text of the first user message, with `system` as the system text."""
        if not self.is_chat:
            return system
        messages = [PlainMessage("system", system)] if system else []
        if system and not self._has_system_role:
            return self._opening("") + system
        return (
            self._render([*messages, PlainMessage("user", _MARK)])
            .split(_MARK)[0]
            .replace(_BOUNDARY, "")
        )

    @functools.cached_property
    def _has_system_role(self) -> bool:
        try:
            return _MARK in self._render([PlainMessage("system", _MARK), PlainMessage("user", "a")])
        except Exception:  # templates raise errors of any type
            return False

    def _folded(self, messages: Sequence[PlainMessage]) -> list[PlainMessage]:
        """The messages, with the system text moved to the first user message if the template has no
        system role.
        """
        if not self.is_chat or self._has_system_role:
            return list(messages)
        system = "\n\n".join(message.text for message in messages if message.role == "system")
        others = [message for message in messages if message.role != "system"]
        if not system:
            return others
        if not others or others[0].role != "user":
            others.insert(0, PlainMessage("user", ""))
        return [PlainMessage("user", f"{system}\n\n{others[0].text}"), *others[1:]]

    def _render(self, messages: Sequence[PlainMessage]) -> str:
        if not self.is_chat:
            return "\n\n".join(self._outside(message.text) for message in messages)
        return self._apply(
            [_message(message) for message in messages],
            self._tools if self._tools and self.knows_tools else [],
        )

    def _apply(self, messages: list[dict[str, Any]], tools: Sequence[Tool]) -> str:
        more = {"tools": self._outside(tools)} if tools else {}
        apply = self._tokenizer.apply_chat_template
        text: str = apply(
            self._outside(messages), tokenize=False, add_generation_prompt=True, **more
        )
        return text

    def _outside(self, value: Any) -> Any:
        """A JSON value from outside, with boundaries in its texts."""
        if isinstance(value, str):
            return _BOUNDARY.join(pieces_of(self._tokenizer, value.replace(_BOUNDARY, "")))
        if isinstance(value, Mapping):
            return {self._outside(name): self._outside(inner) for name, inner in value.items()}
        return (
            [self._outside(inner) for inner in value] if isinstance(value, list | tuple) else value
        )


def results_at_end(messages: Sequence[PlainMessage]) -> int:
    """How many results of tools stand at the end of the messages."""
    return sum(1 for _ in takewhile(lambda message: message.role == "tool", reversed(messages)))


def _message(message: PlainMessage) -> dict[str, Any]:
    """A message as chat templates read it: arguments are objects, not text."""
    fields: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments or "{}")},
            }
            for call in message.calls
        ]
    if message.role == "tool":
        fields |= {"tool_call_id": message.call_id, "name": message.name}
    return fields
