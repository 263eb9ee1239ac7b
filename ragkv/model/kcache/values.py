"""The V of one layer after it has moved to the host.

V is in host memory (page-locked if the device is a GPU), position-major, (S, G, D). So the rows of
one position are adjacent, and an ascending list of rows reads upwards. New rows are one copy, which
every reader waits for.

On CUDA the device gathers rows itself, from the page-locked memory, and the host waits for nothing
(`device/gathering_kernel.py`). Without Triton the host gathers them, and waits once for the list
of rows.
"""

import torch

from ..device.kernels import gathering_kernel


def copy_stream(device: torch.device) -> "torch.cuda.Stream | None":
    """A CUDA stream for copies to the host in parallel with computing; `None` on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class HostValues:
    """V of one layer with `heads` KV heads (times the batch size, if any) of `head_dim`."""

    def __init__(
        self, heads: int, head_dim: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._heads = heads
        self._device = device
        self._cuda = device.type == "cuda"
        self.kernel = gathering_kernel(device)
        self._host = torch.empty((capacity, heads, head_dim), dtype=dtype, pin_memory=self._cuda)
        self._arrival: torch.cuda.Event | None = None  # of a copy to the host that may be running

    @property
    def host_bytes(self) -> int:
        """Bytes allocated in host memory."""
        return self._host.numel() * self._host.element_size()

    def load(self, v: torch.Tensor, stream: "torch.cuda.Stream | None" = None) -> None:
        """Replace all values by those (G, S, D) of the positions 0 ... S - 1.

        With a `stream` the copy runs on it, after the current stream's work. Reads wait for it.
        """
        # (S, G, D)
        rows = v.transpose(0, 1)
        count = v.shape[1]
        if stream is None:
            self._host[:count].copy_(rows, non_blocking=self._device.type != "cpu")
            return
        rows = rows.contiguous()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._host[:count].copy_(rows, non_blocking=True)
            self._arrival = stream.record_event()
        rows.record_stream(stream)  # its memory must not be reused before the copy is complete

    def put(self, start: int, v: torch.Tensor) -> None:
        """Write values (G, T, D) at the positions `start ...`; on CUDA a later read waits for the
        copy.
        """
        self._await_on_device()
        rows = v.transpose(0, 1).contiguous()  # (T, G, D)
        self._host[start : start + rows.shape[0]].copy_(rows, non_blocking=True)
        if self._cuda:
            self._arrival = torch.cuda.current_stream(self._device).record_event()

    def fetch(self, rows: torch.Tensor) -> torch.Tensor:
        """Values of ascending `rows`, each `position * G + head`: (U, D), on a device with
        undefined ones behind them for each row that is -1.
        """
        flat = self._host.view(-1, self._host.shape[2])
        if self.kernel is not None:
            self._await_on_device()
            found: torch.Tensor = self.kernel.gather(flat, rows)
            return found
        if self._device.type == "cpu":
            return flat.index_select(0, rows)
        at = rows.cpu()  # waits for the layer so far, and so for the copies that it made
        self._await()
        at = at[at >= 0]
        gathered = torch.empty((len(at), flat.shape[1]), dtype=flat.dtype, pin_memory=self._cuda)
        torch.index_select(flat, 0, at, out=gathered)
        return gathered.to(self._device, non_blocking=True)

    def take(self, low: int, high: int) -> torch.Tensor:
        """A copy of the values (G, high - low, D) of the positions `low ... high - 1` on the
        device.
        """
        self._await()
        return self._host[low:high].to(self._device).transpose(0, 1).contiguous()

    def _await(self) -> None:
        """The host waits for the last copy."""
        if self._arrival is not None:
            self._arrival.synchronize()
            self._arrival = None

    def _await_on_device(self) -> None:
        """What the current stream does next waits for the last copy."""
        if self._arrival is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrival)
