"""Faults that tests put in the place of functions."""

import os
from collections.abc import Callable
from typing import Any


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that raises `error`, whatever its arguments."""

    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


def os_error(code: int) -> OSError:
    """The error with which the system's calls fail."""
    return OSError(code, os.strerror(code))
