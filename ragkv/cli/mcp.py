"""`ragkv mcp`: the corpus as tools of the Model Context Protocol, over standard input and output.

The server that has the home answers. If there is none, the first call starts one. So any number of
clients share one model. Standard output holds only the protocol. `ragkv serve --mcp` offers the
tools over HTTP.
"""

from typing import Annotated

import typer

from ragkv.errors import InputError

from .options import EngineOptions, require_index, with_engine_options
from .running_server import KeptServer

# A server that was started here ends when it was idle for `IDLE_S`; the next call starts another.
IDLE_S = 600.0


@with_engine_options
def mcp(
    options: EngineOptions,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Offer no tool that adds documents.")
    ] = False,
) -> None:
    """Offer the ingested documents to MCP clients: search, ask, list and add."""
    from ragkv.integrations.mcp import ServedCorpus, build_server
    from ragkv.retrieval import Index
    from ragkv.runtime.thread_stream import run_in_thread

    if not options.uses_server_settings:
        raise InputError(
            "ragkv mcp asks a server with the home's settings: leave the model's options out."
        )
    if read_only:
        require_index(options.home)
    elif not (options.home / "index").is_dir():
        # what the tools add is then where `ragkv ask` looks, too
        Index(options.home / "index").close()
    server = KeptServer(options.home, options.model, options.settings, IDLE_S)
    corpus = ServedCorpus(lambda *call: run_in_thread(lambda _: server.send(*call)))
    build_server(lambda _: corpus, read_only=read_only).run("stdio")
