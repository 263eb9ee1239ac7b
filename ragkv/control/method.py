"""How a prompt's KV is to be made: what a request asks for, the config gives and the gate allows."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from ragkv.config import ReuseMode
from ragkv.fusion import Selector


@dataclass(frozen=True, slots=True)
class Method:
    """How one request wants its prompt computed, before the prompt is known."""

    # recompute ratio in [0, 1]; r*, the least choice, if the controller chooses
    ratio: float
    selector: Selector
    reuse: ReuseMode
    # history that is not exact: "keep", "select" among its tokens, or "recompute" it
    inexact_history: str = "select"
    controlled: bool = False  # whether the controller chooses the ratio
    # tokens recomputed at least, whatever the ratio; 0 where the request names its ratio
    floor_tokens: int = 0
    notes: tuple[str, ...] = ()  # what the gate result changed
    named: AbstractSet[str] = frozenset()  # which of "ratio" and "selector" the request names

    @property
    def inexact_use(self) -> str:
        """What becomes of history that is not exact.

        `inexact_history` counts only where chunks are fused. All other requests equal a full
        prefill, so such history is recomputed.
        """
        is_full = self.ratio == 1.0 or self.selector.recomputes_all
        return self.inexact_history if self.reuse == "fused" and not is_full else "recompute"
