"""`ragkv chat`: a conversation on the command line, over the documents of a home if there
are any.
"""

import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.runtime import counted
from ragkv.types import Answer, TokenEvent

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
    from ragkv.retrieval import Hit

# the passages of a turn, and its events
Turn = tuple["Sequence[Hit]", Iterator[TokenEvent | Answer]]
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
    """Chat: each line is a turn, answered from the passages it retrieves. /reset, /quit."""
    filters = metadata_filter(where)
    answering = answer_options(ratio, selector, temperature, max_new_tokens)
    with ExitStack() as stack:
        rag = stack.enter_context(options.rag()) if (options.home / "index").is_dir() else None
        engine = rag.engine if rag is not None else stack.enter_context(options.engine())
        if rag is None:
            print_note(
                f"nothing was ingested at {options.home}: the model answers without documents."
            )
        chat = engine.session(session or f"chat-{uuid.uuid4().hex}")

        def answer(question: str) -> Turn:
            if rag is None or not k:
                return (), engine.stream(question, (), chat, **answering)
            hits = rag.retrieve(question, k, retriever=retriever, where=filters)
            return hits, rag.stream(question, hits, chat, **answering)

        if chat.turns:
            console.print(f"{counted(chat.turns, 'turn')} so far.", style="dim")
        try:
            for line in _lines():
                if not _execute(line, chat, answer):
                    break
        except KeyboardInterrupt:  # at the prompt, or during an answer, whose turn is then not kept
            console.print()
        if session is None:
            chat.delete()


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


def _execute(line: str, chat: "Session", answer: Callable[[str], Turn]) -> bool:
    """Execute a command or answer a question. Returns whether the chat continues."""
    if line == "/quit":
        return False
    if line == "/reset":
        chat.reset()
        console.print("The turns are forgotten; the conversation begins anew.", style="dim")
    elif line.startswith("/"):
        print_note(f"there is no command {line.split()[0]}. {HELP}")
    elif line:
        _print_turn(*answer(line))
    return True


def _print_turn(hits: "Sequence[Hit]", events: Iterator[TokenEvent | Answer]) -> None:
    """Print an answer while it is made, then its sources and what was reused."""
    try:
        for event in events:
            if isinstance(event, TokenEvent):
                console.print(event.text, end="")
                console.file.flush()
    finally:
        events.close()  # type: ignore[attr-defined]  # a generator; closed early, its turn is not kept
        console.print()
    assert isinstance(event, Answer)
    for number, hit in enumerate(hits, 1):
        console.print(f" [{number}] {output.place(hit.passage)}", style="dim")
    output.print_reuse(event)
