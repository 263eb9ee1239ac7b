"""Says how a prompt's KV is made: by the request, the config, and the gate's result."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, get_args

from ragkv.config import R_STAR, EngineConfig, ReuseMode
from ragkv.errors import InputError
from ragkv.fusion import Selector, make_selector

from .gate_result import GateResult, gated


@dataclass(frozen=True, slots=True)
class Method:
    """How one request wants its prompt computed, before the prompt is known."""

    # The recompute ratio in [0, 1]. When the controller chooses, the lower bound (r*). 0 unless KV
    # is fused.
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
    def history_treatment(self) -> str:
        """What becomes of history that is not exact.

        `inexact_history` counts only where chunks are fused. All other requests equal a full
        prefill, so such history is recomputed.
        """
        is_fused = self.reuse == "fused" and self.ratio < 1.0
        return self.inexact_history if is_fused else "recompute"


@dataclass(slots=True, eq=False)
class Methods:
    """Decides the method of each request: what it names, or the gate's result, or the config."""

    config: EngineConfig
    gate_result: GateResult | None  # it may change at any time

    def of(self, options: Mapping[str, Any]) -> Method:
        """The method of a request with such `PrefillOptions`. Raises `InputError`, and
        `ConfigError` for an unknown selector.
        """
        fusion = self.config.fusion
        ratio = options.get("ratio", fusion.ratio)
        reuse = options.get("reuse", "fused")
        selector = options.get("selector")
        is_number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
        if ratio is not None and not (is_number and 0.0 <= ratio <= 1.0):
            raise InputError(f"ratio is {ratio!r}; it is a share and must lie in [0, 1].")
        if reuse not in get_args(ReuseMode):
            raise InputError(
                f"reuse is {reuse!r}; it must be one of "
                f"{', '.join(map(repr, get_args(ReuseMode)))}."
            )
        # a ratio that is given as None is named, and leaves the choice to the controller
        named = {"ratio"} & options.keys() | ({"selector"} if selector is not None else set())
        names_ratio = options.get("ratio") is not None
        if reuse != "fused":  # without fused tokens none is recomputed
            ratio = 0.0
        method = Method(
            ratio=R_STAR if ratio is None else float(ratio),
            selector=make_selector(fusion.selector if selector is None else selector),
            reuse=reuse,
            inexact_history=self.config.session.inexact_history,
            controlled=ratio is None and reuse == "fused",
            floor_tokens=0 if names_ratio else fusion.floor_tokens,
            named=frozenset(named),
        )
        result = self.gate_result
        if result is None or reuse != "fused":
            return method
        return gated(method, result, names_ratio=names_ratio, names_selector=selector is not None)
