"""HKVD, the selectors of CacheBlend section 4.3: every candidate passes layer 0, and between two
layers those whose fresh KV deviates least from the stored KV are left out.

Deviation is `sqrt(sum dK^2 + sum dV^2)`, with K before RoPE, in float32. A selector only decides
how many tokens remain in each layer. `Narrowing` keeps those with the highest deviation.
"""

from typing import TYPE_CHECKING

import torch

from ragkv.model import sent

from .plan import Plan
from .selectors import Selector, budget, top

if TYPE_CHECKING:
    from .fuse import PromptRows
    from .pipeline import Placing

# More than any deviation: rows that are computed in every layer are kept.
_COMPUTED = 1 << 62


class HKVD(Selector):
    """Checks once, at layer 1; its tokens are recomputed in every later layer."""

    name = "hkvd"

    def keep(self, layer: int, layers: int, ratio: float, count: int) -> int | None:
        return budget(ratio, count) if layer == 1 else None


class GradualHKVD(HKVD):
    """The paper's gradual filtering (figure 9): each layer filters the tokens of the layer before.

    The share falls linearly from r1 = min(1, 1.5 r) at layer 1 to 2 r - r1 at the last layer, so
    its mean is r. The paper says "slightly higher" and "slightly less" without numbers; these
    numbers are ours.
    """

    name = "hkvd-gradual"

    def keep(self, layer: int, layers: int, ratio: float, count: int) -> int | None:
        steps = layers - 2
        if steps <= 0:
            return budget(ratio, count)
        first = min(1.0, 1.5 * ratio)
        last = 2 * ratio - first
        return budget(first + (last - first) * (layer - 1) / steps, count)


class Narrowing:
    """Keeps the rows that deviate most from their stored KV, and those that no selector chose."""

    def __init__(self, prompt_rows: "PromptRows", plan: Plan, placing: "Placing") -> None:
        """The rows are all candidates and all computed positions, which the host knows."""
        self._rows = prompt_rows
        self._placing = placing
        self._computed = plan.computed.numel()
        positions = torch.cat((plan.computed, plan.candidates.positions)).sort().values
        index = torch.zeros(plan.token_ids.numel(), dtype=torch.int64)
        index[placing.positions] = torch.arange(placing.positions.numel())
        extra = torch.zeros_like(index)
        extra[plan.computed] = _COMPUTED
        # position, index among the placed tokens, and what is added to the deviation: (3, R)
        facts = torch.stack((positions, index[positions], extra[positions]))
        self._facts = sent(facts, prompt_rows.adapter.device)

    def narrow(self, layer: int, keep: int | None) -> None:
        """Go on with `keep` candidates; `None`: with all that are left."""
        if keep is None or keep + self._computed >= self._facts.shape[1]:
            return
        _, index, extra = self._facts
        kept = top(self._deviation(layer, index) + extra, keep + self._computed)
        self._facts = self._facts.index_select(1, kept)
        self._rows.keep(kept, self._facts[0])

    def _deviation(self, layer: int, index: torch.Tensor) -> torch.Tensor:
        """The deviation of each row, (R,) float32 on the device."""
        own = self._rows
        k_raw, v = own.adapter.project_kv(layer, own.hidden, own.rows)
        fresh = k_raw.new_empty((2, *k_raw.shape[1:]), dtype=torch.float32)  # (2, G, R, D)
        torch.cat((k_raw, v), out=fresh)  # joined and converted at once
        change = fresh - self._placing.stored(index)
        deviation: torch.Tensor = torch.linalg.vector_norm(change, dim=(0, 1, 3))
        return deviation
