"""The loading controller: chooses recompute ratio, storage tier, and entries to compute instead
(CacheBlend 5.1).

1. Where loading is slow, recomputing more tokens costs no time. The controller raises the ratio
   until recompute takes as long as loading: `r = clamp(max(r*, r : T_recompute(r) = T_load), r*,
   1)`.
2. An entry is computed if loading it is slower.
3. If fusing is not faster than computing everything, everything is computed, which is exact
   (`estimators.pays`).
4. Entries are kept in the cheaper of memory and disk whose loading is hidden by recompute.

The functions are pure: they turn a profile and numbers into a decision with its reasons. Ratios and
later measurements count in steps (`Steady`), so that equal prompts get equal ratios.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ragkv.config import R_STAR, PricesConfig

from .estimators import (
    Load,
    Selection,
    Shape,
    is_fused_chunk,
    load_s,
    pays,
    recompute_s,
    recompute_ttft_s,
    storage_cost,
    ttft_s,
)
from .profile import Profile

# The grid of ratios above r*: without it a small change of a time would change an answer.
RATIO_STEP = 0.05
# Shared storage cannot be chosen, because other replicas read its entries.
DEVICES = ("memory", "disk")
# The factor between two speeds that count: a measured speed must be a whole step off to change.
STEP = 2**0.25
# An entry's tier is chosen for a prompt of this length.
PROMPT_TOKENS = 1024
QUESTION_TOKENS = 32
# The share by which a time may exceed a bound: sums in another order are rounded differently.
SLACK = 1e-6


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision of the controller."""

    ratio: float  # recompute ratio
    tier: str | None  # where these entries should be stored; None if no tier was to be chosen
    computed: tuple[int, ...]  # indices of the loads that are computed instead, ascending
    ttft_s: float  # estimate under this decision
    why: tuple[str, ...]  # short sentences with numbers


def crossing(profile: Profile, shape: Shape, loads: Sequence[Load]) -> float | None:
    """The ratio at which T_recompute = T_load in a layer; below 0 or above 1 if there is none in
    between.

    `None` if T_recompute does not depend on the ratio: without candidates, or if recompute starts
    after all is loaded.
    """
    if shape.selection is Selection.ASKING or not shape.fused_tokens:
        return None
    full_ratio_s = shape.fused_tokens * profile.recompute.row_s(shape.prompt_tokens)
    if full_ratio_s == 0.0:
        return None
    at_zero = replace(shape, selection=Selection.STATIC)
    return (load_s(profile, loads) - recompute_s(profile, 0.0, at_zero)) / full_ratio_s


def choose_ratio(
    profile: Profile, shape: Shape, loads: Sequence[Load], r_star: float = R_STAR
) -> Decision:
    """The highest step of the ratio that costs no time, never below `r_star`."""
    found = crossing(profile, shape, loads)
    step = 0.0 if found is None else round(math.floor(found / RATIO_STEP + SLACK) * RATIO_STEP, 9)
    ratio = min(1.0, max(r_star, step))
    if ttft_s(profile, shape, ratio, loads) > ttft_s(profile, shape, r_star, loads) * (1 + SLACK):
        # with a checking selector one recomputed token makes every candidate pass layer 0
        ratio = r_star
    why = _why_ratio(profile, shape, loads, r_star, ratio)
    return Decision(ratio, None, (), ttft_s(profile, shape, ratio, loads), (why,))


def choose_tier(
    profile: Profile, shape: Shape, ratio: float, prices: PricesConfig, loads: Sequence[Load]
) -> Decision:
    """The cheapest of `DEVICES` whose loading is hidden, T_recompute >= T_load; if there is none,
    the fastest.

    `loads` are the entries, from any tier. Costs are per month.
    """
    tokens = sum(load.tokens for load in loads)
    busy_s = recompute_s(profile, ratio, shape)
    there = {
        name: [replace(load, tier=name) for load in loads]
        for name in DEVICES
        if name in profile.tiers
    }
    layer_s = {name: load_s(profile, loads) for name, loads in there.items()}
    usd = {name: storage_cost(profile, tokens, name, prices) for name in there}
    hidden = [name for name in there if layer_s[name] <= busy_s]
    if hidden:
        best = min(hidden, key=lambda name: (usd[name], layer_s[name]))
        why = f"{best} is the cheapest tier whose loading is hidden"
    else:
        best = min(there, key=lambda name: (layer_s[name], usd[name]))
        why = f"no tier's loading is hidden: {best} is the fastest"
    costs = ", ".join(f"{name} {_ms(layer_s[name])} and ${usd[name]:.2g}" for name in there)
    why += (
        f" (a layer of {tokens} tokens, a month: {costs}; recompute at {ratio:.0%} {_ms(busy_s)})"
    )
    return Decision(ratio, best, (), ttft_s(profile, shape, ratio, there[best]), (why,))


def belongs_in_memory(
    profile: Profile,
    tokens: int,
    selection: Selection,
    r_star: float,
    prices: PricesConfig,
    used: bool,
    room: bool,
) -> bool:
    """Whether an entry belongs in memory, or only in the tiers below: `choose_tier` for a prompt of
    such entries.

    An entry that no request `used` yet takes no place from others: memory must have `room`.
    """
    if not (used or room):
        return False
    count = max(1, PROMPT_TOKENS // tokens)
    shape = Shape(count * tokens, QUESTION_TOKENS, count * tokens + QUESTION_TOKENS, selection)
    return (
        choose_tier(profile, shape, r_star, prices, [Load("memory", tokens)] * count).tier
        == "memory"
    )


class Steady:
    """Measured numbers that change only with clear evidence: in steps, and once the latest is a
    whole step off.
    """

    def __init__(self) -> None:
        self._used: dict[str, float] = {}

    def of(self, name: str, latest: float) -> float:
        """The number to use for `name`, whose latest value is `latest` (above 0)."""
        used = self._used.get(name)
        if used is None or max(latest / used, used / latest) >= STEP:
            used = self._used[name] = STEP ** round(math.log(latest, STEP))
        return used


def choose_computed(
    profile: Profile, shape: Shape, loads: Sequence[Load], ratio: float
) -> Decision:
    """Which of `loads` to compute instead: the slowest of those that load slower than they compute,
    for the least TTFT.

    Not all of them: while some are computed, others load at no cost. And never one that loads
    faster than it computes, even if that would save time: the time that loading leaves free is
    spent on a higher ratio, which improves quality. They are taken by their time per token, so the
    set is the best one but for the chunk at its end.
    """
    computing_s = [_computing_s(profile, shape, load) for load in loads]
    slow = [
        i
        for i, load in enumerate(loads)
        if not load.fixed and load_s(profile, [load]) > computing_s[i]
    ]
    slow.sort(key=lambda i: -load_s(profile, [loads[i]]) / loads[i].tokens)

    def without_s(count: int) -> float:
        remaining, shape_without = _without(shape, loads, slow[:count])
        return ttft_s(profile, shape_without, ratio, remaining)

    best_s, count = min((without_s(count), count) for count in range(len(slow) + 1))
    chosen = tuple(sorted(slow[:count]))
    why = list[str]()
    if slow:
        load = loads[slow[0]]
        all_s = ttft_s(profile, shape, ratio, loads)
        why.append(
            f"{len(chosen)} of {len(loads)} chunks are computed instead of loaded: a layer of "
            f"{load.tokens} tokens "
            f"takes {_ms(load_s(profile, [load]))} from {load.tier}, "
            f"{_ms(computing_s[slow[0]])} to compute "
            f"(first token {_ms(best_s)}, loading all {_ms(all_s)})"
        )
    return Decision(ratio, None, chosen, best_s, tuple(why))


def decide(
    profile: Profile, shape: Shape, loads: Sequence[Load], r_star: float, prices: PricesConfig
) -> Decision:
    """All for one request: which entries to compute at r*, the ratio for the others, and the
    cheapest tier.

    If fusing does not pay, every fused entry is computed.
    """
    computed = choose_computed(profile, shape, loads, r_star)
    remaining, shape_without = _without(shape, loads, computed.computed)
    chosen = choose_ratio(profile, shape_without, remaining, r_star)
    tier = choose_tier(profile, shape, r_star, prices, loads) if loads else None
    fused = [
        i for i, load in enumerate(loads) if is_fused_chunk(load) and i not in computed.computed
    ]
    exact_s = recompute_ttft_s(profile, shape_without, remaining)
    tier_name, tier_why = (tier.tier, tier.why) if tier else (None, ())
    if fused and shape_without.fused_tokens and not pays(chosen.ttft_s, exact_s):
        why = (
            f"fusing does not pay for {shape_without.fused_tokens} tokens: they are computed, "
            "which is exact "
            f"(first token {_ms(exact_s)}, fused {_ms(chosen.ttft_s)})"
        )
        everything = tuple(sorted((*fused, *computed.computed)))
        return Decision(
            chosen.ratio, tier_name, everything, exact_s, (*computed.why, why, *tier_why)
        )
    reasons = (*computed.why, *chosen.why, *tier_why)
    return Decision(chosen.ratio, tier_name, computed.computed, chosen.ttft_s, reasons)


def _computing_s(profile: Profile, shape: Shape, load: Load) -> float:
    """Seconds that computing `load` adds to a layer."""
    return load.tokens * profile.recompute.row_s(shape.prompt_tokens)


def _without(
    shape: Shape, loads: Sequence[Load], computed: Sequence[int]
) -> tuple[list[Load], Shape]:
    """The loads that remain, and the shape, when those of index `computed` become cache misses."""
    remaining = [load for i, load in enumerate(loads) if i not in computed]
    fused = max(0, shape.fused_tokens - sum(loads[i].tokens for i in computed if loads[i].fused))
    forced = shape.forced_rows + sum(loads[i].tokens for i in computed)
    return remaining, replace(
        shape, fused_tokens=fused, forced_rows=min(forced, shape.prompt_tokens - fused)
    )


def _why_ratio(
    profile: Profile, shape: Shape, loads: Sequence[Load], r_star: float, ratio: float
) -> str:
    if not shape.fused_tokens:
        return f"ratio {ratio:.0%}: there are no candidates"
    if shape.selection is Selection.ASKING:
        return (
            f"ratio {ratio:.0%} = r*: recompute starts after everything is loaded, so loading "
            "hides none of it"
        )
    tokens_by_tier: Counter[str] = Counter()
    for load in loads:
        tokens_by_tier[load.tier] += load.tokens
    sizes = " and ".join(f"{tokens} tokens from {tier}" for tier, tokens in tokens_by_tier.items())
    times = (
        f"a layer of {sizes or 'nothing'} loads in {_ms(load_s(profile, loads))} and is "
        "recomputed at "
        f"{r_star:.0%} in {_ms(recompute_s(profile, r_star, shape))}"
    )
    if ratio == r_star:
        return f"ratio {ratio:.0%} = r*: {times}, so more would cost time"
    if ratio == 1.0:
        return f"ratio 100 %: {times}, and in {_ms(recompute_s(profile, 1.0, shape))} at 100 %"
    return (
        f"ratio raised from r* = {r_star:.0%} to {ratio:.0%}, the highest step that loading "
        f"hides: {times}"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
