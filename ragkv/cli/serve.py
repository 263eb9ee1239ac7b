"""`ragkv serve`: starts the REST service and its web page. docs/deploy.md lists the settings without a flag here."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from .options import Adapter, Device, Dtype, Settings
from .output import errors

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "console"]


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; 0 is any free one.", show_default="8000")
    ] = None,
    home: Annotated[
        Path | None, typer.Option(envvar="RAGKV_HOME", help="Data directory.", show_default=".ragkv")
    ] = None,
    model: Annotated[
        str | None, typer.Option(envvar="RAGKV_MODEL", help="As in `ragkv ask`.", show_default="reader")
    ] = None,
    config: Settings = None,
    device: Device = None,
    dtype: Dtype = None,
    adapter: Adapter = None,
    no_auth: Annotated[bool, typer.Option("--no-auth", help="Serve all clients without asking for a key.")] = False,
    ray: Annotated[bool, typer.Option("--ray", help="Replicas on Ray Serve; needs Redis, see docs/scale.md.")] = False,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="With --ray: number of replicas.", show_default="2")
    ] = None,
    log_level: Annotated[
        LogLevel | None, typer.Option(show_default="info", help="The least severe events logged.")
    ] = None,
    log_format: Annotated[
        LogFormat | None, typer.Option(show_default="auto", help="auto: console on a terminal.")
    ] = None,
) -> None:
    """Serve answers over HTTP, with OpenAI's endpoints, ragkv's own and a web page. Ctrl-C or SIGTERM ends it."""
    from ragkv.api import ServeConfig, check_network_exposure, create_app
    from ragkv.api import serve as listen
    from ragkv.model.loading import locate

    flags = {
        "home": None if home is None else str(home),
        "model": model,
        "device": device,
        "dtype": dtype,
        "adapter": adapter,
        "serve": {
            "host": host,
            "port": port,
            "auth": {"required": False if no_auth else None},
            "log": {"level": log_level, "format": log_format},
            "cluster": {"replicas": replicas},
        },
    }
    settings = ServeConfig.gather(config, flags=flags)
    locate(settings.model)  # a missing model is reported now and not after the start
    if ray:
        from ragkv.api import KeyRing
        from ragkv.cluster import run

        check_network_exposure(settings, KeyRing(settings.keys_path))
        run(settings)
        return
    app = create_app(settings)
    check_network_exposure(settings, app.state.server.keys)
    if settings.port:
        shown = f"[{settings.host}]" if ":" in settings.host else settings.host
        errors.print(f"ragkv serves {settings.model} at http://{shown}:{settings.port}; Ctrl-C ends it.")
    sys.stderr.flush()
    listen(app, settings)
    sys.stderr.flush()
    os._exit(0)  # everything is closed; the interpreter would take seconds to free the model, or wait for a thread
