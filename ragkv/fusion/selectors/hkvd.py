"""HKVD: recompute the tokens with the highest KV deviation (CacheBlend section 4.3)."""

from .base import CheckingSelector, budget


class HKVD(CheckingSelector):
    """Checks once, at layer 1; its tokens are recomputed in every later layer."""

    name = "hkvd"

    def keep(self, layer: int, layers: int, ratio: float, count: int) -> int | None:
        return budget(ratio, count) if layer == 1 else None


class GradualHKVD(CheckingSelector):
    """The paper's gradual filtering (figure 9): each layer filters the tokens of the layer before.

    The share falls linearly from r1 = min(1, 1.5 r) at layer 1 to 2 r - r1 at the last layer, so its mean is r. The
    paper says "slightly higher" and "slightly less" without numbers; these numbers are ours.
    """

    name = "hkvd-gradual"

    def keep(self, layer: int, layers: int, ratio: float, count: int) -> int | None:
        steps = layers - 2
        if steps <= 0:
            return budget(ratio, count)
        first = min(1.0, 1.5 * ratio)
        last = 2 * ratio - first
        return budget(first + (last - first) * (layer - 1) / steps, count)
