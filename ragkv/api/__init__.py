"""The REST service: `ragkv serve`. It serves OpenAI's endpoints and ragkv's own to many tenants at
once.

    app = create_app(ServeConfig(home=".ragkv"))  # for any ASGI server

Blocking work runs on threads, with a limiter for each tenant (`work.py`). Each tenant's files are
in its own directory (`tenants.py`). Every failure is answered in one JSON shape (`failures.py`).
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from ragkv.errors import MissingExtraError

for _package in ("fastapi", "uvicorn"):
    if importlib.util.find_spec(_package) is None:
        raise MissingExtraError(_package, "api", "The REST service")

from .keys import Key, KeyFile, KeyRing, Quota, RateLimit  # noqa: E402 - after the check for packages
from .settings import ServeConfig  # noqa: E402

if TYPE_CHECKING:
    from .app import create_app
    from .server import serve

# imported at first use: they load FastAPI, uvicorn and torch
_LAZY = {"create_app": "app", "serve": "server"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)


__all__ = ["Key", "KeyFile", "KeyRing", "Quota", "RateLimit", "ServeConfig", "create_app", "serve"]
