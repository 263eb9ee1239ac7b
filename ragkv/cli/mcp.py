"""`ragkv mcp`: the corpus as tools of the Model Context Protocol, over standard input and output.

Standard output holds the protocol alone; notes and logs go to standard error. Over HTTP, `ragkv serve --mcp` has them.
"""

from typing import Annotated

import typer

from .options import EngineOptions, require_index, with_engine_options


@with_engine_options
def mcp(
    options: EngineOptions,
    read_only: Annotated[bool, typer.Option("--read-only", help="Offer no tool that adds documents.")] = False,
) -> None:
    """Offer the ingested documents to MCP clients: search, ask, list and add."""
    from ragkv.integrations.mcp import HomeCorpus, build_server

    if read_only:
        require_index(options.home)
    with HomeCorpus(lambda: options.rag(reads=True)) as corpus:
        build_server(lambda _: corpus, read_only=read_only).run("stdio")
