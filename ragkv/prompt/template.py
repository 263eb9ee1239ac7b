"""The layout of a prompt as runs of token ids.

A chat template is rendered once, with marks in place of the messages, and split at the marks into
four fixed runs. `prompt.py` says how a prompt is made of runs.
"""

from dataclasses import dataclass, replace
from typing import Any

from ragkv.errors import UnsupportedModelError
from ragkv.runtime.outside import markup_ids, token_ids

_MARKS = ("\u27e6ragkv-1\u27e7", "\u27e6ragkv-2\u27e7", "\u27e6ragkv-3\u27e7")


@dataclass(frozen=True, slots=True)
class TemplateRuns:
    """The fixed ids around the variable parts of a prompt."""

    # the application's prefix: BOS, system text, start of the user turn
    before_documents: tuple[int, ...]
    after_question: tuple[int, ...] = ()  # the end of the user turn, the start of the answer
    after_answer: tuple[int, ...] = ()  # the end of the answer
    before_next_turn: tuple[int, ...] = ()  # the start of the next user turn


def template_runs(tokenizer: Any | None, bos_token_id: int | None, system: str) -> TemplateRuns:
    """The runs of a tokenizer's chat template; without a template BOS (if any) and system text."""
    if tokenizer is not None and getattr(tokenizer, "chat_template", None):
        return _split_template(tokenizer, system)
    if tokenizer is not None and tokenizer.bos_token_id is not None:
        bos_token_id = tokenizer.bos_token_id
    prefix = () if bos_token_id is None else (int(bos_token_id),)
    return TemplateRuns(prefix + (token_ids(tokenizer, system) if system else ()))


def _split_template(tokenizer: Any, system: str) -> TemplateRuns:
    """Raises `UnsupportedModelError` for a template that changes the messages."""
    try:
        runs = _around_marks(tokenizer, system)
    except Exception as error:  # a template may raise anything for roles it does not support
        if not system:
            raise UnsupportedModelError(
                "The tokenizer's chat template cannot be split around a question and an answer: "
                f"{error}. "
                "Set tokenizer.chat_template to None for the plain layout."
            ) from error
        runs = None
    if runs is None:  # a template without a system role: the system text starts the first user turn
        runs = _split_template(tokenizer, "")
        runs = replace(runs, before_documents=runs.before_documents + token_ids(tokenizer, system))
    return runs


def _around_marks(tokenizer: Any, system: str) -> TemplateRuns | None:
    """The runs, or `None` if the template drops the system text."""
    documents, answer, again = _MARKS
    opening = [{"role": "system", "content": system}] if system else []
    first = [*opening, {"role": "user", "content": documents}]
    prefix, tail = _parted(_render(tokenizer, first, True), documents)
    if system.strip() not in prefix:
        return None
    turns = [*first, {"role": "assistant", "content": answer}]
    _, closing = _parted(_render(tokenizer, turns, False), answer)
    _, rest = _parted(
        _render(tokenizer, [*turns, {"role": "user", "content": again}], True), answer
    )
    between, _ = _parted(rest, again)
    # the template formats a past answer differently from the last one
    if not between.startswith(closing):
        closing = ""
    return TemplateRuns(
        markup_ids(tokenizer, prefix),
        markup_ids(tokenizer, tail),
        markup_ids(tokenizer, closing),
        markup_ids(tokenizer, between[len(closing) :]),
    )


def _render(tokenizer: Any, messages: list[dict[str, str]], generation_prompt: bool) -> str:
    text: str = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=generation_prompt
    )
    return text


def _parted(text: str, mark: str) -> tuple[str, str]:
    """The text before and after the only `mark`."""
    if text.count(mark) != 1:
        raise ValueError(f"a message appears {text.count(mark)} times in {text!r:.200}")
    before, behind = text.split(mark)
    return before, behind
