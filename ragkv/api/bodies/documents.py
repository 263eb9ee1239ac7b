"""Request bodies with documents. The processes that parse uploads import this file."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field, StringConstraints

from .parts import RequestPart, Strict, optional

ID_PATTERN = r"^[^\x00-\x1f\x7f]{1,256}$"
NO_NUL = r"^[^\x00]*$"  # SQLite ends a text at NUL.


def without_dots(id: str) -> str:
    """`id`, unless a part of it is "." or "..". Raises `ValueError`.

    Clients resolve such parts of an address before they send it, so `DELETE .../documents/..` would
    name the collection.
    """
    if any(part in (".", "..") for part in id.split("/")):
        raise ValueError(f"{id[:80]!r} has the part '.' or '..', which no address can name")
    return id


Id = Annotated[str, StringConstraints(pattern=ID_PATTERN), AfterValidator(without_dots)]
Title = Annotated[str, StringConstraints(max_length=1000, pattern=NO_NUL)]


class GivenDocument(RequestPart):
    """A document in a request."""

    id: Id | None = optional("Left out: derived from the text.", examples=["bridge"])
    title: Title | None = optional(
        "Shown with the source, and the metadata `title`.", examples=["The bridge"]
    )
    text: str = Field(
        min_length=1, description="The text.", examples=["The Iron Bridge was opened in 1781."]
    )


class DocumentIn(GivenDocument):
    """A document to store."""

    metadata: dict[str, Any] | None = optional(
        "JSON values to filter by.", examples=[{"year": 1931, "lang": "en"}]
    )


class DocumentsIn(Strict):
    """Documents to store. An unchanged document costs nothing; a changed one replaces the stored
    one.
    """

    documents: list[DocumentIn] = Field(min_length=1, fail_fast=True, description="The documents.")
