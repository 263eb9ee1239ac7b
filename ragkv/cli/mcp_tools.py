"""The tools of `ragkv mcp`, and the values that they return. Their docstrings are what a model reads."""

import functools
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from pydantic import BaseModel, Field

from ragkv import __version__
from ragkv.errors import InputError, RagKVError
from ragkv.runtime import run_in_thread

from .mcp_corpus import Asked, Corpus

if TYPE_CHECKING:
    from ragkv.retrieval import Hit

T = TypeVar("T")
MOST_PASSAGES, MOST_TOKENS, MOST_DOCUMENTS = 50, 4096, 1000
TEXT_CHARACTERS, NAME_CHARACTERS = 1_000_000, 256
INSTRUCTIONS = "Answers from the user's own documents. Use `ask` for questions about them, `search` to read passages."


class Source(BaseModel):
    """A passage."""

    number: int = Field(description="By which citations name it, from 1 on.")
    document_id: str
    source: str = Field(description="Where the document came from.")
    text: str
    score: float


class Quote(BaseModel):
    """A place where a source contains the answer."""

    number: int = Field(description="Of the source.")
    text: str
    start: int = Field(description="Characters from the beginning of the source's text.")
    end: int


class Found(BaseModel):
    """The passages of a search, the best first."""

    sources: list[Source]


class Answered(BaseModel):
    """An answer, the passages that it was made from, and how much of the prompt was reused."""

    answer: str
    sources: list[Source]
    citations: list[Quote]
    finish_reason: str
    prompt_tokens: int
    reused_tokens: int = Field(description="Of the prompt: exact and fused.")
    first_token_s: float
    notes: list[str]


class DocumentEntry(BaseModel):
    """A stored document."""

    id: str
    source: str
    passages: int
    characters: int


class Documents(BaseModel):
    """A page of stored documents."""

    documents: list[DocumentEntry]
    next: int | None = Field(description="`after` of the next page; null: there is none.")


class Stored(BaseModel):
    """What became of a document."""

    id: str
    change: str = Field(description="added, changed or unchanged.")


def build_server(corpus: Corpus, *, read_only: bool) -> MCPServer[Any]:
    """An MCP server with the tools of `corpus`; without `add_document` if it is `read_only`."""
    server: MCPServer[Any] = MCPServer("ragkv", version=__version__, instructions=INSTRUCTIONS, log_level="WARNING")
    logging.getLogger("mcp").setLevel(logging.ERROR)  # a refused call is no warning
    reads = ToolAnnotations(read_only_hint=True, open_world_hint=False)
    for tool in _reading_tools(corpus):
        server.add_tool(tool, annotations=reads)
    if not read_only:
        writes = ToolAnnotations(
            read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False
        )
        server.add_tool(_adding_tool(corpus), annotations=writes)
    return server


def _reading_tools(corpus: Corpus) -> Sequence[Callable[..., Awaitable[Any]]]:
    @_answering
    async def search(
        query: Annotated[str, Field(description="A question, or words of the passages.")],
        k: Annotated[int, Field(description=f"How many passages, 1 to {MOST_PASSAGES}.")] = 6,
    ) -> Found:
        """Find passages of the user's documents."""
        _check_text("query", query, TEXT_CHARACTERS)
        _check_range("k", k, 1, MOST_PASSAGES)
        return Found(sources=_sources(await run_in_thread(lambda _: corpus.search(query, k))))

    @_answering
    async def ask(
        question: Annotated[str, Field(description="The question.")],
        k: Annotated[int, Field(description=f"How many passages to answer from, 1 to {MOST_PASSAGES}.")] = 6,
        max_tokens: Annotated[int, Field(description=f"Longest answer in tokens, 1 to {MOST_TOKENS}.")] = 64,
    ) -> Answered:
        """Answer a question from the user's documents, with the passages and the places that say so."""
        _check_text("question", question, TEXT_CHARACTERS)
        _check_range("k", k, 1, MOST_PASSAGES)
        _check_range("max_tokens", max_tokens, 1, MOST_TOKENS)

        def work(cancel: threading.Event) -> Asked:
            return corpus.ask(question, k, max_tokens, cancel)

        return _answered(await run_in_thread(work))

    @_answering
    async def list_documents(
        after: Annotated[int, Field(description="`next` of the previous page; 0: the first page.")] = 0,
        limit: Annotated[int, Field(description=f"Documents of a page, 1 to {MOST_DOCUMENTS}.")] = 100,
    ) -> Documents:
        """List the user's documents, in the order in which they were stored."""
        _check_range("after", after, 0, 10**18)
        _check_range("limit", limit, 1, MOST_DOCUMENTS)
        page = await run_in_thread(lambda _: corpus.documents(after, limit))
        entries = [
            DocumentEntry(id=one.id, source=one.source, passages=one.passages, characters=one.characters)
            for one in page.documents
        ]
        return Documents(documents=entries, next=page.next)

    return search, ask, list_documents


def _adding_tool(corpus: Corpus) -> Callable[..., Awaitable[Stored]]:
    @_answering
    async def add_document(
        id: Annotated[str, Field(description="A name of your choice. A document of that name is replaced.")],
        text: Annotated[str, Field(description="The whole text.")],
        title: Annotated[str, Field(description="Shown with the source.")] = "",
    ) -> Stored:
        """Store a text among the user's documents, so that later questions are answered from it too."""
        _check_text("id", id, NAME_CHARACTERS)
        _check_text("text", text, TEXT_CHARACTERS)
        if any(ord(char) < 32 or ord(char) == 127 for char in id + title) or len(title) > NAME_CHARACTERS:
            raise InputError(f"id and title are one line of at most {NAME_CHARACTERS} characters each.")
        return Stored(id=id, change=await run_in_thread(lambda _: corpus.add(id, text, title)))

    return add_document


def _answering(tool: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """The tool, whose own errors reach the client as their sentences."""

    @functools.wraps(tool)
    async def answer(**arguments: Any) -> T:
        try:
            return await tool(**arguments)
        except RagKVError as error:
            raise ToolError(str(error)) from error

    return answer


def _check_text(name: str, text: str, most: int) -> None:
    if not text.strip():
        raise InputError(f"{name} is empty. Give at least one word.")
    if len(text) > most or "\0" in text:
        raise InputError(f"{name} has {len(text):,} characters; at most {most:,} are taken, and no NUL.")


def _check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InputError(f"{name} is {value}; it must be from {least} to {most}.")


def _sources(hits: "Sequence[Hit]") -> list[Source]:
    return [
        Source(
            number=number,
            document_id=hit.passage.document_id,
            source=hit.passage.source,
            text=hit.passage.text,
            score=float(hit.score),
        )
        for number, hit in enumerate(hits, 1)
    ]


def _answered(asked: Asked) -> Answered:
    answer, sources = asked.answer, _sources(asked.hits)
    return Answered(
        answer=answer.text,
        sources=sources,
        citations=[
            Quote(
                number=one.chunk + 1,
                text=sources[one.chunk].text[one.start : one.end],
                start=one.start,
                end=one.end,
            )
            for one in answer.citations
        ],
        finish_reason=answer.finish_reason,
        prompt_tokens=answer.reuse.tokens,
        reused_tokens=answer.reuse.exact + answer.reuse.fused,
        first_token_s=answer.timing.first_token_s,
        notes=list(answer.reuse.notes),
    )
