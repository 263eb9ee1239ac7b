"""`ragkv chat`: a conversation on the command line, over the documents of a home if there are any."""

import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.types import Answer, Chunk

from . import output
from .options import HOME, Device, Dtype, Home, Model, Settings
from .output import console
from .workplace import Workplace, notice

if TYPE_CHECKING:
    from ragkv.engine import Engine
    from ragkv.rag import Rag
    from ragkv.sessions import Session

HELP = "/reset forgets the turns, /forget deletes the conversation, /stats says what it holds, /quit leaves."


def chat(
    home: Home = HOME,
    model: Model = "reader",
    config: Settings = None,
    device: Device = None,
    dtype: Dtype = None,
    session: Annotated[str | None, typer.Option(help="Go on with the conversation of that id; it is kept.")] = None,
    k: Annotated[int, typer.Option("--k", "-k", min=0, help="Passages to retrieve a turn.")] = 6,
    retriever: Annotated[str | None, typer.Option(help="bm25, dense or fused.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
) -> None:
    """Talk: a line is a turn, answered with the passages it retrieves. /reset, /forget, /stats, /quit."""
    place = Workplace(home, model, config, device, dtype)
    with ExitStack() as opened:
        rag = opened.enter_context(place.rag()) if (home / "index").is_dir() else None
        engine = rag.engine if rag is not None else opened.enter_context(place.engine())
        if rag is None:
            notice(f"nothing was ingested at {home}: answers rest on the model alone.")
        talk = Talk(engine, rag, session or f"chat-{uuid.uuid4().hex}", k, retriever, max_new_tokens)
        if talk.session.turns:
            console.print(f"{talk.session.turns} turns so far.", style="dim")
        try:
            for line in _lines():
                if not talk.take(line):
                    break
        except KeyboardInterrupt:  # at the prompt, or in an answer, whose turn is then not kept
            console.print()
        if session is None:
            talk.session.delete()


def _lines() -> Iterator[str]:
    """Lines of standard input, asked for on a terminal."""
    while True:
        if sys.stdin.isatty():
            console.print("[bold]>[/bold] ", end="")
            sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            return
        yield line.strip()


class Talk:
    """One conversation being held."""

    def __init__(
        self,
        engine: "Engine",
        rag: "Rag | None",
        session_id: str,
        k: int,
        retriever: str | None,
        max_new_tokens: int,
    ) -> None:
        self._engine, self._rag, self._k, self._retriever = engine, rag, k, retriever
        self._max_new_tokens = max_new_tokens
        self._id = session_id
        self._last: Answer | None = None
        self.session: Session = engine.session(session_id)

    def take(self, line: str) -> bool:
        """Do what a line says; whether to go on."""
        if line == "/quit":
            return False
        if line == "/reset":
            self.session.reset()
            console.print("Forgotten; the conversation begins anew.", style="dim")
        elif line == "/forget":
            self.session.delete()
            self.session, self._last = self._engine.session(self._id), None
            console.print("Deleted, with its KV.", style="dim")
        elif line == "/stats":
            self._stats()
        elif line.startswith("/"):
            notice(f"there is no {line.split()[0]}. {HELP}")
        elif line:
            self._answer(line)
        return True

    def _answer(self, question: str) -> None:
        chunks, sources = self._retrieved(question)
        stream = self._engine.stream(question, chunks, self.session, max_new_tokens=self._max_new_tokens)
        try:
            for event in stream:
                if isinstance(event, Answer):
                    self._last = event
                else:
                    console.out(event.text, end="", highlight=False)
                    console.file.flush()
        finally:
            stream.close()  # type: ignore[attr-defined]  # a generator: given up, its turn is not kept
            console.print()
        assert self._last is not None
        for number, source in enumerate(sources):
            console.print(f" [{number + 1}] {source}", style="dim", markup=False)
        console.print(output.reuse_line(self._last), style="dim", markup=False)
        for note in self._last.reuse.notes:
            notice(note)

    def _retrieved(self, question: str) -> tuple[Sequence[Chunk], list[str]]:
        """The passages of a turn and where they are from."""
        if self._rag is None or not self._k:
            return (), []
        hits = self._rag.retrieve(question, self._k, retriever=self._retriever)
        return [self._rag.chunk(hit.passage) for hit in hits], [hit.passage.source for hit in hits]

    def _stats(self) -> None:
        self._engine.flush()
        mine = [info for info in self._engine.sessions() if info.session_id == self._id]
        for info in mine:
            stored = output.size(info.stored_bytes)
            console.print(f"{info.turns} turns, {info.tokens} tokens of history, {stored} of KV stored", style="dim")
        if not mine:
            console.print("No turns yet.", style="dim")
        if self._last is not None:
            console.print(f"last turn: {output.counts(self._last.reuse)}", style="dim")
        for tier in self._engine.stats().store.tiers:
            held, capacity = output.size(tier.used_bytes), output.size(tier.capacity_bytes)
            console.print(f"{tier.kind.value}: {tier.entries} entries, {held} of {capacity}", style="dim")
