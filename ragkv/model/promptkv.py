"""The KV of one prompt during prefill and decoding, and the transformers `Cache` through which
layers fill it.

Keys are stored rotated, at their absolute positions; space for the answer is allocated with the
prompt. The `Cache` of a layer receives keys before RoPE, because the layer gets the identity
rotation. So every key can be recorded free of its position when it is made, and no key is ever
rotated back. The KV belongs to one request.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import Cache, DynamicCache

from .attention import Watch, attend, whole_blocks
from .decoding_attention import attend_decoding
from .rows import LayerPass, Pause, Rows, Seen


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

        def empty(positions: int) -> torch.Tensor:
            return torch.empty(
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

    def grown(self, positions: int) -> "PromptKV":
        """A copy, all of it on the device, with space for so many positions behind the
        valid ones.
        """
        like = self.keys[0]
        shape = KVShape(len(self.keys), *self.keys[0].shape[1::2])
        made = PromptKV(shape, self.length + positions, like.dtype, like.device)
        for layer in range(shape.layers):
            made.put(layer, 0, *self.view(layer, self.length))
        made.length = self.length
        return made

    def to_dynamic_cache(self) -> DynamicCache:
        """A `DynamicCache` with S rotated positions in every layer, which shares no memory with
        this KV.
        """
        cache = DynamicCache()
        for layer in range(len(self.keys)):
            k_rot, v = self.view(layer, self.length)
            cache.update(k_rot, v, layer)  # concatenates, hence copies
        return cache

    @property
    def device_bytes(self) -> int:
        """Bytes allocated on the model's device, which may be the CPU."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


class Recording:
    """Collects the raw KV of the positions `start ... stop - 1` while layers make it: (L, 2, G, T,
    D).
    """

    def __init__(self, start: int, stop: int, kv: torch.Tensor) -> None:
        # positions; `stop` is excluded
        self.start = start
        self.stop = stop
        self.kv = kv  # (L, 2, G, T, D), filled as layers run
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
        inside = (rows.positions >= self.start) & (rows.positions < self.stop)
        target_rows = rows.positions[inside] - self.start
        self.kv[layer, 0].index_copy_(1, target_rows, k_raw[0][:, inside])
        self.kv[layer, 1].index_copy_(1, target_rows, v[0][:, inside])
        if target_rows.numel():
            self._reached(layer, int(rows.positions[inside][-1]) + 1)

    def _reached(self, layer: int, stop: int) -> None:
        if layer == self.kv.shape[0] - 1:  # after it, every earlier position has been recorded
            self.filled_to = max(self.filled_to, stop)


class KVRows:
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

    def last_row(self) -> "KVRows":
        """The last of the rows alone."""
        if len(self.rows) == 1:
            return self
        last = Rows.of(self.rows.positions[-1:])
        return KVRows(self._kv, last, self._windows, self._record, self._watch)

    def put(self, layer: int, k_raw: torch.Tensor, k_rot: torch.Tensor, v: torch.Tensor) -> Seen:
        """Write what a layer made, each (1, G, R, D), and return keys and values of all positions
        so far.
        """
        self._kv.write(layer, self.rows, k_rot, v)
        if self._record is not None:
            self._record.add(layer, self.rows, k_raw, v)
        return self._kv.view(layer, self.rows.stop)

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


class Captured(Exception):
    """Raised by `CaptureCache` to stop a layer before its attention."""

    def __init__(self, k_raw: torch.Tensor, v: torch.Tensor) -> None:
        super().__init__()
        self.k_raw = k_raw
        self.v = v


class CaptureCache(Cache):
    """Stops a layer when it has made its keys and values."""

    def __init__(self, step: LayerPass | None) -> None:
        """`step` is given them, too."""
        super().__init__(layers=[])
        self._step = step

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Raise `Captured` with k_raw and v, each (1, G, R, D)."""
        if self._step is not None:
            self._step.update(key_states, value_states, layer_idx)
        raise Captured(key_states, value_states)
