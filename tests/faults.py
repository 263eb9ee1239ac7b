"""Faults that tests put in the place of functions."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from ragkv.fusion.passes import _LayerLoop


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that raises `error`, whatever its arguments."""

    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


def os_error(code: int) -> OSError:
    """The error with which the system's calls fail."""
    return OSError(code, os.strerror(code))


def at_each_layer(patch: pytest.MonkeyPatch, act: Callable[[int], object]) -> None:
    """Have `act` called with each layer's number before prompts pass it, in any pass."""
    run_layer = _LayerLoop._run_layer

    def spy(self: _LayerLoop, layer: int, prompts: Any) -> Any:
        act(layer)
        return run_layer(self, layer, prompts)

    patch.setattr(_LayerLoop, "_run_layer", spy)
