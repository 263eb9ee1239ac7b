"""`ragkv serve`: starts the REST service and its web page. docs/deploy.md lists the settings
without a flag here.
"""

import errno
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from ragkv.errors import ConfigError, StoreLockedError
from ragkv.home import locate
from ragkv.runtime import seconds_of
from ragkv.store.writer_lock import check_unlocked

from .options import FROM_SETTINGS, EngineOptions, with_engine_options
from .output import errors, print_note
from .running_server import living_server

if TYPE_CHECKING:
    from ragkv.api import ServeConfig

AnswerEngine = Literal["ragkv", "vllm"]


def _from_settings(default: str) -> str:
    """The default of an option, as the help shows it."""
    return f"{FROM_SETTINGS}, or {default}"


Host = Annotated[
    str | None, typer.Option(help="Address to listen on.", show_default=_from_settings("127.0.0.1"))
]
Port = Annotated[
    int | None,
    typer.Option(
        min=0, max=65535, help="Port; 0 is any free one.", show_default=_from_settings("8000")
    ),
]
NoAuth = Annotated[
    bool, typer.Option("--no-auth", help="Serve all clients without asking for a key.")
]
AnsweredBy = Annotated[
    AnswerEngine | None,
    typer.Option(
        "--engine",
        help="What computes answers: ragkv itself, or a vLLM server with ragkv's connector "
        "(docs/vllm.md).",
        show_default=_from_settings("ragkv"),
    ),
]
VllmUrl = Annotated[
    str | None,
    typer.Option(
        help="With --engine vllm: where vLLM listens.",
        show_default=_from_settings("http://127.0.0.1:8000"),
    ),
]
Mcp = Annotated[
    bool,
    typer.Option(
        "--mcp", help="Also offer the documents to MCP clients, at /mcp: docs/clients.md."
    ),
]


@with_engine_options
def serve(
    options: EngineOptions,
    host: Host = None,
    port: Port = None,
    no_auth: NoAuth = False,
    engine: AnsweredBy = None,
    vllm_url: VllmUrl = None,
    mcp: Mcp = False,
    idle: Annotated[
        str | None, typer.Option(help="End after this time without a request, such as 10m.")
    ] = None,
) -> None:
    """Serve answers over HTTP, with OpenAI's endpoints, ragkv's own and a web page. Ctrl-C or
    SIGTERM ends it.
    """
    from ragkv.api import ServeConfig

    flags = {
        "home": str(options.home),
        "model": options.model or None,
        "device": options.device,
        "dtype": options.dtype,
        "adapter": options.adapter,
        "weights": options.weights,
        "serve": {
            "host": host,
            "port": port,
            "idle_s": None if idle is None else seconds_of(idle),
            "auth": {"required": False if no_auth else None},
            "answer_engine": engine,
            "vllm": {"url": vllm_url},
        },
    }
    settings = ServeConfig.gather(options.settings, flags=flags).of_home()
    if vllm_url is not None and not settings.in_front_of_vllm:
        raise ConfigError("--vllm-url is the server of --engine vllm; give both.")
    settings.check_servable()
    locate(settings.model)  # a missing model is reported now and not after the start
    _check_alone(settings)
    listener = listening(settings.host, settings.port)
    _run(settings, mcp, listener)


def listening(host: str, port: int) -> socket.socket:
    """The socket of the server, which takes the port before anything is loaded. Raises
    `ConfigError` if another program listens there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(f"Cannot listen on {host}, port {port}: {error.strerror}.") from error
        raise ConfigError(
            f"Port {port} of {host} is in use: another program listens there, maybe a server that "
            "was started before. Stop it, or choose another port with --port."
        ) from error


def _check_alone(settings: "ServeConfig") -> None:
    """Raise `StoreLockedError` if another server has the home, which could answer nothing there;
    say it if another command writes to it.
    """
    if settings.kv_home is not None or settings.engine.store.read_only:
        return  # it writes elsewhere, or nothing
    home = Path(settings.home)
    if (server := living_server(home)) is not None:
        raise StoreLockedError(
            f"A server has {home} already, at {server.url} (pid {server.pid}). Use it, or stop it "
            f"first: kill {server.pid}. Another home needs --home.",
            f"pid {server.pid}",
        )
    if settings.in_front_of_vllm:
        return  # vLLM writes there
    try:
        check_unlocked(home / "kv")
    except StoreLockedError as error:
        print_note(f"{error.holder} writes to {home}: questions are refused (503) until it ends.")


def _run(settings: "ServeConfig", mcp: bool, listener: socket.socket) -> NoReturn:
    """Serve in this process until a signal ends it."""
    from ragkv.api import create_app
    from ragkv.api import serve as listen
    from ragkv.api.server import check_network_exposure

    shown = f"[{settings.host}]" if ":" in settings.host else settings.host
    # port 0: a program started it, and reads its log
    say: Any = errors.print if settings.port else (lambda _: None)
    ready = f"ragkv serves {settings.model} at http://{shown}:{settings.port}; Ctrl-C ends it."
    app = create_app(settings, on_ready=lambda: say(ready))
    if mcp:
        from ragkv.integrations.mcp import mount

        mount(app)
    check_network_exposure(settings, app.state.service.keys)
    say(f"loading {settings.model} ...")
    sys.stderr.flush()
    listen(app, settings, listener)
    sys.stderr.flush()
    # everything is closed; the interpreter would take seconds to free the model, or wait for a
    # thread
    os._exit(0)
