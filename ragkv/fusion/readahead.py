"""How many layers to read ahead: the read buffer of CachedAttention section 3.2.1, from running measurements.

The paper's `S_buf = B (T_load L_hist - T_pref L_new)` bytes is what loading falls behind computing over a whole pass;
in layers it is their number times the share of the loading time that computing does not cover. Reading begins before
the request has the model, so a deeper buffer is filled while others compute.
"""

import math
import threading

MOST_BYTES = 256 * 1024**2  # of one request's buffers, whatever is measured
UNMEASURED = 2  # layers read ahead until something was measured
_WEIGHT = 0.3  # of the latest measurement


def buffer_bytes(bandwidth: float, load_s: float, compute_s: float) -> float:
    """S_buf: bytes, for `load_s = T_load L_hist` and `compute_s = T_pref L_new`; 0 where computing hides loading."""
    return bandwidth * max(0.0, load_s - compute_s)


def layers_ahead(load_s: float, compute_s: float, layers: int) -> int:
    """S_buf in layers of the request's own KV, at least the one that is read while the one before is computed."""
    if load_s <= 0.0:
        return 1
    share = buffer_bytes(1.0, load_s, compute_s) / load_s  # a layer is load_s / layers at any bandwidth
    return min(layers, max(1, math.ceil(share * layers)))


class Speeds:
    """Running means of how fast slices are read and rows computed. Thread-safe."""

    def __init__(self) -> None:
        self._byte_s: float | None = None
        self._row_layer_s: float | None = None
        self._lock = threading.Lock()

    def read(self, size_bytes: int, seconds: float) -> None:
        """So much was read in that time."""
        with self._lock:
            self._byte_s = _mean(self._byte_s, size_bytes, seconds)

    def computed(self, row_layers: int, seconds: float) -> None:
        """So many rows, summed over layers, were computed in that time."""
        with self._lock:
            self._row_layer_s = _mean(self._row_layer_s, row_layers, seconds)

    @property
    def row_layer_s(self) -> float | None:
        """Seconds a row of a layer takes, placing what is reused included; `None` until it was measured."""
        return self._row_layer_s

    def ahead(self, size_bytes: int, row_layers: int, layers: int) -> int:
        """Layers to read ahead where `size_bytes` are to be read and so many rows computed, over `layers` layers."""
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
