"""A request as the engine takes it: chunks, the text among them, the question; and the conversation it goes on from.

The prompt is rendered as text, known chunk texts are found in it, and what lies between them is tokenized piece by
piece. A chunk brings the ids it was ingested with. So at ratio 1 the model reads the very prompt that the template
writes, but for how words at the seams between pieces are cut into tokens.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ragkv.types import Chunk, Text

from .catalogue import Given
from .conversations import Conversation
from .dialogues import Dialogues
from .recognition import Found
from .template import Turn


@dataclass(frozen=True, slots=True)
class Request:
    """What was said, and the documents that came with it."""

    turns: tuple[Turn, ...]
    documents: tuple[Given, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the engine is asked."""

    turns: tuple[Turn, ...]  # as they are rendered
    prompt: str  # the whole prompt as text
    chunks: tuple[Chunk, ...]  # chunks and text among them, in prompt order
    question: tuple[int, ...]  # ids behind the last chunk
    conversation: Conversation | None
    recognition_s: float  # finding chunk texts
    layout_s: float  # all of it, recognition included

    @property
    def documents(self) -> tuple[Chunk, ...]:
        """The chunks alone."""
        return tuple(chunk for chunk in self.chunks if not isinstance(chunk, Text))


@dataclass(slots=True)
class _Pieces:
    """Chunks and text, as they are laid down one after the other."""

    dialogues: Dialogues
    metadata: Mapping[str, Mapping[str, Any]]
    laid: list[Chunk] = field(default_factory=list)

    def lay(self, text: str, found: Sequence[Found]) -> tuple[int, ...]:
        """Lay `text` down, with chunks where they were found in it; the ids behind the last one."""
        at, end = 0, self.dialogues.engine.config.prompt.chunk_end
        for one in found:
            if not text.startswith(end, one.stop):
                continue  # as it stands here it is not what was encoded
            self._text(text[at : one.start])
            self.laid.append(self.dialogues.catalogue.chunk(one.text, self.metadata.get(one.text)))
            at = one.stop + len(end)
        return self.dialogues.template.encode(text[at:])

    def _text(self, text: str) -> None:
        if self.dialogues.template.adds_space:
            text = text.removesuffix(" ")  # the chunk's first word brings it
        if ids := self.dialogues.template.encode(text) if text else ():
            self.laid.append(Text(ids, text))


def placed(turns: Sequence[Turn], documents: Sequence[Given], separator: str) -> tuple[Turn, ...]:
    """The turns, with every document whose text is nowhere in them put before what the last user turn says.

    `separator` stands behind each.
    """
    missing = [one for one in documents if not any(one.text in turn.text for turn in turns)]
    if not missing:
        return tuple(turns)
    last = next((n for n in reversed(range(len(turns))) if turns[n].role == "user"), None)
    *before, turn = turns if last is None else turns[: last + 1]
    behind = () if last is None else turns[last + 1 :]
    if last is None:
        before, turn = list(turns), Turn("user", "")
    text = "".join(one.text + separator for one in missing) + turn.text
    return (*before, replace(turn, text=text), *behind)


def file_answer(dialogues: Dialogues, asked: "Asked", answer: str) -> None:
    """File the conversation under what its next question would follow, if that is what the session has."""
    conversation = asked.conversation
    if conversation is None or not conversation.by_content:
        return
    head = dialogues.template.next_head(asked.turns, answer)
    if head.startswith(asked.prompt + answer):
        dialogues.conversations.file(head, conversation)
    else:
        dialogues.conversations.drop(conversation)


def lay_out(dialogues: Dialogues, request: Request, converse: bool, session_id: str | None = None) -> Asked:
    """Lay `request` out; with `converse` it goes on from an earlier one that said the same so far.

    With a `session_id` the session's turns stand for everything before what the last turn says. Where chunks are found
    in what opens the prompt there is no conversation: its next turn would open otherwise.
    """
    began = time.perf_counter()
    template = dialogues.template
    turns = template.turns(request.turns)
    prompt = template.render(turns)
    dialogues.catalogue.give(request.documents)
    metadata = {one.text: one.metadata for one in request.documents}
    looking = time.perf_counter()
    found = dialogues.catalogue.find(prompt)
    recognition_s = time.perf_counter() - looking
    stop = len(prompt) - len(template.tail)
    found = [one for one in found if one.stop <= stop]

    pieces = _Pieces(dialogues, metadata)
    opening, start = _opening(dialogues, turns, prompt, found, stop)
    conversation = None
    if session_id:
        conversation = dialogues.conversations.named(session_id, opening)
        start = len(template.head(turns)) if conversation.session.turns else start
    elif converse and template.is_chat and opening in (None, _whole_opening(dialogues, turns)):
        head = template.head(turns) if turns[-1].role == "user" else prompt
        conversation = dialogues.conversations.going_on(head, opening)
        start = start if conversation is None else len(head)
        conversation = conversation or dialogues.conversations.begin(opening)
    if opening is not None:
        pieces.laid.append(Text(template.opening_ids(opening), opening, opening=True))
    inside = [Found(one.start - start, one.stop - start, one.text) for one in found if one.start >= start]
    question = pieces.lay(prompt[start:stop], inside)
    return Asked(
        tuple(turns), prompt, tuple(pieces.laid), question, conversation, recognition_s, time.perf_counter() - began
    )


def _opening(
    dialogues: Dialogues, turns: Sequence[Turn], prompt: str, found: Sequence[Found], stop: int
) -> tuple[str | None, int]:
    """What opens the prompt, `None` for the application's prefix; and how many characters that are.

    An opening that is not the application's goes to where the first user turn begins, or to the first chunk before.
    """
    own = dialogues.template.own_opening
    if prompt.startswith(own):
        return None, len(own)
    whole = _whole_opening(dialogues, turns)
    first = next((one.start for one in found if one.start > 0), stop)
    start = min(first, len(whole)) if whole and prompt.startswith(whole) else first
    return prompt[:start], start


def _whole_opening(dialogues: Dialogues, turns: Sequence[Turn]) -> str:
    """The text before the first user turn."""
    return dialogues.template.opening("\n\n".join(turn.text for turn in turns if turn.role == "system"))
