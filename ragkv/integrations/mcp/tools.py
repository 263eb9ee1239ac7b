"""The tools of an MCP server. Their docstrings are what a model reads."""

import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, TypeVar

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from pydantic import BaseModel, Field

from ragkv import __version__
from ragkv.errors import InputError, RagKVError

from .corpus import ToolAnswer, ToolCorpus, ToolDocuments, ToolSearch

T = TypeVar("T")
MOST_PASSAGES, MOST_TOKENS, MOST_DOCUMENTS = 50, 4096, 1000
TEXT_CHARACTERS, NAME_CHARACTERS = 1_000_000, 256
INSTRUCTIONS = "Answers from the user's own documents. Use `ask` for questions about them, `search` to read passages."

CorpusOf = Callable[[Context[Any]], ToolCorpus]


class ToolStored(BaseModel):
    """What became of a document."""

    id: str
    change: str = Field(description="added, changed or unchanged.")


def build_server(corpus_of: CorpusOf, *, read_only: bool) -> MCPServer[Any]:
    """An MCP server with the tools; without `add_document` if it is `read_only`.

    `corpus_of` gives the corpus of a call, by its context: over HTTP that has the headers of the request.
    """
    server: MCPServer[Any] = MCPServer("ragkv", version=__version__, instructions=INSTRUCTIONS, log_level="WARNING")
    logging.getLogger("mcp").setLevel(logging.ERROR)  # a refused call is no warning
    reads = ToolAnnotations(read_only_hint=True, open_world_hint=False)
    for tool in _reading_tools(corpus_of):
        server.add_tool(tool, annotations=reads)
    if not read_only:
        writes = ToolAnnotations(
            read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False
        )
        server.add_tool(_adding_tool(corpus_of), annotations=writes)
    return server


def _reading_tools(corpus_of: CorpusOf) -> Sequence[Callable[..., Awaitable[Any]]]:
    @_answering
    async def search(
        context: Context[Any],
        query: Annotated[str, Field(description="A question, or words of the passages.")],
        k: Annotated[int, Field(description=f"How many passages, 1 to {MOST_PASSAGES}.")] = 6,
    ) -> ToolSearch:
        """Find passages of the user's documents."""
        _check_text("query", query, TEXT_CHARACTERS)
        _check_range("k", k, 1, MOST_PASSAGES)
        return await corpus_of(context).search(query, k)

    @_answering
    async def ask(
        context: Context[Any],
        question: Annotated[str, Field(description="The question.")],
        k: Annotated[int, Field(description=f"How many passages to answer from, 1 to {MOST_PASSAGES}.")] = 6,
        max_tokens: Annotated[int, Field(description=f"Longest answer in tokens, 1 to {MOST_TOKENS}.")] = 64,
    ) -> ToolAnswer:
        """Answer a question from the user's documents, with the passages and the places that say so."""
        _check_text("question", question, TEXT_CHARACTERS)
        _check_range("k", k, 1, MOST_PASSAGES)
        _check_range("max_tokens", max_tokens, 1, MOST_TOKENS)
        return await corpus_of(context).ask(question, k, max_tokens)

    @_answering
    async def list_documents(
        context: Context[Any],
        after: Annotated[int, Field(description="`next` of the previous page; 0: the first page.")] = 0,
        limit: Annotated[int, Field(description=f"Documents of a page, 1 to {MOST_DOCUMENTS}.")] = 100,
    ) -> ToolDocuments:
        """List the user's documents, in the order in which they were stored."""
        _check_range("after", after, 0, 10**18)
        _check_range("limit", limit, 1, MOST_DOCUMENTS)
        return await corpus_of(context).documents(after, limit)

    return search, ask, list_documents


def _adding_tool(corpus_of: CorpusOf) -> Callable[..., Awaitable[ToolStored]]:
    @_answering
    async def add_document(
        context: Context[Any],
        id: Annotated[str, Field(description="A name of your choice. A document of that name is replaced.")],
        text: Annotated[str, Field(description="The whole text.")],
        title: Annotated[str, Field(description="Shown with the source.")] = "",
    ) -> ToolStored:
        """Store a text among the user's documents, so that later questions are answered from it too."""
        _check_text("id", id, NAME_CHARACTERS)
        _check_text("text", text, TEXT_CHARACTERS)
        if any(ord(char) < 32 or ord(char) == 127 for char in id + title) or len(title) > NAME_CHARACTERS:
            raise InputError(f"id and title are one line of at most {NAME_CHARACTERS} characters each.")
        return ToolStored(id=id, change=await corpus_of(context).add(id, text, title))

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
