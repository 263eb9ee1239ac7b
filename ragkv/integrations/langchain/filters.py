"""Metadata filters over LangChain documents: a mapping as in `ragkv.retrieval`, or a function."""

from collections.abc import Callable, Mapping
from operator import ge, gt, le, lt
from typing import Any

from langchain_core.documents import Document

from ragkv.errors import InputError

Filter = Mapping[str, Any] | Callable[[Document], bool]

_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {"gt": gt, "gte": ge, "lt": lt, "lte": le}


def matches(document: Document, wanted: Filter) -> bool:
    """Whether `document` meets all conditions, as in `{"lang": "en", "topic": ["a", "b"], "year": {"gte": 2000}}`.

    A metadata value that is a list meets a condition if any of its items does. Raises `InputError` for anything else.
    """
    if callable(wanted):
        return bool(wanted(document))
    if not isinstance(wanted, Mapping):
        raise InputError(f"A filter is a mapping of metadata names to conditions or a function, not {wanted!r}.")
    return all(_meets(_values(document, name), condition, name) for name, condition in wanted.items())


def _values(document: Document, name: str) -> list[Any]:
    value = document.metadata.get(name, [])
    return value if isinstance(value, list) else [value]


def _meets(values: list[Any], condition: Any, name: str) -> bool:
    if not isinstance(condition, Mapping):
        condition = {"in" if isinstance(condition, list | tuple | set | frozenset) else "eq": condition}
    return all(_meets_one(values, operator, wanted, name) for operator, wanted in condition.items())


def _meets_one(values: list[Any], operator: str, wanted: Any, name: str) -> bool:
    if operator in ("eq", "ne"):
        return any(_equal(value, wanted) for value in values) == (operator == "eq")
    if operator == "in":
        return any(_equal(value, one) for value in values for one in wanted)
    if operator not in _COMPARISONS:
        known = ", ".join(("eq", "ne", "in", *_COMPARISONS))
        raise InputError(f"Unknown operator {operator!r} in the filter on {name!r}. Known: {known}.")
    return any(_COMPARISONS[operator](value, wanted) for value in values if _have_order(value, wanted))


def _equal(value: Any, wanted: Any) -> bool:
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)  # true is not 1


def _have_order(value: Any, wanted: Any) -> bool:
    """Whether two values can be compared by size: 2000 is never below "a"."""
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (value, wanted))
    return numbers or (isinstance(value, str) and isinstance(wanted, str))
