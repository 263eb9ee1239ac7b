"""Rows from token counts: what a conversation stored, and how much of the next prompt is a prefix of it."""

from collections.abc import Iterable

from ..trace import Row, Trace


def common(one: Iterable[int], other: Iterable[int]) -> int:
    """The length of the common prefix of two lists of ids."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


class Growth:
    """Rows in blocks of B tokens: in = ceil(prompt / B), sh = floor(shared / B), L = floor((prompt + response) / B)."""

    def __init__(self, block_tokens: int) -> None:
        self._block = block_tokens
        self._length: dict[str, int] = {}  # L of a conversation's last request
        self._rows: list[Row] = []

    def add(self, at: float, group: str, prompt_tokens: int, shared_tokens: int, response_tokens: int) -> None:
        """One request; `shared_tokens` of its prompt are a prefix of what its conversation stored."""
        shared = min(shared_tokens // self._block, self._length.get(group, 0))
        length = self._length[group] = (prompt_tokens + response_tokens) // self._block
        self._rows.append(Row(at, len(self._rows), group, -(-prompt_tokens // self._block), shared, length))

    def trace(self, name: str, *notes: str) -> Trace:
        """Everything added, as a trace."""
        return Trace.of(self._rows, self._block, name, notes)
