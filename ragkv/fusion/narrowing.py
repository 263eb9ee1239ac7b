"""Narrows a prompt's rows down between two layers, by how far fresh KV deviates from stored KV
(CacheBlend section 4.3). Checking selectors need it.
"""

from typing import TYPE_CHECKING

import torch

from ragkv.model import sent

from .plan import Plan
from .selectors import top

if TYPE_CHECKING:
    from .fuse import Placing, PromptRows

# More than any deviation: forced rows are always kept.
_FORCED = 1 << 62


class Narrowing:
    """Keeps the rows that deviate most from what is stored of them, and those that are forced."""

    def __init__(self, prompt_rows: "PromptRows", plan: Plan, placing: "Placing") -> None:
        """The rows are all candidates and all forced positions, which the host knows."""
        self._rows = prompt_rows
        self._placing = placing
        self._forced = plan.forced.numel()
        positions = torch.cat((plan.forced, plan.candidates.positions)).sort().values
        index = torch.zeros(plan.token_ids.numel(), dtype=torch.int64)
        index[placing.positions] = torch.arange(placing.positions.numel())
        extra = torch.zeros_like(index)
        extra[plan.forced] = _FORCED
        # position, index among the placed tokens, and what is added to the deviation: (3, R)
        facts = torch.stack((positions, index[positions], extra[positions]))
        self._facts = sent(facts, prompt_rows.adapter.device)

    def narrow(self, layer: int, keep: int | None) -> None:
        """Go on with `keep` candidates; `None`: with all that are left."""
        if keep is None or keep + self._forced >= self._facts.shape[1]:
            return
        _, index, extra = self._facts
        kept = top(self._deviation(layer, index) + extra, keep + self._forced)
        self._facts = self._facts.index_select(1, kept)
        self._rows.keep(kept, self._facts[0])

    def _deviation(self, layer: int, index: torch.Tensor) -> torch.Tensor:
        """sqrt(sum dK^2 + sum dV^2) of each row, (R,) float32 on the device.

        Fresh is compared with stored KV, keys before RoPE.
        """
        own = self._rows
        k_raw, v = own.adapter.project_kv(layer, own.hidden, own.rows)
        fresh = k_raw.new_empty((2, *k_raw.shape[1:]), dtype=torch.float32)  # (2, G, R, D)
        torch.cat((k_raw, v), out=fresh)  # joined and converted at once
        change = fresh - self._placing.stored(index)
        deviation: torch.Tensor = torch.linalg.vector_norm(change, dim=(0, 1, 3))
        return deviation
