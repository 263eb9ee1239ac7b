"""Laying out a prompt as runs of token ids.

A prompt is prefix, history, chunks, question and tail, concatenated as ids: nothing is decoded and tokenized again, no
separator, padding or rank number stands between chunks, so a chunk is the same run of ids wherever it stands. A chat
template is split once, by rendering it around marks, into the four runs between which our ids go. History stands before
the chunks, so that it is an exact prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ragkv.errors import InputError

_MARKS = ("\u27e6ragkv-1\u27e7", "\u27e6ragkv-2\u27e7", "\u27e6ragkv-3\u27e7")


@dataclass(frozen=True, slots=True)
class TemplateRuns:
    """The fixed ids around what changes."""

    before_documents: tuple[int, ...]  # the application's prefix: BOS, system text, the user turn's opening
    after_question: tuple[int, ...] = ()  # closes the user turn, opens the answer
    after_answer: tuple[int, ...] = ()  # closes the answer
    before_next_turn: tuple[int, ...] = ()  # opens the next user turn


def template_runs(tokenizer: Any | None, bos_token_id: int | None, system: str) -> TemplateRuns:
    """The runs of a tokenizer's chat template; without one the plain layout: BOS (if any) and system text."""
    if tokenizer is not None and getattr(tokenizer, "chat_template", None):
        return _split_template(tokenizer, system)
    if tokenizer is not None and tokenizer.bos_token_id is not None:
        bos_token_id = tokenizer.bos_token_id
    prefix = () if bos_token_id is None else (int(bos_token_id),)
    return TemplateRuns(prefix + (encode(tokenizer, system) if system else ()))


def encode(tokenizer: Any | None, text_or_ids: str | Sequence[int]) -> tuple[int, ...]:
    """Text as ids, without special tokens; ids pass through. Raises `InputError` for text without a tokenizer."""
    if not isinstance(text_or_ids, str):
        return tuple(int(token) for token in text_or_ids)
    if tokenizer is None:
        raise InputError(
            "Text was given, but the engine has no tokenizer: give token ids, or build it with a tokenizer."
        )
    return tuple(tokenizer(text_or_ids, add_special_tokens=False)["input_ids"])


def _split_template(tokenizer: Any, system: str) -> TemplateRuns:
    documents, answer, again = _MARKS
    opening = [{"role": "system", "content": system}] if system else []
    first = [*opening, {"role": "user", "content": documents}]
    try:
        one_turn = _render(tokenizer, first, True)
    except Exception:  # the template's own language: it raises what it likes on roles it does not know
        if not opening:
            raise
        return _system_in_user_turn(tokenizer, system)
    prefix, tail = one_turn.split(documents, 1)
    turns = [*first, {"role": "assistant", "content": answer}]
    closed = _render(tokenizer, turns, False)
    next_turn = _render(tokenizer, [*turns, {"role": "user", "content": again}], True)
    between = next_turn.split(answer, 1)[1].split(again, 1)[0]
    closing = closed.split(answer, 1)[1]
    if not between.startswith(closing):  # the template writes a past answer otherwise than a last one
        closing = ""
    return TemplateRuns(
        encode(tokenizer, prefix),
        encode(tokenizer, tail),
        encode(tokenizer, closing) if closing else (),
        encode(tokenizer, between[len(closing) :]),
    )


def _system_in_user_turn(tokenizer: Any, system: str) -> TemplateRuns:
    """For templates that know no system role: its text opens the first user turn."""
    runs = _split_template(tokenizer, "")
    return TemplateRuns(
        runs.before_documents + encode(tokenizer, system), runs.after_question, runs.after_answer, runs.before_next_turn
    )


def _render(tokenizer: Any, messages: list[dict[str, str]], generation_prompt: bool) -> str:
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
    return text
