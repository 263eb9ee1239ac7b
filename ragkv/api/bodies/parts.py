"""The bases of all request bodies.

The processes that parse uploads import this file, so it loads nothing but pydantic. Requests are
strict: no number for a string, no unknown field, no NaN. Fields that clients of other servers send
and that do nothing here are ignored, with a note.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)
from pydantic_core import from_json, to_json

FIELDS = 100  # No object here has as many fields.
# Fields of other servers and clients that cannot change an answer here, by the reason why.
_REASONS = {
    "the key says who asks": ("user", "safety_identifier"),
    "requests are not stored": ("metadata", "store"),
    "all requests are served alike": ("service_tier",),
    "KV is found by content": (
        "prompt_cache_key",
        "prompt_cache_retention",
        "cache_control",
        "cache_prompt",
    ),
    "the context is the model's": ("num_ctx",),
    "the model stays loaded": ("keep_alive",),
    "the chat template is rendered without arguments": ("chat_template_kwargs",),
    "answers are text": ("modalities",),
    "the model has no such levels": ("reasoning_effort", "verbosity"),
}
IGNORED: Mapping[str, str] = {name: why for why, names in _REASONS.items() for name in names}
# Why a field of a message does nothing.
UNKNOWN = "messages have no such field here"
MAX_NOTES = 20  # A request may have many thousand such fields.


def optional(description: str, **rules: Any) -> Any:
    """A field that is null or left out unless a request needs it."""
    return Field(default=None, description=description, **rules)


def _check_json(values: Any) -> None:
    """Raise `ValueError` for what Python's parser reads although it is not JSON."""
    # pydantic's writer and reader: the event loop waits, and Python's writer takes 40 ms for
    # 3.6 MB, they 3
    try:
        from_json(to_json(values, inf_nan_mode="constants"), allow_inf_nan=False)
    except ValueError as error:
        hint = (
            "it holds NaN, Infinity or half a character (a lone surrogate), or is nested too deeply"
        )
        raise ValueError(f"it is not JSON: {hint}") from error


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
        _check_json(values)
        return values


class ClientPart(RequestPart):
    """A part of what a client of other servers sends: null asks for nothing, `IGNORED` makes a
    note.
    """

    _ignored: Mapping[str, str] = PrivateAttr({})  # fields that were given and do nothing: why

    @model_validator(mode="wrap")
    @classmethod
    def _ignores_fields(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(values, dict):
            return handler(values)
        made = handler(
            {name: one for name, one in values.items() if one is not None and name not in IGNORED}
        )
        ignored = {name: why for name, why in IGNORED.items() if values.get(name)}
        _check_json({name: values[name] for name in ignored})  # no other validator sees them
        if cls.model_config.get("extra") == "ignore":
            given = (str(name) for name, one in values.items() if one is not None)
            known = cls.model_fields.keys() | IGNORED.keys()
            ignored |= {name[:80]: UNKNOWN for name in given if name not in known}
        made._ignored = ignored
        return made


def notes_of(parts: Iterable[ClientPart]) -> list[str]:
    """Notes on the fields that were given and are ignored, each once."""
    ignored = {name: why for part in parts for name, why in part._ignored.items()}
    notes = [f"{name} is ignored: {why}" for name, why in ignored.items()]
    more = len(notes) - MAX_NOTES
    return notes if more <= 0 else [*notes[:MAX_NOTES], f"{more} more fields are ignored"]


class MessagePart(ClientPart):
    """A part of a message. An earlier answer may be another server's, with fields of its own: they
    are left out and noted, because a refusal would end the conversation.
    """

    model_config = ConfigDict(extra="ignore")
