"""The links of the OpenAPI document: which operations take what a response holds, and in which parameter."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Link(NamedTuple):
    """From the responses of some operations to others: where the parameters of these are found."""

    sources: tuple[str, ...]
    parameters: Mapping[str, str]
    targets: tuple[str, ...]


_OF_COLLECTION = ("show_collection", "list_documents", "add_documents", "put_document", "search", "delete_collection")
_OF_DOCUMENT = ("show_document", "put_document", "delete_document")
_OF_SESSION = ("show_session", "truncate_session", "fork_session", "delete_session")
_NAME = {"name": "$request.path.name"}
_LINKS = (
    Link(("create_collection",), {"name": "$response.body#/name"}, _OF_COLLECTION),
    Link(("show_collection",), _NAME, _OF_COLLECTION[1:]),
    Link(("list_collections",), {"name": "$response.body#/data/0/name"}, _OF_COLLECTION),
    Link(("add_documents",), {**_NAME, "document_id": "$response.body#/added/0"}, _OF_DOCUMENT),
    Link(("list_documents",), {**_NAME, "document_id": "$response.body#/data/0/id"}, _OF_DOCUMENT),
    Link(("search",), {**_NAME, "document_id": "$response.body#/hits/0/document_id"}, _OF_DOCUMENT),
    Link(("put_document", "show_document"), {**_NAME, "document_id": "$request.path.document_id"}, _OF_DOCUMENT),
    Link(("ask",), {"session_id": "$response.body#/session_id"}, _OF_SESSION),
    Link(("chat",), {"session_id": "$response.body#/ragkv/session_id"}, _OF_SESSION),
    Link(("list_sessions",), {"session_id": "$response.body#/data/0/id"}, _OF_SESSION),
    Link(("fork_session",), {"session_id": "$response.body#/id"}, _OF_SESSION),
    Link(("show_session", "truncate_session"), {"session_id": "$request.path.session_id"}, _OF_SESSION),
    Link(("create_response",), {"response_id": "$response.body#/id"}, ("show_response", "delete_response")),
    Link(("show_response",), {"response_id": "$request.path.response_id"}, ("delete_response",)),
    Link(("list_models",), {"model": "$response.body#/data/0/id"}, ("show_model",)),
)


def add_links(operation: dict[str, Any]) -> None:
    """Add to an operation of the document the links from its successful responses."""
    source = operation["operationId"]
    links = {
        target: {"operationId": target, "parameters": dict(link.parameters)}
        for link in _LINKS
        if source in link.sources
        for target in link.targets
        if target != source
    }
    for status, response in operation["responses"].items():
        if status.startswith("2") and links:
            response["links"] = links
