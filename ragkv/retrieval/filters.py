"""Metadata filters, translated to SQL. They apply before the ranking, so that a filtered search
still finds k results.

A filter is a mapping as it comes from JSON or a keyword: `{"lang": "en", "topic": ["a", "b"],
"year": {"gte": 2000, "lt": 2010}}`. All conditions must hold. If the metadata value is a list, one
matching item is enough. `document_id` and `source` can be used like metadata names.
"""

import difflib
import json
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ragkv.errors import InputError
from ragkv.runtime.outside import check_kind

COMPARISONS = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
OPERATORS = ("eq", "ne", "in", *COMPARISONS)
# Names of metadata that are columns of the table `documents`, and `OF_PASSAGES` those
# of `passages`.
COLUMNS = {"document_id": "documents.id", "source": "documents.source"}
OF_PASSAGES = ("page", "section")
# SQLite takes an expression of at most 1,000 levels, and each of `MAX_CONDITIONS` is one.
MAX_CONDITIONS = 256
NAME_CHARS = 256

Where = Mapping[str, Any]


class Condition(NamedTuple):
    """A condition over the table `passages`."""

    sql: str = "1"
    parameters: Sequence[Any] = ()

    def joined(self, other: "Condition") -> "Condition":
        """Both conditions together."""
        return Condition(f"{self.sql} AND {other.sql}", [*self.parameters, *other.parameters])


# The condition that all passages meet.
EVERYTHING = Condition()


def condition_of(where: Where) -> Condition:
    """The condition that a filter is. Raises `InputError` for an invalid one."""
    if not isinstance(where, Mapping):
        raise InputError(
            f"A filter is a mapping of metadata names to conditions, not {reprlib.repr(where)}."
        )
    of_documents = Condition()
    of_passages = Condition()
    count = 0
    for name, wanted in where.items():
        _check_name(name)
        for operator, value in _operators(name, wanted):
            count += 1
            values = _values(name, operator, value)
            if name in OF_PASSAGES:
                of_passages = of_passages.joined(_condition(name, operator, values))
            else:
                of_documents = of_documents.joined(_condition(name, operator, values))
    if count > MAX_CONDITIONS:
        raise InputError(
            f"The filter has {count} conditions; at most {MAX_CONDITIONS} are possible."
        )
    sql = f"document_id IN (SELECT id FROM documents WHERE {of_documents.sql})"
    return Condition(sql, of_documents.parameters).joined(of_passages)


def _condition(name: str, operator: str, values: list[Any]) -> Condition:
    """One condition, over the table `documents` or `passages`."""
    test, parameter = _test(operator, values)
    path = f"$.{json.dumps(name, ensure_ascii=False)}"
    if name in COLUMNS:
        items = f"json_each(json_array({COLUMNS[name]}))"
        parameters = [parameter]
    elif name in OF_PASSAGES:  # a document's own metadata may have the name, too
        above = "(SELECT metadata FROM documents WHERE id = document_id)"
        own = f"passages.{name}"
        items = f"json_each(iif({own} IS NULL, {above}, json_object('{name}', {own})), ?)"
        parameters = [path, parameter]
    else:
        items = "json_each(documents.metadata, ?)"
        parameters = [path, parameter]
    negation = "NOT " if operator == "ne" else ""
    return Condition(f"{negation}EXISTS (SELECT 1 FROM {items} AS item WHERE {test})", parameters)


def _check_name(name: str) -> None:
    """Raise `InputError` for a name that has no place in an SQLite path."""
    check_kind("A name in the filter", name, str)
    if len(name) > NAME_CHARS:
        raise InputError(
            f"A name in the filter has {len(name)} characters; at most {NAME_CHARS} are possible."
        )
    if '"' in name or not _is_storable(name):
        raise InputError(
            f"Cannot filter by {name!r}: a name in a filter has no double quote, no NUL and no half "
            "of a surrogate pair."
        )


def _is_storable(text: str) -> bool:
    """Whether SQLite takes the whole text."""
    return re.search("[\0\ud800-\udfff]", text) is None


def _operators(name: str, wanted: Any) -> list[tuple[str, Any]]:
    if not isinstance(wanted, Mapping):
        return [("in" if isinstance(wanted, list | tuple | set | frozenset) else "eq", wanted)]
    for operator in wanted:
        if operator not in OPERATORS:
            near = difflib.get_close_matches(str(operator), OPERATORS, n=1, cutoff=0)[0]
            raise InputError(
                f"Unknown operator {reprlib.repr(operator)} in the filter on {name!r}. Did you "
                f"mean {near!r}?"
            )
    if not wanted:
        raise InputError(
            f"The filter on {name!r} is empty. Known operators: {', '.join(OPERATORS)}."
        )
    return list(wanted.items())


def _test(operator: str, values: list[Any]) -> tuple[str, Any]:
    """The SQL that compares `item`, and its parameter. Values of different types never match: 2000
    is not below "a".
    """
    if sign := COMPARISONS.get(operator):
        types = "('text')" if isinstance(values[0], str) else "('integer', 'real')"
        return f"item.type IN {types} AND item.atom {sign} ?", values[0]
    rows = {
        one: f"replace({one}.type, 'real', 'integer'), ifnull({one}.atom, 0)"
        for one in ("item", "one")
    }
    return f"({rows['item']}) IN (SELECT {rows['one']} FROM json_each(?) AS one)", json.dumps(
        values
    )


def _values(name: str, operator: str, value: Any) -> list[Any]:
    """What a condition compares with. Raises `InputError` for what cannot be compared with."""
    if operator != "in":
        values = [value]
    elif isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise InputError(
            f"The filter on {name!r} needs a list for 'in', not {reprlib.repr(value)}."
        )
    else:
        values = list(value)
    for one in values:
        is_constant = one is None or isinstance(one, bool)
        is_number = isinstance(one, int | float) and abs(one) < 2**63
        is_text = isinstance(one, str) and _is_storable(one)
        if not (is_number or is_text or is_constant) or (is_constant and operator in COMPARISONS):
            raise InputError(
                f"The filter on {name!r} compares with {reprlib.repr(one)}; use numbers or "
                "strings without NUL and halves of surrogate pairs; for "
                "equality also true, false, null."
            )
    return values
