"""HKVD: recompute the tokens whose keys and values deviate most (CacheBlend section 4.3)."""

from .base import CheckingSelector, budget


class HKVD(CheckingSelector):
    """One check, at layer 1; its tokens are recomputed in every later layer."""

    name = "hkvd"

    def keep(self, layer: int, layers: int, ratio: float, count: int) -> int | None:
        return budget(ratio, count) if layer == 1 else None


class GradualHKVD(CheckingSelector):
    """The paper's gradual filtering (figure 9): each layer filters among the last layer's tokens.

    The share falls linearly from r1 = min(1, 1.5 r) at layer 1 to 2 r - r1 at the last layer, so that its mean is r.
    The paper says "slightly higher" and "slightly less" without numbers; these are ours.
    """

    name = "hkvd-gradual"

    def keep(self, layer: int, layers: int, ratio: float, count: int) -> int | None:
        first = min(1.0, 1.5 * ratio)
        last = 2 * ratio - first
        steps = layers - 2
        share = first if steps <= 0 else first + (last - first) * (layer - 1) / steps
        return budget(ratio if steps <= 0 else share, count)
