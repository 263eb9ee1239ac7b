"""Metadata filters over LangChain documents: a mapping as in `ragkv.retrieval`, or a function."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

from langchain_core.documents import Document

from ragkv.errors import InputError

Filter = Mapping[str, Any] | Callable[[Document], bool]

_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
}


def matches(document: Document, wanted: Filter) -> bool:
    """Whether `document` meets all conditions, as in `{"lang": "en", "topic": ["a", "b"], "year": {"gte": 2000}}`.

    A metadata value that is a list meets a condition if any of its items does. Raises `InputError` for anything else.
    """
    if callable(wanted):
        return bool(wanted(document))
    if not isinstance(wanted, Mapping):
        raise InputError(f"A filter is a mapping of metadata names to conditions or a function, not {wanted!r}.")
    return all(_holds(_values(document, name), condition, name) for name, condition in wanted.items())


def _values(document: Document, name: str) -> list[Any]:
    if name not in document.metadata:
        return []
    value = document.metadata[name]
    return value if isinstance(value, list) else [value]


def _holds(values: list[Any], condition: Any, name: str) -> bool:
    if not isinstance(condition, Mapping):
        condition = {"in" if isinstance(condition, list | tuple | set | frozenset) else "eq": condition}
    return all(_passes(values, kind, wanted, name) for kind, wanted in condition.items())


def _passes(values: list[Any], kind: str, wanted: Any, name: str) -> bool:
    if kind == "eq":
        return any(_equal(value, wanted) for value in values)
    if kind == "ne":
        return not any(_equal(value, wanted) for value in values)
    if kind == "in":
        return any(_equal(value, one) for value in values for one in wanted)
    if kind not in _COMPARISONS:
        known = ", ".join(("eq", "ne", "in", *_COMPARISONS))
        raise InputError(f"Unknown operator {kind!r} in the filter on {name!r}. Known: {known}.")
    return any(_COMPARISONS[kind](value, wanted) for value in values if _alike(value, wanted))


def _equal(value: Any, wanted: Any) -> bool:
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)  # true is not 1


def _alike(value: Any, wanted: Any) -> bool:
    """Whether two values can be compared by size: 2000 is never below "a"."""
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (value, wanted))
    return numbers or (isinstance(value, str) and isinstance(wanted, str))
