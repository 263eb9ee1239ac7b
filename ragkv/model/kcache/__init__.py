"""KCache: K stays on the device, V is in host memory, decoding attends with the top-N values (arXiv
2404.18057).
"""

from .offloaded import OffloadedKV, Offloading
from .topn import TopRows, attend_top, choose
from .values import HostValues

__all__ = ["TopRows", "HostValues", "OffloadedKV", "Offloading", "attend_top", "choose"]
