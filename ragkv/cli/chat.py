"""`ragkv chat`: a conversation on the command line, over the documents of a home if there are any."""

import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.types import Answer, Chunk

from . import output
from .options import (
    SEARCH,
    EngineOptions,
    MaxNewTokens,
    Ratio,
    Retriever,
    SelectorName,
    Temperature,
    Where,
    answer_options,
    metadata_filter,
    with_engine_options,
)
from .output import console, print_note

if TYPE_CHECKING:
    from ragkv.conversations import Session
    from ragkv.engine import Engine
    from ragkv.prompt import AnswerOptions
    from ragkv.retrieval.rag import Rag

HELP = "/reset forgets the turns and deletes their KV, /stats shows what is stored, /quit leaves."


@with_engine_options
def chat(
    options: EngineOptions,
    session: Annotated[str | None, typer.Option(help="Id of a conversation to continue; it is kept.")] = None,
    k: Annotated[
        int,
        typer.Option("--k", "-k", min=0, rich_help_panel=SEARCH, help="Passages to retrieve for each turn; 0: none."),
    ] = 6,
    retriever: Retriever = None,
    where: Where = None,
    ratio: Ratio = None,
    selector: SelectorName = None,
    temperature: Temperature = 0.0,
    max_new_tokens: MaxNewTokens = 64,
) -> None:
    """Chat: each line is a turn, answered from the passages it retrieves. /reset, /stats, /quit."""
    retrieval = TurnRetrieval(k, retriever, metadata_filter(where))
    answering = answer_options(ratio, selector, temperature, max_new_tokens)
    with ExitStack() as stack:
        rag = stack.enter_context(options.rag()) if (options.home / "index").is_dir() else None
        engine = rag.engine if rag is not None else stack.enter_context(options.engine())
        if rag is None:
            print_note(f"nothing was ingested at {options.home}: the model answers without documents.")
        chat = Chat(engine, rag, engine.session(session or f"chat-{uuid.uuid4().hex}"), retrieval, answering)
        if chat.session.turns:
            console.print(f"{chat.session.turns} turns so far.", style="dim")
        try:
            for line in _lines():
                if not chat.execute(line):
                    break
        except KeyboardInterrupt:  # at the prompt, or during an answer, whose turn is then not kept
            console.print()
        if session is None:
            chat.session.delete()


def _lines() -> Iterator[str]:
    """The lines of standard input, with a prompt if it is a terminal."""
    while True:
        if sys.stdin.isatty():
            console.print(">", style="bold", end=" ")
            sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            return
        yield line.strip()


@dataclass(frozen=True, slots=True)
class TurnRetrieval:
    """How the passages of every turn are retrieved."""

    k: int
    retriever: str | None
    where: dict[str, Any]


@dataclass
class Chat:
    """One conversation."""

    engine: "Engine"
    rag: "Rag | None"
    session: "Session"
    retrieval: TurnRetrieval
    options: "AnswerOptions"
    last: Answer | None = None

    def execute(self, line: str) -> bool:
        """Execute a command or answer a question. Returns whether the chat continues."""
        if line == "/quit":
            return False
        if line == "/reset":
            self.session.reset()
            self.last = None
            console.print("The turns are forgotten; the conversation begins anew.", style="dim")
        elif line == "/stats":
            self._stats()
        elif line.startswith("/"):
            print_note(f"there is no command {line.split()[0]}. {HELP}")
        elif line:
            self._answer(line)
        return True

    def _answer(self, question: str) -> None:
        chunks, sources = self._retrieve(question)
        stream = self.engine.stream(question, chunks, self.session, **self.options)
        try:
            for event in stream:
                if isinstance(event, Answer):
                    self.last = event
                else:
                    console.print(event.text, end="")
                    console.file.flush()
        finally:
            stream.close()  # type: ignore[attr-defined]  # a generator; closed early, its turn is not kept
            console.print()
        assert self.last is not None
        for number, source in enumerate(sources):
            console.print(f" [{number + 1}] {source}", style="dim")
        output.print_reuse(self.last)

    def _retrieve(self, question: str) -> tuple[Sequence[Chunk], list[str]]:
        """The passages for a turn, and their sources."""
        how = self.retrieval
        if self.rag is None or not how.k:
            return (), []
        hits = self.rag.retrieve(question, how.k, retriever=how.retriever, where=how.where)
        return [self.rag.chunk(hit.passage) for hit in hits], [output.place(hit.passage) for hit in hits]

    def _stats(self) -> None:
        self.engine.flush()
        info = next(
            (one for one in self.engine.conversations.list() if one.session_id == self.session.session_id), None
        )
        if info is None:
            console.print("No turns yet.", style="dim")
        else:
            stored = output.size(info.stored_bytes)
            console.print(f"{info.turns} turns, {info.tokens} tokens of history, {stored} of KV stored", style="dim")
        if self.last is not None:
            console.print(f"last turn: {output.counts(self.last.reuse)}", style="dim")
        for tier in self.engine.stats().store.tiers:
            used, capacity = output.size(tier.used_bytes), output.size(tier.capacity_bytes)
            console.print(f"{tier.kind.value}: {tier.entries} entries, {used} of {capacity}", style="dim")
