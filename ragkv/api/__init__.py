"""The REST service: `ragkv serve`. OpenAI's endpoints and our own, over the engine, for many tenants at once.

    app = create_app(ServeConfig(home=".ragkv"))  # for any ASGI server

Everything that blocks runs on bounded threads (`work.py`); everything a tenant has lies in its own directory
(`tenants.py`); every failure has one shape (`errors.py`).
"""

import importlib.util
from typing import TYPE_CHECKING, Any

from ragkv.errors import MissingExtraError

for _package in ("fastapi", "uvicorn"):
    if importlib.util.find_spec(_package) is None:
        raise MissingExtraError(_package, "api", "The REST service")

from .settings import ServeConfig  # noqa: E402 - the reason comes first

if TYPE_CHECKING:
    from .app import create_app


def __getattr__(name: str) -> Any:
    if name == "create_app":  # loads torch
        from .app import create_app

        return create_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["ServeConfig", "create_app"]
