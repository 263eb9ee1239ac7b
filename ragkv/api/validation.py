"""What is wrong with a body, in one sentence. Loads nothing, because the processes that parse uploads use it too."""

from collections.abc import Mapping, Sequence
from typing import Any

_UNION_STEPS = ("body", "query", "path", "header", "constrained-str", "str", "int", "float", "bool")


def describe_errors(found: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """A message about pydantic's errors, and the field it is about: the first wrong one, and the number of others."""
    first = found[0]
    if first["type"] == "json_invalid":
        return f"The body is not JSON: {first.get('ctx', {}).get('error', 'it does not parse')}.", None
    param = ".".join(str(step)[:80] for step in first["loc"] if _is_field(step))[:200] or None
    unknown = first["type"] == "extra_forbidden"
    problem = "Unknown field; leave it out" if unknown else str(first["msg"]).removeprefix("Value error, ")
    more = f" ({len(found) - 1} more)" if len(found) > 1 else ""
    return f"{param or 'The body'}: {problem}.{more}", param


def _is_field(step: str | int) -> bool:
    """Whether a step of an error's location is a field or index of the request, not pydantic's name of a union type."""
    return isinstance(step, int) or (step not in _UNION_STEPS and "[" not in step)
