"""Says in one sentence what is wrong with a request's body. Imports only the standard library,
because the processes that parse uploads use it too.
"""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

# Where a value stands in a request: the first step to it.
_PLACES = ("body", "query", "path", "header")
# Steps that are types of a value which may have several.
_TYPES = ("constrained-str", "str", "int", "float", "bool")


def describe_errors(found: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """A message about pydantic's errors, and the field it is about: the first wrong one, and the
    number of others.

    A value that may have several types has an error for each. The one counts whose type it comes
    nearest to.
    """
    if found[0]["type"] == "json_invalid":
        return (
            f"The body is not JSON: {found[0].get('ctx', {}).get('error', 'it does not parse')}.",
            None,
        )
    value = list(takewhile(lambda step: not _is_type(step), _steps(found[0])))
    same = [error for error in found if _steps(error)[: len(value)] == value]
    best = max(same, key=lambda error: (len(_fields(error)), not error["type"].endswith("_type")))
    unknown = best["type"] == "extra_forbidden"
    param = (
        ".".join(str(step)[:80] for step in (_steps(best) if unknown else _fields(best)))[:200]
        or None
    )
    problem = (
        "Unknown field; leave it out" if unknown else str(best["msg"]).removeprefix("Value error, ")
    )
    more = f" ({len(found) - len(same)} more)" if len(found) > len(same) else ""
    return f"{param or 'The body'}: {problem}.{more}", param


def _steps(error: Mapping[str, Any]) -> list[str | int]:
    steps = list(error["loc"])
    return steps[1:] if steps[:1] and steps[0] in _PLACES else steps


def _fields(error: Mapping[str, Any]) -> list[str | int]:
    """The fields and indices that lead to an error."""
    return [step for step in _steps(error) if not _is_type(step)]


def _is_type(step: str | int) -> bool:
    """Whether a step is no field or index of the request, but pydantic's name of a type."""
    return isinstance(step, str) and (step in _TYPES or step[:1].isupper() or "[" in step)
