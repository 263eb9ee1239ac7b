"""A request as the engine takes it: chunks, the text among them, the question; and the conversation it goes on from.

The prompt is rendered as text, known chunk texts are found in it, and what lies between them is tokenized piece by
piece. A chunk brings the ids it was ingested with. So at ratio 1 the model reads the very prompt that the template
writes, but for how words at the seams between pieces are cut into tokens.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ragkv.types import Chunk, Text

from .conversations import Conversation
from .messages import Request
from .recognition import Found
from .registry import Shared
from .template import Turn


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

    shared: Shared
    metadata: Mapping[str, Mapping[str, Any]]
    laid: list[Chunk] = field(default_factory=list)

    def lay(self, text: str, found: Sequence[Found]) -> tuple[int, ...]:
        """Lay `text` down, with chunks where they were found in it; the ids behind the last one."""
        at, end = 0, self.shared.engine.config.prompt.chunk_end
        for one in found:
            if not text.startswith(end, one.stop):
                continue  # as it stands here it is not what was encoded
            self._text(text[at : one.start])
            self.laid.append(self.shared.catalogue.chunk(one.text, self.metadata.get(one.text)))
            at = one.stop + len(end)
        return self.shared.template.encode(text[at:])

    def _text(self, text: str) -> None:
        if self.shared.template.adds_space:
            text = text.removesuffix(" ")  # the chunk's first word brings it
        if ids := self.shared.template.encode(text) if text else ():
            self.laid.append(Text(ids, text))


def asked(shared: Shared, request: Request, converse: bool, session_id: str | None = None) -> Asked:
    """Lay `request` out; with `converse` it goes on from an earlier one that said the same so far.

    With a `session_id` the session's turns stand for everything before what the last turn says. Where chunks are found
    in what opens the prompt there is no conversation: its next turn would open otherwise.
    """
    began = time.perf_counter()
    template = shared.template
    turns = template.turns(request.turns)
    prompt = template.render(turns)
    shared.catalogue.give(request.documents)
    metadata = {one.text: one.metadata for one in request.documents}
    looking = time.perf_counter()
    found = shared.catalogue.find(prompt)
    recognition_s = time.perf_counter() - looking
    stop = len(prompt) - len(template.tail)
    found = [one for one in found if one.stop <= stop]

    pieces = _Pieces(shared, metadata)
    opening, start = _opening(shared, turns, prompt, found, stop)
    conversation = None
    if session_id:
        conversation = shared.conversations.named(session_id, opening)
        start = len(template.head(turns)) if conversation.session.turns else start
    elif converse and template.is_chat and opening in (None, _whole_opening(shared, turns)):
        head = template.head(turns) if turns[-1].role == "user" else prompt
        conversation = shared.conversations.going_on(head, opening)
        start = start if conversation is None else len(head)
        conversation = conversation or shared.conversations.begin(opening)
    if opening is not None:
        pieces.laid.append(Text(template.opening_ids(opening), opening, opening=True))
    inside = [Found(one.start - start, one.stop - start, one.text) for one in found if one.start >= start]
    question = pieces.lay(prompt[start:stop], inside)
    return Asked(
        tuple(turns), prompt, tuple(pieces.laid), question, conversation, recognition_s, time.perf_counter() - began
    )


def _opening(
    shared: Shared, turns: Sequence[Turn], prompt: str, found: Sequence[Found], stop: int
) -> tuple[str | None, int]:
    """What opens the prompt, `None` for the application's prefix; and how many characters that are.

    An opening that is not the application's goes to where the first user turn begins, or to the first chunk before.
    """
    own = shared.template.own_opening
    if prompt.startswith(own):
        return None, len(own)
    whole = _whole_opening(shared, turns)
    first = next((one.start for one in found if one.start > 0), stop)
    start = min(first, len(whole)) if whole and prompt.startswith(whole) else first
    return prompt[:start], start


def _whole_opening(shared: Shared, turns: Sequence[Turn]) -> str:
    """The text before the first user turn."""
    return shared.template.opening("\n\n".join(turn.text for turn in turns if turn.role == "system"))
