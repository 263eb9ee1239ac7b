"""How many layers to read ahead: the read buffer of CachedAttention section 3.2.1, from running measurements.

The paper's `S_buf = B (T_load L_hist - T_pref L_new)` bytes is the amount by which loading falls behind computing over
a whole pass. In layers it is their number times the share of the loading time that computing does not hide. Reading
starts before the request gets the compute lock, so a deeper buffer fills while other requests compute.
"""

import math
import threading

MOST_BYTES = 256 * 1024**2  # of one request's buffers, whatever was measured
UNMEASURED = 2  # layers read ahead before anything was measured
_WEIGHT = 0.3  # of the latest measurement in the running mean


def buffer_bytes(bandwidth: float, load_s: float, compute_s: float) -> float:
    """S_buf in bytes, with `load_s = T_load L_hist` and `compute_s = T_pref L_new`; 0 if computing hides loading."""
    return bandwidth * max(0.0, load_s - compute_s)


def layers_ahead(load_s: float, compute_s: float, layers: int) -> int:
    """S_buf in layers of the request's own KV, at least 1: one layer is read while the one before is computed."""
    if load_s <= 0.0:
        return 1
    share = buffer_bytes(1.0, load_s, compute_s) / load_s  # a layer takes load_s / layers at any bandwidth
    return min(layers, max(1, math.ceil(share * layers)))


class Speeds:
    """Running means of the reading speed and of the computing speed. Thread-safe."""

    def __init__(self) -> None:
        self._byte_s: float | None = None
        self._row_layer_s: float | None = None
        self._lock = threading.Lock()

    def add_read(self, size_bytes: int, seconds: float) -> None:
        """Add a measurement of reading."""
        with self._lock:
            self._byte_s = _mean(self._byte_s, size_bytes, seconds)

    def add_compute(self, row_layers: int, seconds: float) -> None:
        """Add a measurement of computing; `row_layers` are the rows, summed over layers."""
        with self._lock:
            self._row_layer_s = _mean(self._row_layer_s, row_layers, seconds)

    @property
    def row_layer_s(self) -> float | None:
        """Seconds per row and layer, placing reused KV included; `None` before the first measurement."""
        return self._row_layer_s

    def ahead(self, size_bytes: int, row_layers: int, layers: int) -> int:
        """Layers to read ahead in a pass that reads `size_bytes` and computes `row_layers` over `layers` layers."""
        with self._lock:
            byte_s, row_layer_s = self._byte_s, self._row_layer_s
        if byte_s is None or row_layer_s is None or size_bytes == 0:
            return UNMEASURED
        wanted = layers_ahead(byte_s * size_bytes, row_layer_s * row_layers, layers)
        return max(1, min(wanted, MOST_BYTES * layers // size_bytes))


def _mean(before: float | None, amount: int, seconds: float) -> float | None:
    if amount <= 0 or seconds <= 0.0:
        return before
    latest = seconds / amount
    return latest if before is None else (1 - _WEIGHT) * before + _WEIGHT * latest
