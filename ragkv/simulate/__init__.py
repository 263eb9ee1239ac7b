"""The simulator's door: real and generated traces, replayed through the policies the live store runs. No torch here."""

from .replay import Replay, replay
from .trace import Row, Trace, read_rows, write_rows

__all__ = ["Replay", "Row", "Trace", "read_rows", "replay", "write_rows"]
