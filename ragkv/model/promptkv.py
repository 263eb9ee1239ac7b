"""The KV of one prompt during prefill and decoding.

Keys are stored rotated, at their absolute positions. Space for the answer is allocated with the
prompt. A layer gets the identity rotation, so its keys arrive before RoPE. They are recorded
without positions, and no key is ever rotated back. The KV belongs to one request.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .attention import Watch, attend, whole_blocks
from .decoding_attention import attend_decoding
from .recording import Recording
from .rows import Pause, Rows, Seen


class KVShape(NamedTuple):
    """The shape of one token's KV."""

    layers: int  # L
    kv_heads: int  # G
    head_dim: int  # D


class PromptKV:
    """Rotated keys and values of one prompt, per layer (1, G, capacity, D), where a last block of
    keys is whole.
    """

    takes_drafts = True  # whether a decoding step may have several rows

    def __init__(
        self,
        shape: KVShape,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        resident_layers: int | None = None,
    ) -> None:
        """Values are allocated at once for the first `resident_layers` layers; `None` means for
        all.
        """
        layers, kv_heads, head_dim = shape

        # On a device attention reads the rest of the last block, which weighs nothing.
        allocate = torch.empty if device.type == "cpu" else torch.zeros

        def empty(positions: int) -> torch.Tensor:
            return allocate(
                (1, kv_heads, whole_blocks(positions), head_dim), dtype=dtype, device=device
            )

        resident = layers if resident_layers is None else resident_layers
        self.keys = [empty(capacity) for _ in range(layers)]
        self.values = [empty(capacity if layer < resident else 0) for layer in range(layers)]
        self.length = 0  # S: positions that are valid in every layer once the pass is over
        self.capacity = capacity
        self._is_finite = False  # whether what is behind the valid positions is

    def write(self, layer: int, rows: Rows, k_rot: torch.Tensor, v: torch.Tensor) -> None:
        """Put `k_rot` and `v`, each (1, G, R, D), at the positions of `rows`."""
        if rows.start is not None:
            self.put(layer, rows.start, k_rot, v)
        else:
            self.keys[layer].index_copy_(2, rows.positions, k_rot.to(self.keys[layer].dtype))
            self.values[layer].index_copy_(2, rows.positions, v)

    def put(self, layer: int, start: int, k_rot: torch.Tensor, v: torch.Tensor) -> None:
        """Put `k_rot` and `v`, each (1, G, T, D), at the positions `start ... start + T - 1`."""
        self.keys[layer].narrow(2, start, k_rot.shape[2]).copy_(k_rot)
        self.values[layer].narrow(2, start, v.shape[2]).copy_(v)

    def view(self, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first `length` positions, each (1, G, length, D): views."""
        return self.keys[layer].narrow(2, 0, length), self.values[layer].narrow(2, 0, length)

    def attend(
        self,
        layer: int,
        q_rot: torch.Tensor,
        rows: Rows,
        window: int | None,
        scaling: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Attention of the rows being decoded, q_rot (1, H, R, D): they have just been `put` at
        `length` and behind.
        """
        return attend_decoding(
            q_rot, self.keys[layer], self.values[layer], rows, window, scaling, softcap
        )

    def make_finite(self) -> None:
        """Clear what is behind the valid positions: `attend` reads some of it, though it weighs
        nothing.
        """
        if not self._is_finite:
            for tensor in (*self.keys, *self.values):
                tensor[:, :, self.length :].zero_()
            self._is_finite = True

    def finish_prefill(self, layer: int, length: int) -> None:
        """Called when the prefill of `layer` is complete: `length` positions are valid, only
        decoding follows.
        """

    @property
    def device_bytes(self) -> int:
        """Bytes allocated on the model's device, which may be the CPU."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


class PromptPart:
    """Some rows of a prompt: their KV is written to the prompt's, and they attend over all
    of it.
    """

    def __init__(
        self,
        kv: PromptKV,
        rows: Rows,
        windows: Sequence[int | None],  # of each layer
        record: Recording | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.rows = rows
        self._kv = kv
        self._windows = windows
        self._record = record
        self._watch = watch

    def last_row(self) -> "PromptPart":
        """The last of the rows alone."""
        if len(self.rows) == 1:
            return self
        return PromptPart(self._kv, self.rows.last, self._windows, self._record, self._watch)

    def put(self, layer: int, k_raw: torch.Tensor, k_rot: torch.Tensor, v: torch.Tensor) -> Seen:
        """Write what a layer made, each (1, G, R, D), and return keys and values of all positions
        so far.
        """
        self._kv.write(layer, self.rows, k_rot, v)
        if self._record is not None:
            self._record.add(layer, self.rows, k_raw, v)
        stop = self.rows.stop
        return self._kv.view(layer, stop if k_rot.device.type == "cpu" else whole_blocks(stop))

    def attend(
        self,
        layer: int,
        q_rot: torch.Tensor,
        seen: Seen,
        scaling: float,
        cap: float | None,
        pause: Pause,
    ) -> torch.Tensor:
        """Queries (1, H, R, D) over the whole prompt -> (1, H, R, D)."""
        window = self._windows[layer]
        if self._watch is not None:
            self._watch.add(q_rot, seen[0], self.rows, window, scaling, cap)
        return attend(q_rot, *seen, self.rows, window, scaling, cap, pause)
