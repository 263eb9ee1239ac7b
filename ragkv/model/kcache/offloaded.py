"""A prompt's KV whose V is in host memory during decoding (KCache sections 3.1 to 3.3).

During prefill a layer's V is on the device, because every row attends over all of it. When the pass
has finished the layer, V moves to the host, and its device memory is free for the next layer. So at
most two layers of V are on the device at once. (An asking selector runs most layers twice. Then V
moves in the second pass, and until then all V is on the device.) Decoding appends K on the device
and V through `HostValues`. Prefill uses ordinary attention, and so does everything that reads
`view`.
"""

from collections.abc import Callable

import torch

from ragkv.config import KCacheConfig

from ..adapter import Adapter
from ..promptkv import KVShape, PromptKV
from ..rows import Rows
from .topn import attend_top, choose
from .values import HostValues, copy_stream


class OffloadedKV(PromptKV):
    """Rotated keys of one prompt on the device; values of the layers from `resident_layers` on in
    host memory.
    """

    takes_drafts = False  # each row has values of its own to fetch

    def __init__(
        self,
        shape: KVShape,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        config: KCacheConfig,
    ) -> None:
        super().__init__(shape, capacity, dtype, device, config.resident_layers)
        self._config = config
        self._on_host: list[HostValues | None] = [None] * shape.layers
        self._copies = copy_stream(device)

    def put(self, layer: int, start: int, k_rot: torch.Tensor, v: torch.Tensor) -> None:
        """Put `k_rot` and `v`, each (1, G, T, D), at the positions `start ... start + T - 1`."""
        on_host = self._on_host[layer]
        if on_host is None:
            self._allocate_values(layer)
            super().put(layer, start, k_rot, v)
        else:
            self.keys[layer].narrow(2, start, k_rot.shape[2]).copy_(k_rot)
            on_host.put(start, v[0])

    def write(self, layer: int, rows: Rows, k_rot: torch.Tensor, v: torch.Tensor) -> None:
        """Put `k_rot` and `v`, each (1, G, R, D), at the positions of `rows`; scattered ones during
        prefill only.
        """
        self._allocate_values(layer)
        super().write(layer, rows, k_rot, v)

    def view(self, layer: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first `length` positions, each (1, G, length, D); values on the
        host are copied.
        """
        on_host = self._on_host[layer]
        if on_host is None:
            return super().view(layer, length)
        return self.keys[layer].narrow(2, 0, length), on_host.take(0, length).unsqueeze(0)

    def finish_prefill(self, layer: int, length: int) -> None:
        """Move the values of `layer` to the host and free their device memory, unless the layer is
        resident.
        """
        if layer < self._config.resident_layers or self._on_host[layer] is not None:
            return
        v = self.values[layer]
        on_host = HostValues(v.shape[1], v.shape[3], self.capacity, v.dtype, v.device)
        on_host.load(v[0, :, :length], self._copies)
        self._on_host[layer] = on_host
        self.values[layer] = v.new_empty((1, v.shape[1], 0, v.shape[3]))

    def attend(
        self,
        layer: int,
        q_rot: torch.Tensor,
        rows: Rows,
        window: int | None,
        scaling: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Attention of the decoded row, q_rot (1, H, 1, D), with the V rows of its N largest
        weights.
        """
        on_host = self._on_host[layer]
        if on_host is None:
            return super().attend(layer, q_rot, rows, window, scaling, softcap)
        stop = rows.stop
        start = 0 if window is None else max(0, stop - window)
        k_rot = self.keys[layer].narrow(2, start, stop - start)
        grouped = q_rot.view(k_rot.shape[1], -1, q_rot.shape[3])  # (G, H / G, D)
        choice = choose(grouped, k_rot[0], self._config.top_n or stop, scaling, softcap, start)
        return attend_top(choice, on_host.fetch).view(q_rot.shape)

    @property
    def host_bytes(self) -> int:
        """Bytes allocated in host memory."""
        return sum(on_host.host_bytes for on_host in self._on_host if on_host is not None)

    def _allocate_values(self, layer: int) -> None:
        """Allocate the values of `layer` on the device for its prefill."""
        if self._on_host[layer] is None and not self.values[layer].shape[2]:
            self.values[layer] = torch.zeros_like(self.keys[layer])


class Offloading:
    """Decides for one model which prompts are decoded with V in host memory, and makes their KV."""

    def __init__(self, adapter: Adapter, config: KCacheConfig) -> None:
        self._adapter = adapter
        self._config = config

    def refusal(self, tokens: int) -> str | None:
        """Why a prompt of `tokens` uses ordinary attention; `None` if it does not."""
        config = self._config
        layers = self._adapter.layer_count
        if config.top_n is None:
            return "kcache: top_n is None: attention is ordinary"
        if config.resident_layers >= layers:
            return (
                f"kcache: resident_layers is {config.resident_layers}, the model has "
                f"{layers}: attention is ordinary"
            )
        if config.top_n >= tokens:
            return (
                f"kcache: top_n is {config.top_n}, the prompt has {tokens} tokens: attention "
                "is ordinary"
            )
        return None

    def new_kv(self, tokens: int) -> Callable[[int], PromptKV]:
        """A function from a capacity to the empty KV for a prompt of `tokens`."""
        adapter = self._adapter
        config = self._config
        if self.refusal(tokens) is not None:
            return adapter.new_kv
        return lambda capacity: OffloadedKV(
            adapter.kv_shape, capacity, adapter.dtype, adapter.device, config
        )
