"""Request bodies with documents, and the bases of all request bodies.

The processes that parse uploads import this file, so it loads nothing but pydantic. Requests are
strict: no number for a string, no unknown field, no NaN.
"""

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)
from pydantic_core import from_json, to_json

FIELDS = 100  # No object here has as many fields.
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


def optional(description: str, **rules: Any) -> Any:
    """A field that is null or left out unless a request needs it."""
    return Field(default=None, description=description, **rules)


class RequestPart(BaseModel):
    """A part of a request's body."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _reads_fields(cls, values: Any) -> Any:
        """Refuse very many fields at once, each of which may be an error. To JSON 1.0 and 1 are the
        same number.
        """
        if not isinstance(values, dict):
            return values
        if len(values) > FIELDS:
            raise ValueError(f"it has {len(values)} fields; no object here has more than {FIELDS}")
        return {
            name: int(one) if isinstance(one, float) and one.is_integer() else one
            for name, one in values.items()
        }


class Strict(RequestPart):
    """A request's body."""

    @model_validator(mode="before")
    @classmethod
    def _is_json(cls, values: Any) -> Any:
        """Refuse what Python's JSON parser accepts although it is not JSON: NaN, and half of a
        surrogate pair.
        """
        # pydantic's writer and reader: the event loop waits, and Python's writer takes 40 ms for
        # 3.6 MB, they 3
        try:
            from_json(to_json(values, inf_nan_mode="constants"), allow_inf_nan=False)
        except ValueError as error:
            hint = (
                "it holds NaN, Infinity or half a character (a lone surrogate), or is nested "
                "too deeply"
            )
            raise ValueError(f"it is not JSON: {hint}") from error
        return values


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
