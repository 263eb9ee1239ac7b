"""`ragkv mcp`: the corpus as tools of the Model Context Protocol, over standard input and output or over HTTP.

Over standard streams the output holds the protocol alone; notes and logs go to standard error.
"""

import os
from typing import Annotated

import typer

from ragkv.errors import ConfigError, MissingExtraError
from ragkv.runtime import is_loopback
from ragkv.runtime.setting_values import MCP_KEY_VARIABLE

from .options import HOME, Adapter, Device, Dtype, EngineOptions, Home, Model, Settings, require_index
from .output import print_note

KEY_CHARACTERS = 16


def mcp(
    home: Home = HOME,
    model: Model = "reader",
    config: Settings = None,
    device: Device = None,
    dtype: Dtype = None,
    adapter: Adapter = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Offer no tool that adds documents.")] = False,
    http: Annotated[bool, typer.Option("--http", help="Serve HTTP at /mcp, instead of standard streams.")] = False,
    host: Annotated[
        str,
        typer.Option(help=f"With --http: address to listen on. Beyond this machine {MCP_KEY_VARIABLE} must be set."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --http: port; 0 is any free one.")] = 8001,
) -> None:
    """Offer the ingested documents to MCP clients: search, ask, list and add.

    Where `ragkv serve` has the home, its server answers.
    """
    try:
        import mcp  # noqa: F401 - before anything is loaded
    except ImportError as error:
        raise MissingExtraError("mcp", "mcp", "`ragkv mcp`") from error
    from .mcp_corpus import open_corpus
    from .mcp_tools import build_server

    key = checked_key(os.environ.get(MCP_KEY_VARIABLE, ""), host) if http else ""
    if read_only:
        require_index(home)
    with open_corpus(EngineOptions(home, model, config, device, dtype, adapter)) as corpus:
        server = build_server(corpus, read_only=read_only)
        if not http:
            server.run("stdio")
            return
        from .mcp_http import serve_http

        if not port:
            print_note("the port is any free one; it is logged when the server listens.")
        serve_http(server, host, port, key)


def checked_key(key: str, host: str) -> str:
    """The key that clients send; "" for none. Raises `ConfigError` for a short one, and beyond loopback for none."""
    if key and len(key) < KEY_CHARACTERS:
        raise ConfigError(f"{MCP_KEY_VARIABLE} has {len(key)} characters; give at least {KEY_CHARACTERS} random ones.")
    if not key and not is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines, and there is no key. Set {MCP_KEY_VARIABLE} to at least "
            f"{KEY_CHARACTERS} random characters, or listen on 127.0.0.1."
        )
    return key
