"""Metadata filters, translated to SQL. They apply before the ranking, so that a filtered search still finds k results.

A filter is a mapping as it comes from JSON or a keyword: `{"lang": "en", "topic": ["a", "b"], "year": {"gte": 2000,
"lt": 2010}}`. All conditions must hold. If the metadata value is a list, one matching item is enough. `document_id` and
`source` can be used like metadata names.
"""

import difflib
import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ragkv.errors import InputError

COMPARISONS = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
OPERATORS = ("eq", "ne", "in", *COMPARISONS)
COLUMNS = ("document_id", "source")
# SQLite takes an expression of at most 1,000 levels, and each of `MAX_CONDITIONS` is one.
MAX_CONDITIONS = 256
NAME_CHARS = 256

Where = Mapping[str, Any]


class Condition(NamedTuple):
    """A condition over the table `passages`."""

    sql: str = "1"
    parameters: Sequence[Any] = ()


# `EVERYTHING` is the condition that all passages meet.
EVERYTHING = Condition()


def condition_of(where: Where) -> Condition:
    """The condition that a filter is. Raises `InputError` for an invalid one."""
    if not isinstance(where, Mapping):
        raise InputError(f"A filter is a mapping of metadata names to conditions, not {reprlib.repr(where)}.")
    conditions, parameters = ["1"], []
    for name, wanted in where.items():
        _check_name(name)
        for operator, value in _operators(name, wanted):
            test, values = _test(name, operator, value)
            if name in COLUMNS:
                items = f"json_each(json_array(passages.{name}))"
            else:
                items = "json_each(passages.metadata, ?)"
                parameters.append(f"$.{json.dumps(name, ensure_ascii=False)}")
            negation = "NOT " if operator == "ne" else ""
            conditions.append(f"{negation}EXISTS (SELECT 1 FROM {items} AS item WHERE {test})")
            parameters += values
    if len(conditions) - 1 > MAX_CONDITIONS:
        raise InputError(f"The filter has {len(conditions) - 1} conditions; at most {MAX_CONDITIONS} are possible.")
    return Condition(" AND ".join(conditions), parameters)


def _check_name(name: str) -> None:
    """Raise `InputError` for a name that has no place in an SQLite path."""
    if len(name) > NAME_CHARS:
        raise InputError(f"A name in the filter has {len(name)} characters; at most {NAME_CHARS} are possible.")
    if '"' in name or "\0" in name:
        raise InputError(f"Cannot filter by {name!r}: a name in a filter has no double quote and no NUL.")


def _operators(name: str, wanted: Any) -> list[tuple[str, Any]]:
    if isinstance(wanted, Mapping):
        for operator in wanted:
            if operator not in OPERATORS:
                near = difflib.get_close_matches(str(operator), OPERATORS, n=1, cutoff=0)[0]
                raise InputError(
                    f"Unknown operator {reprlib.repr(operator)} in the filter on {name!r}. Did you mean {near!r}?"
                )
        if not wanted:
            raise InputError(f"The filter on {name!r} is empty. Known operators: {', '.join(OPERATORS)}.")
        return list(wanted.items())
    return [("in" if isinstance(wanted, list | tuple | set | frozenset) else "eq", wanted)]


def _test(name: str, operator: str, value: Any) -> tuple[str, list[Any]]:
    """The SQL of one comparison with `item`. Values of different types never match: 2000 is not below "a"."""
    if operator == "in":
        if isinstance(value, str | Mapping) or not hasattr(value, "__iter__"):
            raise InputError(f"The filter on {name!r} needs a list for 'in', not {reprlib.repr(value)}.")
        return _test_in(name, value)
    sign = COMPARISONS.get(operator, "=")
    if value is None and sign == "=":
        return "item.type = 'null'", []
    if isinstance(value, bool) and sign == "=":
        return "item.type = ?", ["true" if value else "false"]
    if _is_number(value):
        return f"item.type IN ('integer', 'real') AND item.atom {sign} ?", [value]
    if isinstance(value, str) and "\0" not in value:
        return f"item.type = 'text' AND item.atom {sign} ?", [value]
    raise InputError(
        f"The filter on {name!r} compares with {reprlib.repr(value)}; use numbers or strings without NUL; for equality "
        "also true, false, null."
    )


def _test_in(name: str, values: Iterable[Any]) -> tuple[str, list[Any]]:
    """The SQL that compares `item` with all values: numbers and texts are one parameter each, however many they are."""
    numbers: list[float] = []
    texts: list[str] = []
    types: list[str] = []
    for value in values:
        _test(name, "eq", value)  # raises for a value that cannot be compared with
        if value is None or isinstance(value, bool):
            types.append(json.dumps(value))  # null, true and false are types to SQLite
        else:
            (texts if isinstance(value, str) else numbers).append(value)
    test = (
        "item.type IN (SELECT value FROM json_each(?)) OR item.type = 'text' AND item.atom IN (SELECT value FROM "
        "json_each(?)) OR item.type IN ('integer', 'real') AND item.atom IN (SELECT value FROM json_each(?))"
    )
    return test, [json.dumps(types), json.dumps(texts), json.dumps(numbers)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63
