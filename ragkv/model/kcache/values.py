"""Where one layer's V lies once it has left the device.

All rows but the newest are in host memory (pinned where the device is a GPU), position-major, (S, G, D): the rows of
one position lie together, an ascending list of rows reads upwards, and a block of new ones is one copy. The newest
are staged on the device and move to the host a block at a time. On a CPU engine both are the same memory; the bytes
are counted as if they were not.
"""

import torch

STAGED_ROWS = 32  # positions: a copy to the host costs microseconds whatever its size, a position 1/S of the device's V


def copy_stream(device: torch.device) -> "torch.cuda.Stream | None":
    """A stream for copies to the host beside what computes; `None` where there are none."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class HostValues:
    """V of one layer: `heads` KV heads (times the batch, where there is one) of `head_dim`."""

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
        self._base = 0  # positions below it lie in host memory, those from it on in `_staging`
        self._arrival: torch.cuda.Event | None = None  # of a copy to the host that may be under way

    @property
    def host_bytes(self) -> int:
        """Bytes allocated in host memory."""
        return self._host.numel() * self._host.element_size()

    @property
    def device_bytes(self) -> int:
        """Bytes of staging, on the device."""
        return self._staging.numel() * self._staging.element_size()

    def load(self, v: torch.Tensor, beside: "torch.cuda.Stream | None" = None) -> None:
        """Take the values (G, S, D) of the positions 0 ... S - 1, in place of all there were.

        On CUDA the copy runs on the stream `beside`, after what the current one has under way; what reads here waits.
        """
        rows, count = v.transpose(0, 1), v.shape[1]  # (S, G, D)
        self._base = count
        if beside is None:
            self._host[:count].copy_(rows)
            return
        rows = rows.contiguous()
        beside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(beside):
            self._host[:count].copy_(rows, non_blocking=True)
            self._arrival = beside.record_event()
        rows.record_stream(beside)  # its memory may be used again when the copy is over, not before

    def put(self, start: int, v: torch.Tensor) -> None:
        """Write values (G, T, D) at the positions `start ...`, none of which is beyond the next free one."""
        rows = v.transpose(0, 1)  # (T, G, D)
        if start < self._base:
            below = min(self._base - start, rows.shape[0])
            self._await()
            self._host[start : start + below].copy_(rows[:below])
            start, rows = start + below, rows[below:]
        room = self._staging.shape[0]
        assert start <= self._base + room, "positions come one after another"
        while rows.shape[0]:
            if start == self._base + room:
                self._flush()
            part = rows[: self._base + room - start]
            self._staging[start - self._base :][: part.shape[0]].copy_(part)
            start, rows = start + part.shape[0], rows[part.shape[0] :]

    def fetch(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Values (U, D) of ascending `rows` (U,), a row being `position * G + head`; how many came from the host."""
        self._await()
        at = rows.cpu()  # on CUDA it waits for the layer so far: the host must know what to gather
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
        """Values (G, high - low, D) of those positions, on the device: a copy."""
        self._await()
        found = self._host[low : min(high, self._base)].to(self._device)
        if high > self._base:
            found = torch.cat((found, self._staging[max(0, low - self._base) : high - self._base]))
        return found.transpose(0, 1).contiguous()

    def on_host(self, low: int, high: int) -> int:
        """How many rows of the positions `low ... high - 1` lie in host memory."""
        return self._heads * max(0, min(high, self._base) - low)

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` positions, keeping what is there."""
        if capacity > self._host.shape[0]:
            self._await()
            grown = torch.empty((capacity, *self._host.shape[1:]), dtype=self._host.dtype, pin_memory=self._cuda)
            grown[: self._base].copy_(self._host[: self._base])
            self._host = grown

    def _flush(self) -> None:
        """Move what is staged to the host; on CUDA a later `fetch` waits for it with its own rows."""
        self._await()
        room = self._staging.shape[0]
        self._host[self._base : self._base + room].copy_(self._staging, non_blocking=True)
        self._base += room
        if self._cuda:
            self._arrival = torch.cuda.current_stream(self._device).record_event()

    def _await(self) -> None:
        if self._arrival is not None:
            self._arrival.synchronize()
            self._arrival = None
