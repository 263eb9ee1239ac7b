"""`ragkv chat`: a conversation on the command line, over the documents of a home if there are any.
An engine of this process answers, or the server that has the home.
"""

import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from ragkv.runtime import counted
from ragkv.types import Answer, Chunk, TokenEvent

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
from .running_server import request, served_answer, server_of

if TYPE_CHECKING:
    from ragkv.engine import Engine
    from ragkv.prompt import AnswerOptions
    from ragkv.rag import Rag
    from ragkv.retrieval import Hit
    from ragkv.runtime.server_file import ServerAddress
    from ragkv.sessions import Session

HELP = "/reset forgets the turns and deletes their KV, /quit leaves."


@with_engine_options
def chat(
    options: EngineOptions,
    session: Annotated[
        str | None, typer.Option(help="Id of a conversation to continue; it is kept.")
    ] = None,
    k: Annotated[
        int,
        typer.Option(
            "--k",
            "-k",
            min=0,
            rich_help_panel=SEARCH,
            help="Passages to retrieve for each turn; 0: none.",
        ),
    ] = 6,
    retriever: Retriever = None,
    where: Where = None,
    ratio: Ratio = None,
    selector: SelectorName = None,
    temperature: Temperature = 0.0,
    max_new_tokens: MaxNewTokens = 64,
) -> None:
    """Chat: each line is a turn, answered from the passages it retrieves. /reset, /quit.

    Where `ragkv serve` has the home, its server answers, with its settings.
    """
    filters = metadata_filter(where)
    chosen = answer_options(ratio, selector, temperature, max_new_tokens)
    search = _Search(k, retriever, filters)
    name = session or f"chat-{uuid.uuid4().hex}"
    with ExitStack() as stack:
        may_ask = options.uses_server_settings and k > 0 and not temperature
        server = server_of(options.home, options.model) if may_ask else None
        partner: _Partner = (
            stack.enter_context(_own_partner(options, name, search, chosen))
            if server is None
            else _ServedPartner(server, name, search, chosen)
        )
        if partner.turns:
            console.print(f"{counted(partner.turns, 'turn')} so far.", style="dim")
        try:
            for line in _lines():
                if not _execute(line, partner):
                    break
        except KeyboardInterrupt:  # at the prompt, or during an answer, whose turn is then not kept
            console.print()
        if session is None:
            partner.forget()


@dataclass(frozen=True, slots=True)
class _Search:
    """How the passages of a turn are found."""

    k: int
    retriever: str | None
    filters: dict[str, Any]


class _Partner(Protocol):
    """Who answers the turns of one conversation."""

    @property
    def turns(self) -> int:
        """How many turns the conversation has."""

    def print_answer(self, question: str) -> None:
        """Answer a turn, and print the answer, its sources and what was reused."""

    def forget(self) -> None:
        """Delete the turns and their KV; the next turn is the first."""


@contextmanager
def _own_partner(
    options: EngineOptions, session_id: str, search: _Search, chosen: "AnswerOptions"
) -> "Iterator[_OwnPartner]":
    """An engine of this process, closed at the end."""
    with ExitStack() as stack:
        rag = stack.enter_context(options.rag()) if (options.home / "index").is_dir() else None
        engine = rag.engine if rag is not None else stack.enter_context(options.engine())
        if rag is None:
            print_note(
                f"nothing was ingested at {options.home}: the model answers without documents."
            )
        yield _OwnPartner(engine, rag, engine.session(session_id), search, chosen)


class _OwnPartner:
    """Answers by an engine of this process."""

    def __init__(
        self,
        engine: "Engine",
        rag: "Rag | None",
        session: "Session",
        search: _Search,
        chosen: "AnswerOptions",
    ) -> None:
        """Without a `rag` the model answers without documents."""
        self._engine = engine
        self._rag = rag
        self._session = session
        self._search = search
        self._chosen = chosen

    @property
    def turns(self) -> int:
        return self._session.turns

    def print_answer(self, question: str) -> None:
        hits: Sequence[Hit] = ()
        chunks: Sequence[Chunk] = ()
        if self._rag is not None and self._search.k:
            hits = self._rag.retrieve(
                question,
                self._search.k,
                retriever=self._search.retriever,
                where=self._search.filters,
                before=self._session,
            )
            chunks = self._rag.chunks_of(hits)
        events = self._engine.stream(question, chunks, self._session, **self._chosen)
        try:
            for event in events:
                if isinstance(event, TokenEvent):
                    console.print(event.text, end="")
                    console.file.flush()
        finally:
            events.close()  # closed early, its turn is not kept
            console.print()
        assert isinstance(event, Answer)
        _print_sources(hits, event)

    def forget(self) -> None:
        self._session.reset()


class _ServedPartner:
    """Answers by the server that has the home."""

    def __init__(
        self, server: "ServerAddress", session_id: str, search: _Search, chosen: "AnswerOptions"
    ) -> None:
        self._server = server
        self._session_id = session_id
        self._body: dict[str, Any] = {
            "session_id": session_id,
            "k": search.k,
            "retriever": search.retriever,
            "filter": search.filters or None,
            "selector": chosen["selector"],
            "max_tokens": chosen["max_new_tokens"],
        }
        if "ratio" in chosen:
            self._body["ratio"] = chosen["ratio"]
        print_note(
            f"the server at {server.url} (pid {server.pid}), which has this home, answers with its "
            "settings."
        )

    @property
    def turns(self) -> int:
        found = request(self._server, "GET", f"/v1/sessions/{self._session_id}", missing={})
        return int(found.get("turns", 0))

    def print_answer(self, question: str) -> None:
        found = request(self._server, "POST", "/v1/ask", {**self._body, "question": question})
        answered = served_answer(found)
        console.print(answered.answer.text)
        _print_sources(answered.hits, answered.answer)

    def forget(self) -> None:
        request(self._server, "DELETE", f"/v1/sessions/{self._session_id}", missing={})


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


def _execute(line: str, partner: _Partner) -> bool:
    """Execute a command or answer a question. Returns whether the chat continues."""
    if line == "/quit":
        return False
    if line == "/reset":
        partner.forget()
        console.print("The turns are forgotten; the conversation begins anew.", style="dim")
    elif line.startswith("/"):
        print_note(f"there is no command {line.split()[0]}. {HELP}")
    elif line:
        partner.print_answer(line)
    return True


def _print_sources(hits: "Sequence[Hit]", answer: Answer) -> None:
    """Print the passages of a turn and what was reused."""
    output.print_sources(hits, answer)
    output.print_reuse(answer)
