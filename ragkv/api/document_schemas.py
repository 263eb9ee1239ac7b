"""Request bodies with documents, and the bases of all request bodies.

The processes that parse uploads import this file, so it loads nothing but pydantic. Requests are strict: no number for
a string, no unknown field, no NaN.
"""

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

FIELDS = 100  # more than any object here has
ID_PATTERN = r"^[^\x00-\x1f\x7f]{1,256}$"

Id = Annotated[str, StringConstraints(pattern=ID_PATTERN)]


class Part(BaseModel):
    """A part of a request's body."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, values: Any) -> Any:
        """Refuse an object with very many fields at once: each unknown one would be an error of its own."""
        if isinstance(values, dict) and len(values) > FIELDS:
            raise ValueError(f"it has {len(values)} fields; no object here has more than {FIELDS}")
        return values


class Strict(Part):
    """A request's body."""

    @model_validator(mode="before")
    @classmethod
    def _is_json(cls, values: Any) -> Any:
        """Refuse what Python's JSON parser accepts although it is not JSON: NaN, and half of a surrogate pair."""
        try:
            json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("a text holds half a character (a lone surrogate)") from error
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError("it is not JSON: it holds NaN or Infinity, or is nested too deeply") from error
        return values


class GivenDocument(Part):
    """A document in a request."""

    id: Id | None = Field(default=None, description="Left out: derived from the text.")
    title: str | None = Field(default=None, max_length=1000)
    text: str = Field(min_length=1)


class DocumentIn(GivenDocument):
    """A document to store."""

    metadata: dict[str, Any] | None = Field(default=None, description="JSON values to filter by.")


class DocumentsIn(Strict):
    """Documents to store. An unchanged document costs nothing; a changed one replaces the stored one."""

    documents: list[DocumentIn] = Field(min_length=1, fail_fast=True)


class DocumentPut(Strict):
    """A document's new contents."""

    title: str | None = Field(default=None, max_length=1000)
    text: str = Field(min_length=1)
    metadata: dict[str, Any] | None = None
