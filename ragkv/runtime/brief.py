"""The repr of values that people print: reports, answers, documents. It fits the screen, whatever
they hold.
"""

import dataclasses
import reprlib
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxtuple = 3
_SHORT.maxstring = 100
_SHORT.maxother = 400


def brief(value: Any) -> str:
    """The repr of a dataclass, cut where a field is long. A class takes it by `__repr__ =
    brief`.
    """
    shown = (
        f"{one.name}={_SHORT.repr(getattr(value, one.name))}" for one in dataclasses.fields(value)
    )
    return f"{type(value).__name__}({', '.join(shown)})"
