"""The OpenAPI document: FastAPI's, without the 422 never answered here, and with this server's limits."""

from functools import cache
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from .settings import LimitsConfig

_FRAMEWORK_S = ("HTTPValidationError", "ValidationError")


def install(app: FastAPI, limits: LimitsConfig) -> None:
    """Have `app` describe itself so."""

    @cache
    def document() -> dict[str, Any]:
        found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schemas = found["components"]["schemas"]
        for name in _FRAMEWORK_S:
            schemas.pop(name, None)
        for schema in schemas.values():
            _limit(schema.get("properties", {}), limits)
        for operations in found["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        return found

    app.openapi = document  # type: ignore[method-assign]


def _limit(properties: dict[str, Any], limits: LimitsConfig) -> None:
    """Write the settings' limits into fields of these names; what is no limit of this schema's is left alone."""
    most: dict[str, tuple[str, str, int]] = {  # the type, the keyword, the limit
        "k": ("integer", "maximum", limits.documents),
        "max_tokens": ("integer", "maximum", limits.max_tokens),
        "max_completion_tokens": ("integer", "maximum", limits.max_tokens),
        "question": ("string", "maxLength", limits.question_chars),
        "query": ("string", "maxLength", limits.question_chars),
        "documents": ("array", "maxItems", limits.documents),
        "stop": ("array", "maxItems", limits.stop_strings),
    }
    for name, (kind, keyword, limit) in most.items():
        field = properties.get(name, {})
        for one in (field, *field.get("anyOf", ())):
            if one.get("type") == kind:
                one[keyword] = limit


__all__ = ["install"]
