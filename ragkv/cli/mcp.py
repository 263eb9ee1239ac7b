"""`ragkv mcp`: the corpus as tools of the Model Context Protocol, over standard input and output.

Standard output holds the protocol alone; notes and logs go to standard error. Over HTTP, `ragkv serve --mcp` has them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.errors import InputError, RagKVError
from ragkv.runtime import run_in_thread

from .options import EngineOptions, require_index, with_engine_options
from .output import print_note
from .running_server import Refused, send, server_of

if TYPE_CHECKING:
    from ragkv.integrations.mcp.corpus import ToolCorpus
    from ragkv.runtime.server_file import ServerAddress

REQUEST_S = 600.0  # The longest wait for a response of a server; its own deadline is shorter by default.


@with_engine_options
def mcp(
    options: EngineOptions,
    read_only: Annotated[bool, typer.Option("--read-only", help="Offer no tool that adds documents.")] = False,
) -> None:
    """Offer the ingested documents to MCP clients: search, ask, list and add.

    Where `ragkv serve` has the home, its server answers.
    """
    from ragkv.integrations.mcp import build_server

    if read_only:
        require_index(options.home)
    with _open_corpus(options) as corpus:
        build_server(lambda _: corpus, read_only=read_only).run("stdio")


@contextmanager
def _open_corpus(options: EngineOptions) -> Iterator["ToolCorpus"]:
    """The corpus of a home, through its server if it has one that answers without a key."""
    from ragkv.integrations.mcp import HomeCorpus, ServedCorpus

    address = server_of(options.home, options.model)
    if address is not None and _answers(address):

        async def ask(method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
            return await run_in_thread(lambda _: _send(address, method, path, body))

        print_note(f"the server at {address.url} (pid {address.pid}), which has this home, answers.")
        yield ServedCorpus(ask)
        return
    with HomeCorpus(lambda: options.rag(reads=True)) as corpus:
        yield corpus


def _answers(address: "ServerAddress") -> bool:
    """Whether the server answers without a key; if not, a note says why."""
    try:
        _send(address, "GET", "/v1/collections/default/documents?limit=1", None)
    except RagKVError as error:
        print_note(f"the server at {address.url} is not asked: {error}")
        return False
    return True


def _send(address: "ServerAddress", method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
    try:
        return send(address, method, path, body, REQUEST_S)
    except Refused as error:
        raise InputError(str(error)) from error
    except (OSError, ValueError) as error:
        raise RagKVError(f"The server at {address.url} does not answer: {error}. Start it again.") from error
