"""The tools of an MCP server. Their docstrings are what a model reads."""

import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, TypeVar

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from pydantic import Field

from ragkv import __version__
from ragkv.errors import RagKVError

from .corpus import Found, ServedCorpus

T = TypeVar("T")
INSTRUCTIONS = (
    "Answers from the user's own documents. Use `ask` for questions about them, "
    "`search` to read passages."
)

CorpusOf = Callable[[Context[Any]], ServedCorpus]
Text = Annotated[
    str, Field(max_length=1_000_000, pattern=r"^[^\x00]*[^\s\x00][^\x00]*$")
]  # at least one word, and no NUL
Name = Annotated[str, Field(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]  # one line
Passages = Annotated[int, Field(ge=1, le=50, description="How many passages.")]

_READS = ToolAnnotations(read_only_hint=True, open_world_hint=False)
_REPLACES = ToolAnnotations(
    read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False
)


def build_server(corpus_of: CorpusOf, *, read_only: bool) -> MCPServer[Any]:
    """An MCP server with the tools; without `add_document` if it is `read_only`.

    `corpus_of` gives the corpus of a call, by its context: over HTTP that has the headers of the
    request.
    """
    server: MCPServer[Any] = MCPServer(
        "ragkv", version=__version__, instructions=INSTRUCTIONS, log_level="WARNING"
    )
    logging.getLogger("mcp").setLevel(logging.ERROR)  # a refused call is no warning
    *reading, adding = _tools(corpus_of)
    for tool in reading:
        server.add_tool(tool, annotations=_READS)
    if not read_only:
        server.add_tool(adding, annotations=_REPLACES)
    return server


def _tools(corpus_of: CorpusOf) -> Sequence[Callable[..., Awaitable[Found]]]:
    """The tools that read, then the one that stores a document."""

    @_telling_errors
    async def search(
        context: Context[Any],
        query: Annotated[Text, Field(description="A question, or words of the passages.")],
        k: Passages = 6,
    ) -> Found:
        """Find passages of the user's documents, the best first."""
        return await corpus_of(context).search(query, k)

    @_telling_errors
    async def ask(
        context: Context[Any],
        question: Annotated[Text, Field(description="The question.")],
        k: Passages = 6,
        max_tokens: Annotated[
            int, Field(ge=1, le=4096, description="Longest answer in tokens.")
        ] = 64,
    ) -> Found:
        """Answer a question from the user's documents.

        `sources` are the passages, and `citations` the places in them that contain the answer, by
        their numbers and the characters from the beginning of their texts. Of `prompt_tokens`,
        `reused_tokens` were not computed.
        """
        return await corpus_of(context).ask(question, k, max_tokens)

    @_telling_errors
    async def list_documents(
        context: Context[Any],
        after: Annotated[
            int, Field(ge=0, le=10**18, description="`next` of the previous page; 0: the first.")
        ] = 0,
        limit: Annotated[int, Field(ge=1, le=1000, description="Documents of a page.")] = 100,
    ) -> Found:
        """List the user's documents, in the order in which they were stored; `next` is null on the
        last page.
        """
        return await corpus_of(context).documents(after, limit)

    @_telling_errors
    async def add_document(
        context: Context[Any],
        id: Annotated[
            Name, Field(min_length=1, description="A name. A document of that name is replaced.")
        ],
        text: Annotated[Text, Field(description="The whole text.")],
        title: Annotated[Name, Field(description="Shown with the source.")] = "",
    ) -> Found:
        """Store a text among the user's documents, so that later questions are answered from it
        too.

        `change` is added, changed or unchanged.
        """
        return {"id": id, "change": await corpus_of(context).add(id, text, title)}

    return search, ask, list_documents, add_document


def _telling_errors(tool: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """The tool, whose own errors reach the client as their sentences."""

    @functools.wraps(tool)
    async def answer(**arguments: Any) -> T:
        try:
            return await tool(**arguments)
        except RagKVError as error:
            raise ToolError(str(error)) from error

    return answer
