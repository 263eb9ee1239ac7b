"""The controller's estimators: recompute time, loading time, storage cost and TTFT (CacheBlend
section 5.1).

Pure functions of a profile; times in seconds, lengths in tokens. T_recompute is the time one layer
keeps the model busy while the next layers load: placing reused KV, and computing the selected
tokens, the question and the cache misses. The paper's `r x Prefill` counts the selected tokens
only, so less work hides the loading.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ragkv.config import PricesConfig

from .profile import Profile

BYTES_PER_GB = 1e9  # as storage is sold
MARGIN = 1.05  # Fusing must be faster by this factor. A smaller gain may be noise.
# A profile leaves out the time to find entries and to select tokens.
UNPROFILED_S = 8e-4


class Selection(Enum):
    """When a selector knows its tokens, which decides how much work there is while entries load."""

    STATIC = "static"  # before anything is loaded
    # every candidate passes layer 0; later layers recompute the ratio's share
    CHECKING = "checking"
    ASKING = "asking"  # after a first pass over everything loaded; the second pass hides no loading


@dataclass(frozen=True, slots=True)
class Shape:
    """The token counts of a request, which do not depend on the ratio."""

    fused_tokens: int  # N, the candidates: reused, neither exact nor forced
    # computed in every layer: question, template, cache misses, history without KV
    forced_rows: int
    prompt_tokens: int  # S
    selection: Selection = Selection.STATIC
    # those of the forced rows before the first candidate: a second pass leaves them out
    leading_rows: int = 0
    # those of the forced rows that the first pass of an asking selector leaves out
    unasked_rows: int = 0

    def __post_init__(self) -> None:
        if (
            self.fused_tokens < 0
            or self.forced_rows < 0
            or self.fused_tokens + self.forced_rows > self.prompt_tokens
        ):
            raise ValueError(
                f"A prompt of {self.prompt_tokens} tokens cannot have {self.fused_tokens} fused "
                "and "
                f"{self.forced_rows} forced tokens."
            )

    @property
    def placed_tokens(self) -> int:
        """Tokens whose stored KV is placed: all that are not forced."""
        return self.prompt_tokens - self.forced_rows


@dataclass(frozen=True, slots=True)
class Load:
    """One entry, or a part of one, to be read."""

    tier: str  # "memory", "disk", "redis", "s3"
    tokens: int
    fused: bool = True  # whether its tokens are candidates; those of an exact chunk are not
    fixed: bool = False  # must not be computed instead: a part of a history


def recompute_s(profile: Profile, ratio: float, shape: Shape) -> float:
    """T_recompute of a layer from the second on: placing reused KV, and computing the selected
    tokens, the question and the cache misses.

    In the last layer only keys and values of the rows, and one row's output, are computed; the
    profile counts its time in the other layers. With an ASKING selector it is of the pass that
    loads and does not depend on the ratio.
    """
    return _passes(profile, ratio, shape)[0][-1]


def load_s(profile: Profile, loads: Sequence[Load]) -> float:
    """T_load of a layer from any mix of tiers.

    The times of the slices are added: reader threads take them in prompt order, so tiers do not
    read in parallel.
    """
    return sum(_slice_s(profile, load) for load in loads)


def ttft_s(profile: Profile, shape: Shape, ratio: float, loads: Sequence[Load]) -> float:
    """Time to first token of the pipeline, which reads layer l + 1 while it fuses layer l.

    It is the sum of the first layer's load, for each layer the maximum of its recompute and the
    next layer's load, and the last row's logits. Entries that a static selector recomputes entirely
    are neither read nor placed. A prompt of which nothing is loaded takes as long as its prefill,
    which was measured by itself.
    """
    if shape.selection is Selection.STATIC and ratio >= 1.0 and shape.fused_tokens:
        loads = [load for load in loads if not load.fused]
        shape = Shape(0, shape.forced_rows + shape.fused_tokens, shape.prompt_tokens)
    if not loads and not shape.fused_tokens:
        return profile.prefill.at(shape.prompt_tokens)
    layer_s = load_s(profile, loads)
    busy, afterwards = _passes(profile, ratio, shape)
    return profile.start_s + layer_s + sum(max(layer_s, work) for work in busy) + afterwards


def recompute_ttft_s(profile: Profile, shape: Shape, loads: Sequence[Load]) -> float:
    """Time to first token if all fused chunks are computed; exact chunks and history are loaded as
    before.
    """
    kept = [load for load in loads if not is_fused_chunk(load)]
    rows = min(shape.prompt_tokens, shape.forced_rows + shape.fused_tokens)
    return ttft_s(profile, Shape(0, rows, shape.prompt_tokens), 0.0, kept)


def is_fused_chunk(load: Load) -> bool:
    """Whether the entry belongs to a fused chunk, which may be computed instead."""
    return load.fused and not load.fixed


def pays(fused_s: float, recompute_s: float) -> bool:
    """Whether fusing is faster by more than the margin and the unprofiled time."""
    return fused_s * MARGIN + UNPROFILED_S < recompute_s


def storage_cost(profile: Profile, tokens: int, tier: str, prices: PricesConfig) -> float:
    """C_store in USD: storing the KV of `tokens` in `tier` for a month."""
    usd: float = getattr(prices, f"{tier}_usd_per_gb_month")
    return tokens * profile.stored_bytes_per_token / BYTES_PER_GB * usd


def _slice_s(profile: Profile, load: Load) -> float:
    """Seconds to read one layer of `load`; on a GPU its copy runs in parallel with the next slice's
    read.
    """
    read_s = profile.tier(load.tier).slice_s(
        load.tokens * profile.stored_bytes_per_token / profile.layers
    )
    if profile.copy_bytes_per_s is None:
        return read_s
    return max(
        read_s, load.tokens * profile.kv_bytes_per_token / profile.layers / profile.copy_bytes_per_s
    )


def _passes(profile: Profile, ratio: float, shape: Shape) -> tuple[list[float], float]:
    """Seconds of each layer but the last in the pass that loads, and seconds of the pass after it,
    if any.
    """
    layers = max(1, profile.layers - 1)
    keys = shape.prompt_tokens
    placing = profile.place_token_layer_s * shape.placed_tokens
    selected = ratio * shape.fused_tokens
    selected_s = profile.recompute.at(shape.forced_rows + selected, keys)
    if shape.selection is Selection.ASKING and selected > 0:
        again_s = profile.recompute.at(shape.forced_rows - shape.leading_rows + selected, keys)
        asking_s = profile.recompute.at(shape.forced_rows - shape.unasked_rows, keys)
        return [placing + asking_s] * layers, layers * again_s
    busy = [placing + selected_s] * layers
    if shape.selection is Selection.CHECKING and selected > 0:
        busy[0] = placing + profile.recompute.at(shape.forced_rows + shape.fused_tokens, keys)
    return busy, 0.0
