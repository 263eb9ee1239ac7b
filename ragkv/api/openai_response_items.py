"""The items of a request of /v1/responses: messages, calls and their results."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag, field_validator

from .bodies.chat import refuse_other_content
from .bodies.documents import Part
from .bodies.tools import ToolName

MOST_ITEMS = 1000  # of one conversation
CallId = Annotated[str, StringConstraints(min_length=1, max_length=256)]
ITEM_IGNORED: Any = Field(default=None, description="Accepted and ignored.")


class ContentPart(Part):
    """A piece of a message. Only text is accepted."""

    type: Literal["input_text", "output_text", "text"] = Field(description="All mean text.")
    text: str = Field(description="The text.")
    annotations: list[Any] | None = ITEM_IGNORED
    logprobs: list[Any] | None = ITEM_IGNORED


class _Item(Part):
    id: str | None = ITEM_IGNORED
    status: str | None = ITEM_IGNORED


class InputMessage(_Item):
    """A message."""

    type: Literal["message"] = Field(default="message", description="May be left out.")
    role: Literal["user", "assistant", "system", "developer"] = Field(description="Who says it.", examples=["user"])
    content: str | Annotated[list[ContentPart], Field(min_length=1)] = Field(
        description="The text.", examples=["What is the job of Kiralus?"]
    )
    phase: str | None = ITEM_IGNORED

    @field_validator("content", mode="before")
    @classmethod
    def _is_text(cls, content: Any) -> Any:
        return refuse_other_content(content)


class InputCall(_Item):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: CallId = Field(description="The call's id.")
    name: ToolName = Field(description="The function's name.")
    arguments: str = Field(description="Its arguments as JSON.")


class InputCallOutput(_Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: CallId = Field(description="The call that this is the result of.")
    output: str | Annotated[list[ContentPart], Field(min_length=1)] = Field(description="The result as text.")

    @field_validator("output", mode="before")
    @classmethod
    def _is_text(cls, output: Any) -> Any:
        return refuse_other_content(output)


def _kind(item: Any) -> str:
    """The tag of an item by its type; a message may leave it out. Tags in brackets are no part of a field's name."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return f"[{kind}]"


Item = Annotated[
    Annotated[InputMessage, Tag("[message]")]
    | Annotated[InputCall, Tag("[function_call]")]
    | Annotated[InputCallOutput, Tag("[function_call_output]")],
    Discriminator(
        _kind,
        custom_error_type="unknown_item",
        custom_error_message="only items of the types message, function_call and function_call_output are accepted",
    ),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=MOST_ITEMS)]
Input = Annotated[
    Annotated[str, Tag("str")] | Annotated[Items, Tag("[items]")],
    Discriminator(lambda given: "str" if isinstance(given, str) else "[items]"),
]
