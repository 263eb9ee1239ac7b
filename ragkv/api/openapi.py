"""The OpenAPI document: FastAPI's, without the 422 never answered here, and with the key where one is asked for."""

from functools import lru_cache
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_FRAMEWORK_S = ("HTTPValidationError", "ValidationError")
_BEARER = {"type": "http", "scheme": "bearer", "description": "A key made with `ragkv keys add`."}


def install(app: FastAPI) -> None:
    """Have `app` describe itself so."""

    @lru_cache(2)
    def document(with_keys: bool) -> dict[str, Any]:
        found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schemas = found.get("components", {}).get("schemas", {})
        for name in _FRAMEWORK_S:
            schemas.pop(name, None)
        for path, operations in found["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                if with_keys and path.startswith("/v1/"):
                    operation["security"] = [{"key": []}]
        if with_keys:
            found["components"]["securitySchemes"] = {"key": _BEARER}
        return found

    app.openapi = lambda: document(app.state.conduct.asks_for_keys)  # type: ignore[method-assign]


__all__ = ["install"]
