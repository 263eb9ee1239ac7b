"""The V of one layer after it has moved to the host.

All rows but the newest are in host memory (page-locked if the device is a GPU), position-major, (S, G, D). So the rows
of one position are adjacent, an ascending list of rows reads upwards, and a block of new rows is one copy. The newest
rows are staged on the device and move to the host in blocks. On a CPU engine both are the same memory; the bytes are
counted separately all the same.
"""

import torch

# So many positions are sent at a time: a copy to the host takes microseconds at any size, a position 1/S of V's memory.
STAGED_ROWS = 32


def copy_stream(device: torch.device) -> "torch.cuda.Stream | None":
    """A CUDA stream for copies to the host in parallel with computing; `None` on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class HostValues:
    """V of one layer with `heads` KV heads (times the batch size, if any) of `head_dim`."""

    def __init__(
        self,
        heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        staged_rows: int = STAGED_ROWS,
    ) -> None:
        self._heads, self._device = heads, device
        self._cuda = device.type == "cuda"
        self._host = torch.empty((capacity, heads, head_dim), dtype=dtype, pin_memory=self._cuda)
        self._staging = torch.empty((staged_rows, heads, head_dim), dtype=dtype, device=device)
        self._base = 0  # lower positions are in host memory, the others in `_staging`
        self._arrival: torch.cuda.Event | None = None  # of a copy to the host that may be running

    @property
    def capacity(self) -> int:
        """Positions on the host."""
        return self._host.shape[0]

    @property
    def host_bytes(self) -> int:
        """Bytes allocated in host memory."""
        return self._host.numel() * self._host.element_size()

    @property
    def device_bytes(self) -> int:
        """Bytes of staging, on the device."""
        return self._staging.numel() * self._staging.element_size()

    def load(self, v: torch.Tensor, stream: "torch.cuda.Stream | None" = None) -> None:
        """Replace all values by those (G, S, D) of the positions 0 ... S - 1.

        With a `stream` the copy runs on it, after the current stream's work. Reads wait for it.
        """
        rows, count = v.transpose(0, 1), v.shape[1]  # (S, G, D)
        self._base = count
        if stream is None:
            self._host[:count].copy_(rows)
            return
        rows = rows.contiguous()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._host[:count].copy_(rows, non_blocking=True)
            self._arrival = stream.record_event()
        rows.record_stream(stream)  # its memory must not be reused before the copy is complete

    def put(self, start: int, v: torch.Tensor) -> None:
        """Write values (G, T, D) at the positions `start ...`, without a gap to the last position."""
        rows = v.transpose(0, 1)  # (T, G, D)
        if start < self._base:
            below = min(self._base - start, rows.shape[0])
            self._await()
            self._host[start : start + below].copy_(rows[:below])
            start, rows = start + below, rows[below:]
        block = self._staging.shape[0]
        assert start <= self._base + block, "positions must be contiguous"
        while rows.shape[0]:
            if start == self._base + block:
                self._flush()
            part = rows[: self._base + block - start]
            self._staging[start - self._base :][: part.shape[0]].copy_(part)
            start, rows = start + part.shape[0], rows[part.shape[0] :]

    def fetch(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Values (U, D) of ascending `rows` (U,), each `position * G + head`, and how many came from the host."""
        self._await()
        at = rows.cpu()  # on CUDA this waits for the layer so far, because the host gathers the rows
        edge = self._base * self._heads
        inside = int(torch.searchsorted(at, edge)) if at.numel() and int(at[-1]) >= edge else at.numel()
        flat = self._host.view(-1, self._host.shape[2])
        if self._cuda:
            gathered = torch.empty((inside, flat.shape[1]), dtype=flat.dtype, pin_memory=True)
            torch.index_select(flat, 0, at[:inside], out=gathered)
            found = gathered.to(self._device, non_blocking=True)
        else:
            found = flat.index_select(0, at[:inside])
        if inside == at.numel():
            return found, inside
        staged = self._staging.view(-1, flat.shape[1]).index_select(0, rows[inside:] - edge)
        return torch.cat((found, staged)), inside

    def take(self, low: int, high: int) -> torch.Tensor:
        """A copy of the values (G, high - low, D) of the positions `low ... high - 1` on the device."""
        self._await()
        found = self._host[low : min(high, self._base)].to(self._device)
        if high > self._base:
            found = torch.cat((found, self._staging[max(0, low - self._base) : high - self._base]))
        return found.transpose(0, 1).contiguous()

    def reserve(self, capacity: int) -> None:
        """Grow to `capacity` positions."""
        if capacity > self._host.shape[0]:
            self._await()
            grown = torch.empty((capacity, *self._host.shape[1:]), dtype=self._host.dtype, pin_memory=self._cuda)
            grown[: self._base].copy_(self._host[: self._base])
            self._host = grown

    def _flush(self) -> None:
        """Move the staged rows to the host; on CUDA a later `fetch` waits for the copy."""
        self._await()
        block = self._staging.shape[0]
        self._host[self._base : self._base + block].copy_(self._staging, non_blocking=True)
        self._base += block
        if self._cuda:
            self._arrival = torch.cuda.current_stream(self._device).record_event()

    def _await(self) -> None:
        if self._arrival is not None:
            self._arrival.synchronize()
            self._arrival = None
