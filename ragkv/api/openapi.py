"""The OpenAPI document: FastAPI's, with this server's limits and keys, without the 422 that it never answers."""

from functools import cache
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from .middleware.auth import is_public
from .server_state import ServerState
from .settings import LimitsConfig

_UNUSED_SCHEMAS = ("HTTPValidationError", "ValidationError")  # FastAPI adds them for 422
_KEY_SCHEME = {"type": "http", "scheme": "bearer", "description": "A key made by `ragkv keys add`, if keys exist."}


def install(app: FastAPI, server: ServerState) -> None:
    """Make `app` serve this document. Routes under /v1 need a key while `server` requires one."""

    @cache
    def document() -> dict[str, Any]:
        found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schemas = found["components"]["schemas"]
        for name in _UNUSED_SCHEMAS:
            schemas.pop(name, None)
        for schema in schemas.values():
            _set_limits(schema.get("properties", {}), server.config.limits)
        for operations in found["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        return found

    def openapi() -> dict[str, Any]:
        found = document()
        if server.requires_key:
            found["components"]["securitySchemes"] = {"key": _KEY_SCHEME}
            for path, operations in found["paths"].items():
                if not is_public(path):
                    for operation in operations.values():
                        operation["security"] = [{"key": []}]
        return found

    app.openapi = openapi  # type: ignore[method-assign]


def _set_limits(properties: dict[str, Any], limits: LimitsConfig) -> None:
    """Write the server's limits into the properties of these names and types."""
    maxima: dict[str, tuple[str, str, int]] = {  # by property: its type, the JSON Schema keyword, the limit
        "k": ("integer", "maximum", limits.documents),
        "max_tokens": ("integer", "maximum", limits.max_tokens),
        "max_completion_tokens": ("integer", "maximum", limits.max_tokens),
        "question": ("string", "maxLength", limits.question_chars),
        "query": ("string", "maxLength", limits.question_chars),
        "documents": ("array", "maxItems", limits.documents),
        "stop": ("array", "maxItems", limits.stop_strings),
    }
    for name, (kind, keyword, limit) in maxima.items():
        field = properties.get(name, {})
        for option in (field, *field.get("anyOf", ())):
            if option.get("type") == kind:
                option[keyword] = limit
