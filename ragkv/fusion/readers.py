"""What requests read by: threads, and memory that is used again.

Memory fresh from the system is filled with zeros, page by page, when it is first written to. Where a request reads
small slices its buffers are a third of what it reads, and the disk waits meanwhile.
"""

from collections import deque
from concurrent.futures import ThreadPoolExecutor

import torch

from ragkv.runtime import Closing, openmp
from ragkv.store import aligned_empty

KEPT = 2  # pieces of memory
KEPT_BYTES = 64 * 1024**2  # of a piece; larger ones go back to the system


class Readers(Closing):
    """An engine's reader threads and their memory. Thread-safe."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.pool = ThreadPoolExecutor(threads, "ragkv-reader", initializer=openmp.use_one_thread)
        self._spare: deque[torch.Tensor] = deque(maxlen=KEPT)

    def take(self, size: int, device: torch.device) -> torch.Tensor:
        """At least `size` bytes on the host from a page on, with any values; pinned for a CUDA `device`."""
        if device.type != "cpu":  # kept by torch, which knows what is still being copied from it
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        try:
            memory = self._spare.popleft()
        except IndexError:
            memory = torch.empty(0, dtype=torch.uint8)
        return memory if memory.numel() >= size else aligned_empty((size,), torch.uint8)

    def give_back(self, memory: torch.Tensor) -> None:
        """Nobody reads what lies in `memory`, and nothing is being read into it, any more."""
        if memory.numel() <= KEPT_BYTES and not memory.is_pinned():
            self._spare.append(memory)

    def close(self) -> None:
        self.pool.shutdown()
        self._spare.clear()
