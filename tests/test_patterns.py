"""No regular expression takes more than linear time, whatever text it meets: none has nested or
lazy repeats.

Python's `re` keeps Python's lock while it searches, so one slow pattern stops a server. The
patterns are found in the code: a new one is tested without being named here.
"""

import ast
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from re import _parser  # type: ignore[attr-defined]  # the standard library's own, without types
from typing import Any

import pytest

import ragkv
from ragkv.retrieval.splitter import MARKDOWN

from .timing import assert_linear, processor_seconds

CALLS = {"compile", "search", "match", "fullmatch", "sub", "split", "findall", "finditer"}
# Files whose lazy or nested patterns never meet long text: the first 4 KiB of a page or file, names
# of environment variables.
BOUNDED = {
    "<!--.*?-->": "loading.py",
    "RAGKV(_": "setting_values.py",
    r"\A(?:[^\n]*\n)?": "text.py",
    "^(?:Received|From": "signatures.py",
    "[A-Za-z][A-Za-z-]*:": "signatures.py",
}


def patterns() -> dict[str, str]:
    """Every constant pattern in the package, and the file that has it."""
    found = dict.fromkeys(filter(None, MARKDOWN), "splitter.py")
    for file in sorted(Path(ragkv.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            match node:
                case ast.Call(ast.Attribute(ast.Name("re"), name), [ast.Constant(given), *_]) if (
                    name in CALLS
                ):
                    found[given.decode("latin-1") if isinstance(given, bytes) else str(given)] = (
                        file.name
                    )
    return found


PATTERNS = patterns()


def faults(parsed: Any, inside: bool = False) -> Iterator[str]:
    """What may take more than linear time in a parsed pattern. A possessive repeat never
    goes back.
    """
    for kind, value in parsed:
        name = str(kind)
        if name == "MIN_REPEAT" and value[1] == _parser.MAXREPEAT:
            yield "a lazy repeat"
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            unbounded = value[1] == _parser.MAXREPEAT
            if unbounded and inside:
                yield "a repeat in a repeat"
            yield from faults(value[2], inside or unbounded)
        else:
            for inner in _inner(value):
                yield from faults(inner, inside)


def _inner(value: Any) -> Iterator[Any]:
    if isinstance(value, _parser.SubPattern):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _inner(one)


@pytest.mark.parametrize(
    ("pattern", "fault"), [(r"# (.*?)\s*$", "lazy"), (r"(?:a+)+b", "repeat in"), (r"(?:a++)+b", "")]
)
def test_a_lazy_or_a_nested_repeat_is_found(pattern: str, fault: str) -> None:
    assert fault in " ".join(faults(_parser.parse(pattern))) and bool(fault) == any(
        faults(_parser.parse(pattern))
    )


def test_no_pattern_has_nested_or_lazy_repeats() -> None:
    found = {one: fault for one in PATTERNS for fault in faults(_parser.parse(one))}
    assert len(PATTERNS) > 20
    assert {one: fault for one, fault in found.items() if not one.startswith(tuple(BOUNDED))} == {}


def letters(pattern: str) -> str:
    """Characters that a pattern may meet: its own literals, and some of each class."""
    return "".join(dict.fromkeys([*re.sub(r"\\.|[\[\]().*+?{}|^$]", "", pattern), *"# \n\ta1<-&"]))


@pytest.mark.parametrize(
    "pattern", sorted(one for one in PATTERNS if not one.startswith(tuple(BOUNDED)))
)
def test_a_pattern_takes_linear_time(pattern: str) -> None:
    compiled = re.compile(pattern)
    for one, form in product(letters(pattern)[:12], ("{0}\x01", "# a{0}b", "{0} x" * 2)):

        def seconds(size: int, one: str = one, form: str = form) -> float:
            text = form.format(one * size)
            return processor_seconds(lambda: [*compiled.finditer(text)])

        if seconds(16_000) > 0.02:  # linear work of a pattern takes a hundredth of that
            assert_linear(seconds, 4_000)
