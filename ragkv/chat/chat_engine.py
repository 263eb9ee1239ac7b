"""Turns a request's messages and documents into an engine's prompt: chunks, the text between them,
and the question.

The prompt is rendered as text, known chunk texts are found in it, and the pieces between them are
tokenized one by one. A chunk keeps the token ids it was ingested with, whatever is around it. So at
ratio 1 the model reads the prompt that the template writes. Only words at the seams between pieces
may be split into other tokens.
"""

import functools
import json
import logging
import sys
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace

from ragkv.config import MIB
from ragkv.engine import Engine
from ragkv.errors import PromptTooLongError, RagKVError
from ragkv.prompt import chunks_among
from ragkv.runtime import cached_by_bytes
from ragkv.sessions import Session
from ragkv.types import Answer, Chunk, Piece, Text, TokenEvent

from .catalogue import ChatDocument, ChunkCatalogue
from .chat_template import PlainMessage, Rendered, Template, results_at_end
from .finder import ConversationFinder, FoundConversation
from .passage_matcher import TextMatch, key_of
from .tools import CallFilter, FoundCalls, Tool, ToolCall, find_calls, response_text

log = logging.getLogger(__name__)

KEPT_BYTES = 16 * MIB  # of templates with tools that are kept
# Messages of more characters for each token of the context are not rendered, searched or tokenized.
CHARS_A_TOKEN = 16
LONG_PROMPT = 2_000  # A prompt of fewer characters may hold no documents.
NOTHING_KNOWN = (
    "A prompt of %d characters has none of the known texts, so none is reused; this is said "
    "once. Give the model the "
    "texts that the retriever returns, split in the same way (docs/langchain.md; of messages to "
    "a server: docs/api.md)."
)


@dataclass(frozen=True, slots=True)
class ChatInput:
    """The messages of a chat, and the documents that came with them."""

    messages: tuple[PlainMessage, ...]
    documents: tuple[ChatDocument, ...]
    tools: tuple[Tool, ...] = ()  # stand in the prompt


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt as the engine takes it."""

    messages: tuple[PlainMessage, ...]  # as rendered
    text: str  # the whole prompt
    pieces: tuple[Piece, ...]  # chunks and the text between them, in prompt order
    question: tuple[int, ...]  # token ids after the last chunk
    conversation: FoundConversation | None
    tools: tuple[Tool, ...] = ()

    @property
    def session(self) -> Session | None:
        """The session of its conversation."""
        return None if self.conversation is None else self.conversation.session

    @property
    def documents(self) -> tuple[Chunk, ...]:
        """The chunks without the text between them."""
        return chunks_among(self.pieces)


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """An answer in a chat, whose turn is saved."""

    answer: Answer
    found: FoundCalls  # its calls, and the text around them
    text: str  # as it was streamed: without the calls


class ChatEngine:
    """An engine with the chat template, the known chunk texts and its conversations."""

    def __init__(self, engine: Engine) -> None:
        """Raises `InputError` for an engine without a tokenizer."""
        self.engine = engine
        template = functools.partial(Template, engine.tokenizer, engine.config.prompt.system)
        self.template = template()
        self._template_of = cached_by_bytes(lambda tools: template(json.loads(tools)), KEPT_BYTES)
        self.catalogue = ChunkCatalogue(engine)
        self.conversations = ConversationFinder(engine)
        self._has_warned = False  # of a prompt without a known text

    def template_for(self, tools: Sequence[Tool]) -> Template:
        """The chat template with `tools` in every prompt."""
        return (
            self._template_of(json.dumps(list(tools), sort_keys=False)) if tools else self.template
        )

    @property
    def separator(self) -> str:
        """The text after a document that is put into the prompt."""
        # without one, two texts could become one word
        return self.engine.config.prompt.separator or " "

    def build_prompt(
        self, given: ChatInput, find_conversation: bool = True, session: Session | None = None
    ) -> ChatPrompt:
        """The prompt of `given`. With `find_conversation`, it continues the conversation that its
        messages repeat.

        With a `session`, the session's own messages replace those before the last turn. A
        prompt with chunks in its opening has no conversation: the next turn would open differently.
        """
        self._check_length(given.messages)
        messages = given.messages
        conversation = None
        if session is not None:
            conversation = self.conversations.named(session)
            if given.tools:
                messages = _as_question(messages, conversation.turns)
        template = self.template_for(given.tools)
        rendered = template.render(template.messages(messages))
        matches = self._known_texts(rendered, given.documents)
        opening, start = self._opening(rendered, matches)
        if session is not None:
            head = template.head(rendered.messages)
        elif find_conversation and template.is_chat and opening in (None, rendered.system_opening):
            head = rendered.head
            conversation = self.conversations.resume(head)
        if conversation is not None and conversation.turns:
            start = len(head)
        documents = self.catalogue.documents_of(matches, given.documents)
        pieces, question = self._split(rendered, start, matches, documents)
        if opening is not None:
            ids = template.bos_ids + rendered.token_ids(0, len(opening))
            pieces.insert(0, Text(ids, opening, opening=True))
        return ChatPrompt(
            rendered.messages, rendered.text, tuple(pieces), question, conversation, given.tools
        )

    def follow(
        self,
        prompt: ChatPrompt,
        events: Generator[object, None, None],
        tools: Sequence[str] = (),
        only_calls: bool = False,
    ) -> Generator[TokenEvent | ChatAnswer, None, None]:
        """The tokens of an answer to `prompt`, and at last the answer, whose turn is then saved.

        `events` are the engine's. `tools` names the tools that may be called: text that may be a
        call is held back until it is certain. With `only_calls` the answer is nothing but calls. A
        turn without an answer is deleted.
        """
        filtered = CallFilter(tools, only_calls)
        answer: Answer | None = None
        try:
            with closing(events):
                for event in events:
                    if isinstance(event, TokenEvent):
                        yield replace(event, text=filtered.add(event.text))
                    elif isinstance(event, Answer):
                        answer = event  # handed out after the loop, when the session is free again
        finally:
            if answer is None:
                self.delete_turn(prompt)
        assert answer is not None
        found = find_calls(answer.text, tools, answer.finish_reason)
        try:
            answer = self.save_turn(prompt, answer, found.text, found.calls)
        except RagKVError as error:  # the answer is complete, whatever becomes of its turn
            log.warning("A turn was not saved: %s", error)
            answer = answer.with_notes(f"this turn is not stored for the next one: {error}")
            with suppress(RagKVError):
                self.delete_turn(prompt)
        if rest := found.behind(filtered.sent):
            yield TokenEvent(rest, None)
        yield ChatAnswer(answer, found, filtered.sent + rest)

    def save_turn(
        self,
        prompt: ChatPrompt,
        answer: Answer,
        text: str | None = None,
        calls: Sequence[ToolCall] = (),
    ) -> Answer:
        """Save the conversation for its next question, if the session holds what the next prompt
        will repeat.

        The next prompt has `text` and `calls` of the answer; `None`: all of it is text. Returns the
        answer; its report has a note if the conversation could not be saved.
        """
        if prompt.conversation is None or not prompt.conversation.by_content:
            return answer
        said = PlainMessage("assistant", answer.text if text is None else text, tuple(calls))
        template = self.template_for(prompt.tools)
        head = template.next_head([*prompt.messages, *template.messages([said])[-1:]])
        if head is not None and head.startswith(prompt.text + answer.text):
            return answer.with_notes(*self.conversations.save(head, prompt.conversation))
        self.delete_turn(prompt)
        return answer

    def delete_turn(self, prompt: ChatPrompt) -> None:
        """Delete a turn without an answer, or that no later request can continue. A named session
        stays as it was.
        """
        if prompt.conversation is not None and prompt.conversation.by_content:
            prompt.conversation.session.delete()

    def delete_traces(self) -> None:
        """Delete what requests left behind: forms of passages, and conversations without a name."""
        self.catalogue.delete_forms()
        self.conversations.delete_all()

    def _check_length(self, messages: Sequence[PlainMessage]) -> None:
        limit = CHARS_A_TOKEN * (self.engine.model.adapter.context_length or sys.maxsize)
        if (chars := sum(len(message.text) for message in messages)) > limit:
            raise PromptTooLongError(
                f"The messages have {chars} characters; with this model at most {limit} are read."
            )

    def _known_texts(
        self, rendered: Rendered, documents: Sequence[ChatDocument]
    ) -> list[TextMatch]:
        """Where known texts and the request's documents stand in the prompt, in order."""
        found = self.catalogue.find(rendered.text, [document.text for document in documents])
        matches = [match for match in found if match.stop <= rendered.stop]
        is_odd = len(rendered.text) >= LONG_PROMPT and self.catalogue.passages.chars
        if is_odd and not matches and not self._has_warned:
            self._has_warned = True
            log.warning(NOTHING_KNOWN, len(rendered.text))
        return matches

    def _opening(self, rendered: Rendered, matches: Sequence[TextMatch]) -> tuple[str | None, int]:
        """The opening of the prompt, `None` for the application's own prefix; and its length in
        characters.

        Any other opening ends where the first user turn begins, or at the first chunk if that comes
        earlier.
        """
        text = rendered.text
        own = self.template.own_opening
        if text.startswith(own):
            return None, len(own)
        opening = rendered.system_opening
        first = next((match.start for match in matches if match.start > 0), rendered.stop)
        start = min(first, len(opening)) if opening and text.startswith(opening) else first
        return text[:start], start

    def _split(
        self,
        rendered: Rendered,
        start: int,
        matches: Sequence[TextMatch],
        documents: Sequence[ChatDocument | None],
    ) -> tuple[list[Piece], tuple[int, ...]]:
        """The chunks from `start` on and the text between them, in order; and the ids behind the
        last chunk.

        Behind a chunk the separator is tokenized apart, so that a chat has the ids of the same
        question to `Engine.answer`.
        """
        pieces: list[Piece] = []
        at = start
        for match, document in zip(matches, documents, strict=True):
            if match.start < start:
                continue
            end = match.start
            if self.template.adds_space and rendered.text[at:end].endswith(" "):
                end -= 1  # the tokenizer puts this space before the chunk's first word by itself
            if ids := rendered.token_ids(at, end, self.separator if pieces else ""):
                pieces.append(Text(ids, rendered.text[at:end]))
            at = match.stop
            pieces.append(self.catalogue.chunk(match, document))
        return pieces, rendered.token_ids(at, rendered.stop, self.separator if pieces else "")


def _as_question(messages: Sequence[PlainMessage], turns: int) -> tuple[PlainMessage, ...]:
    """The messages, with the results of tools at their end as one of the user: a stored history
    goes on with one.

    After earlier turns, the messages that the history replaces are left out: a template may refuse
    a user's message after their calls. Before the first turn such messages keep their results.
    """
    if not (results := results_at_end(messages)):
        return tuple(messages)
    text = "\n".join(response_text(message.text) for message in messages[-results:])
    before = messages[:-results]
    if turns:
        before = [message for message in before if message.role == "system"]
    elif any(message.calls for message in before):
        return tuple(messages)
    return (*before, PlainMessage("user", text))


def insert_documents(
    messages: Sequence[PlainMessage], documents: Sequence[ChatDocument], separator: str
) -> tuple[PlainMessage, ...]:
    """The messages, with the documents whose text is in none of them, as whole words, put before
    the text of the last user message.

    `separator` follows each inserted document.
    """
    # their words, too: "art" is a part of "department"
    said = [(message.text, f"\n{key_of(message.text)}") for message in messages if documents]
    missing = [
        document
        for document in documents
        if not any(
            document.text in text and f"\n{key_of(document.text)}" in key for text, key in said
        )
    ]
    if not missing:
        return tuple(messages)
    inserted = "".join(document.text + separator for document in missing)
    made = list(messages)
    for number in reversed(range(len(made))):
        if made[number].role in ("user", "tool"):
            made[number] = replace(made[number], text=inserted + made[number].text)
            return tuple(made)
    return (*made, PlainMessage("user", inserted))
