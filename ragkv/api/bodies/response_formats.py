"""`response_format` of a request: text, any JSON object, or JSON that a schema allows."""

from typing import Any, Literal

from pydantic import Field

from ragkv.prompt.constraints import ResponseFormat, parse

from ..errors import ApiError
from .documents import Part


class NamedSchema(Part):
    """A JSON schema with OpenAI's fields around it."""

    name: str | None = Field(default=None, max_length=64, description="Accepted and ignored.", examples=["city"])
    description: str | None = Field(default=None, description="Accepted and ignored.")
    schema_: dict[str, Any] = Field(
        alias="schema",
        description="The schema. One that cannot be kept is refused, and the error names the part.",
        examples=[{"type": "object", "properties": {"year": {"type": "integer"}}, "required": ["year"]}],
    )
    strict: bool | None = Field(default=None, description="Ignored: every schema is kept strictly.")


class FormatRequest(Part):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="json_object: any JSON object.")
    json_schema: NamedSchema | None = Field(default=None, description="Only with json_schema.")

    @property
    def form(self) -> ResponseFormat | None:
        """The engine's form; `None` for text. Raises `ApiError` and `SchemaError`."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            message = "response_format: give json_schema if type is json_schema, and only then."
            raise ApiError(400, message, param="response_format.json_schema")
        return parse(self.model_dump(by_alias=True))
