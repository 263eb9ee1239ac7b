"""The OpenAPI document: FastAPI's, with this server's limits, links and keys, without the 422 that it never answers."""

from functools import cache
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from .bodies.documents import DocumentPut, DocumentsIn
from .middleware.auth import is_public
from .openapi_limits import describe_limits
from .openapi_links import add_links
from .server_state import ServerState

_UNUSED_SCHEMAS = ("HTTPValidationError", "ValidationError")  # FastAPI adds them for 422
_READ_BY_ROUTES = (DocumentsIn, DocumentPut)  # FastAPI does not know these bodies
_COMPONENTS = "#/components/schemas/{model}"
_KEY_SCHEME = {"type": "http", "scheme": "bearer", "description": "A key made by `ragkv keys add`, if keys exist."}


def component_of(body: type[BaseModel]) -> dict[str, str]:
    """The reference to a body that a route reads itself; it is one of `_READ_BY_ROUTES`."""
    return {"$ref": _COMPONENTS.format(model=body.__name__)}


def install(app: FastAPI, server: ServerState) -> None:
    """Make `app` serve this document. Routes under /v1 need a key while `server` requires one."""

    @cache
    def document() -> dict[str, Any]:
        found = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schemas = found["components"]["schemas"]
        _, read = models_json_schema([(body, "validation") for body in _READ_BY_ROUTES], ref_template=_COMPONENTS)
        schemas.update(read["$defs"])
        for name in _UNUSED_SCHEMAS:
            schemas.pop(name, None)
        describe_limits(schemas, server.config)
        for operations in found["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                add_links(operation)
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
