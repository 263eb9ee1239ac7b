"""KCache: K stays on the device, V is in host memory, decoding attends with the top-N values (arXiv 2404.18057)."""

from .offloaded import OffloadedKV, Offloading, offload
from .topn import Choice, attend_top, choose
from .transformers_cache import ATTENTION, KCacheLayer, kcache
from .values import STAGED_ROWS, HostValues

__all__ = [
    "ATTENTION",
    "STAGED_ROWS",
    "Choice",
    "HostValues",
    "KCacheLayer",
    "OffloadedKV",
    "Offloading",
    "attend_top",
    "choose",
    "kcache",
    "offload",
]
