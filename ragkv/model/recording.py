"""Records the raw KV of chosen prompt positions while the layers compute it. It becomes entries of
chunks and blocks of conversations.
"""

from collections.abc import Sequence

import torch

from .rows import Rows


class Recording:
    """Collects the raw KV of the positions `start ... stop - 1` while layers make it: (L, 2, G, T,
    D).
    """

    def __init__(self, start: int, stop: int, kv: torch.Tensor) -> None:
        """`kv` is (L, 2, G, T + 1, D): the last place takes what is not in range."""
        # positions; `stop` is excluded
        self.start = start
        self.stop = stop
        self._places = kv
        self.kv = kv[..., :-1, :]  # (L, 2, G, T, D), filled as layers run
        # after a pass or decoding step, every position before it is recorded
        self.filled_to = start

    def put(self, layer: int | slice, start: int, part: torch.Tensor) -> None:
        """Record what is in range of `part` (2, G, T, D), for several layers (L, 2, G, T, D),
        placed at `start`.
        """
        low = max(start, self.start)
        high = min(start + part.shape[-2], self.stop)
        if low < high:
            self.kv[layer, :, :, low - self.start : high - self.start] = part[
                ..., low - start : high - start, :
            ]

    def append(self, start: int, made: Sequence[torch.Tensor]) -> None:
        """Record what a decoding step made from `start` on: k_raw and v (1, G, R, D) of each layer
        in turn.
        """
        self.put(slice(None), start, torch.cat(list(made)).view(-1, 2, *made[0].shape[1:]))
        self._reached(len(self.kv) - 1, min(start + made[0].shape[2], self.stop))

    def add(self, layer: int, rows: Rows, k_raw: torch.Tensor, v: torch.Tensor) -> None:
        """Record the positions of `k_raw` and `v` (1, G, R, D) that are in range."""
        if rows.start is not None:
            self.put(layer, rows.start, torch.cat((k_raw, v)))
            self._reached(layer, min(rows.stop, self.stop))
            return
        if (places := rows.cache.get(self)) is None:  # all layers need them
            places = rows.cache[self] = self.places(rows.positions)
        self.put_at(layer, places, torch.cat((k_raw, v)))
        self._reached(layer, min(rows.stop, self.stop))

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        """The index of each of `positions` (R,) among those recorded, or T: (R,)."""
        inside = (positions >= self.start) & (positions < self.stop)
        return torch.where(inside, positions - self.start, self.stop - self.start)

    def put_at(self, layer: int, places: torch.Tensor, part: torch.Tensor) -> None:
        """Record `part` (2, G, R, D) at `places` (R,)."""
        self._places[layer].index_copy_(2, places, part)

    def _reached(self, layer: int, stop: int) -> None:
        if layer == self.kv.shape[0] - 1:  # after it, every earlier position has been recorded
            self.filled_to = max(self.filled_to, stop)
