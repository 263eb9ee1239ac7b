"""Metadata filters, translated to SQL. They apply before the ranking, so that a filtered search still finds k results.

A filter is a mapping as it comes from JSON or a keyword: `{"lang": "en", "topic": ["a", "b"], "year": {"gte": 2000,
"lt": 2010}}`. All conditions must hold. If the metadata value is a list, one matching item is enough. `document_id` and
`source` can be used like metadata names.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from ragkv.errors import InputError

COMPARISONS = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
OPERATORS = ("eq", "ne", "in", *COMPARISONS)
COLUMNS = ("document_id", "source")

Where = Mapping[str, Any]


def sql_of(where: Where) -> tuple[str, list[Any]]:
    """A condition over the table `passages`, and its parameters. Raises `InputError` for an invalid filter."""
    if not isinstance(where, Mapping):
        raise InputError(f"A filter is a mapping of metadata names to conditions, not {where!r}.")
    conditions, parameters = ["1"], []
    for name, wanted in where.items():
        if '"' in name:
            raise InputError(f"Cannot filter by {name!r}: a metadata name in a filter has no double quote.")
        for operator, value in _operators(name, wanted):
            test, values = _test(name, operator, value)
            if name in COLUMNS:
                items = f"json_each(json_array(passages.{name}))"
            else:
                items = "json_each(passages.metadata, ?)"
                parameters.append(f'$."{name}"')
            negation = "NOT " if operator == "ne" else ""
            conditions.append(f"{negation}EXISTS (SELECT 1 FROM {items} AS item WHERE {test})")
            parameters += values
    return " AND ".join(conditions), parameters


def _operators(name: str, wanted: Any) -> list[tuple[str, Any]]:
    if isinstance(wanted, Mapping):
        for operator in wanted:
            if operator not in OPERATORS:
                near = difflib.get_close_matches(str(operator), OPERATORS, n=1, cutoff=0)[0]
                raise InputError(f"Unknown operator {operator!r} in the filter on {name!r}. Did you mean {near!r}?")
        if not wanted:
            raise InputError(f"The filter on {name!r} is empty. Known operators: {', '.join(OPERATORS)}.")
        return list(wanted.items())
    return [("in" if isinstance(wanted, list | tuple | set | frozenset) else "eq", wanted)]


def _test(name: str, operator: str, value: Any) -> tuple[str, list[Any]]:
    """The SQL of one comparison with `item`. Values of different types never match: 2000 is not below "a"."""
    if operator == "in":
        if isinstance(value, str | Mapping) or not hasattr(value, "__iter__"):
            raise InputError(f"The filter on {name!r} needs a list for 'in', not {value!r}.")
        tests = [_test(name, "eq", item) for item in value]
        joined = " OR ".join(f"({test})" for test, _ in tests) or "0"
        return joined, [parameter for _, parameters in tests for parameter in parameters]
    sign = COMPARISONS.get(operator, "=")
    if value is None and sign == "=":
        return "item.type = 'null'", []
    if isinstance(value, bool) and sign == "=":
        return "item.type = ?", ["true" if value else "false"]
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63:
        return f"item.type IN ('integer', 'real') AND item.atom {sign} ?", [value]
    if isinstance(value, str):
        return f"item.type = 'text' AND item.atom {sign} ?", [value]
    raise InputError(
        f"The filter on {name!r} compares with {value!r}; use numbers or strings; for equality also true, false, null."
    )
