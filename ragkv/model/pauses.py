"""Pauses within a layer: the thread that computes many rows lets others compute between two parts of it.

Without them a token of another request waits for a whole layer, which takes long where the prompt is long. A layer
calls `pause` between the tiles of its MLP and the heads or blocks of its attention. What happens then is up to the
pass, which says so by `pausing`: a layer of transformers takes no argument for it, so it is kept for the thread.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TILE_ROWS = 512  # A pass over more rows than this pauses within its layers.

_thread = threading.local()


@contextmanager
def pausing(pause: Callable[[], None]) -> Iterator[None]:
    """Inside the block, layers that this thread runs call `pause` between their parts. What it raises ends the pass."""
    before, _thread.pause = getattr(_thread, "pause", None), pause
    try:
        yield
    finally:
        _thread.pause = before


def pause() -> None:
    """Let others compute, if this thread's pass allows it; they may run the same layers meanwhile, on this thread."""
    if (call := getattr(_thread, "pause", None)) is None:
        return
    _thread.pause = None
    try:
        call()
    finally:
        _thread.pause = call
