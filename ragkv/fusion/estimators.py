"""The controller's estimators: recompute delay, loading delay, storage cost, and the TTFT they make (CacheBlend 5.1).

Pure functions of a profile; times in seconds, lengths in tokens. T_recompute is what one layer keeps the model busy
with while the next layers load: placing what is reused, and computing the selected tokens, the question and the holes.
The paper's `r x Prefill` has the selected tokens alone, so its loading is hidden by more work than it counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ragkv.config import PricesConfig

from .profile import Profile

HOURS_PER_MONTH = 730.0
BYTES_PER_GB = 1e9  # as storage is sold


class Selection(Enum):
    """When a selector knows its tokens: which work there is while entries load."""

    STATIC = "static"  # before anything is loaded
    CHECKING = "checking"  # every candidate passes layer 0; their number then falls to the ratio's
    ASKING = "asking"  # once the question has looked at all of it: a second pass, which no loading hides


@dataclass(frozen=True, slots=True)
class Shape:
    """What a request asks of the model, whatever the ratio."""

    fused_tokens: int  # N, the candidates: reused, not exact, not forced
    forced_rows: int  # computed in every layer: question, template, holes, history without KV
    prompt_tokens: int  # S
    selection: Selection = Selection.STATIC

    def __post_init__(self) -> None:
        if self.fused_tokens < 0 or self.forced_rows < 0 or self.fused_tokens + self.forced_rows > self.prompt_tokens:
            raise ValueError(
                f"Of {self.prompt_tokens} tokens not {self.fused_tokens} and {self.forced_rows} can differ."
            )

    @property
    def placed_tokens(self) -> int:
        """Tokens whose stored KV is put in place: all that are not forced."""
        return self.prompt_tokens - self.forced_rows


@dataclass(frozen=True, slots=True)
class Load:
    """One entry, or part of one, that is to be read."""

    tier: str  # "memory", "disk", "remote"
    tokens: int
    fused: bool = True  # whether its tokens are candidates; an exact chunk's are not
    fixed: bool = False  # not to be computed instead: a piece of a history


@dataclass(frozen=True, slots=True)
class Delay:
    """An estimate, in seconds."""

    layer_s: float  # of one layer, from the second on
    total_s: float  # of all layers


def recompute_s(profile: Profile, ratio: float, shape: Shape) -> Delay:
    """T_recompute: placing what is reused and computing rows, the ratio's, the question's and the holes'.

    The last layer writes keys and values of its rows and computes one: the profile counts its time among the others'.
    With an ASKING selector `layer_s` is of the pass that loads, and does not depend on the ratio.
    """
    loading, afterwards = _passes(profile, ratio, shape)
    return Delay(loading[-1] if loading else 0.0, sum(loading) + afterwards)


def load_s(profile: Profile, loads: Sequence[Load]) -> Delay:
    """T_load of what is read, whatever tiers it lies in: slices come one after another.

    Tiers are not taken to read at once: reader threads take the slices in the order of the prompt.
    """
    layer_s = sum(_slice_s(profile, load) for load in loads)
    return Delay(layer_s, layer_s * profile.layers)


def ttft_s(profile: Profile, shape: Shape, ratio: float, loads: Sequence[Load]) -> float:
    """Time to first token under the pipeline: layer l + 1 is read while layer l is fused.

    The first layer's load, then for each layer the longer of its recompute and the next one's load, then the last
    row's logits. What a static selector recomputes whole is neither read nor placed.
    """
    if shape.selection is Selection.STATIC and ratio >= 1.0 and shape.fused_tokens:
        loads = [load for load in loads if not load.fused]
        shape = Shape(0, shape.forced_rows + shape.fused_tokens, shape.prompt_tokens)
    layer_s = load_s(profile, loads).layer_s
    busy, afterwards = _passes(profile, ratio, shape)
    return profile.start_s + layer_s + sum(max(layer_s, work) for work in busy) + afterwards


def stored_bytes(profile: Profile, tokens: int) -> float:
    """Bytes of the KV of `tokens`, as it is kept."""
    return tokens * profile.stored_bytes_per_token


def storage_cost(profile: Profile, tokens: int, tier: str, prices: PricesConfig, hours: float) -> float:
    """C_store in USD: keeping the KV of `tokens` in `tier` for that time."""
    return stored_bytes(profile, tokens) / BYTES_PER_GB * prices.of(tier) * hours / HOURS_PER_MONTH


def tokens_by_tier(loads: Sequence[Load]) -> Mapping[str, int]:
    """How many tokens are read from each tier."""
    counts: dict[str, int] = {}
    for load in loads:
        counts[load.tier] = counts.get(load.tier, 0) + load.tokens
    return counts


def _slice_s(profile: Profile, load: Load) -> float:
    """Seconds that reading one layer of `load` adds; on a GPU the copy runs beside the next slice's read."""
    read_s = profile.tier(load.tier).slice_s(stored_bytes(profile, load.tokens) / profile.layers)
    if profile.copy_bytes_per_s is None:
        return read_s
    return max(read_s, load.tokens * profile.kv_bytes_per_token / profile.layers / profile.copy_bytes_per_s)


def _passes(profile: Profile, ratio: float, shape: Shape) -> tuple[list[float], float]:
    """Seconds of each layer of the pass that loads, the last one's among the others', and of what comes after it."""
    layers, keys = max(1, profile.layers - 1), shape.prompt_tokens
    placing = profile.place_token_layer_s * shape.placed_tokens
    rows = shape.forced_rows + ratio * shape.fused_tokens
    if shape.selection is Selection.ASKING and ratio * shape.fused_tokens > 0:
        return [placing + profile.recompute.at(shape.forced_rows, keys)] * layers, layers * profile.recompute.at(
            rows, keys
        )
    busy = [placing + profile.recompute.at(rows, keys)] * layers
    if shape.selection is Selection.CHECKING and ratio * shape.fused_tokens > 0:
        busy[0] = placing + profile.recompute.at(shape.forced_rows + shape.fused_tokens, keys)
    return busy, 0.0
