"""The repr of values that people print: reports, answers, documents. It fits the screen, whatever they hold."""

import dataclasses
from typing import Any

FEW, LINE = 3, 100  # A longer tuple is shown by its length, and a longer text or other value by its beginning.


def brief(value: Any) -> str:
    """The repr of a dataclass without what is long. A class takes it by `__repr__ = brief`."""
    shown = (f"{one.name}={_short(getattr(value, one.name))}" for one in dataclasses.fields(value))
    return f"{type(value).__name__}({', '.join(shown)})"


def _short(value: Any) -> str:
    if isinstance(value, tuple) and len(value) > FEW:
        return f"<{len(value)} items>"
    text = repr(value)
    return (
        text
        if dataclasses.is_dataclass(value) or isinstance(value, tuple) or len(text) <= LINE
        else f"{text[:LINE]}..."
    )
