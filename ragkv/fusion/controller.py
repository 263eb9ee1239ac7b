"""The loading controller: recompute ratio, storage device, and what is computed rather than loaded (CacheBlend 5.1).

Where loading is slow, recomputing more tokens costs no time: the ratio is raised until recompute takes as long as
loading, `r = clamp(max(r*, r : T_recompute(r) = T_load), r*, 1)`. Where an entry loads slower than it is computed, it
is computed. Of the devices whose loading stays hidden, the cheapest is named. Pure: a profile and numbers in, a
decision and its reasons out.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ragkv.config import PricesConfig

from .estimators import (
    HOURS_PER_MONTH,
    Load,
    Selection,
    Shape,
    load_s,
    recompute_s,
    storage_cost,
    tokens_by_tier,
    ttft_s,
)
from .profile import Profile

R_STAR = 0.15  # where the quality gate never ran: the paper's, from its figure 16
SLACK = 1e-6  # of a time: the same sum in another order
MOST_SUBSETS = 256  # tried one by one; beyond it only those that compute what loads slowest first


@dataclass(frozen=True, slots=True)
class Decision:
    """What the controller decided."""

    ratio: float  # recompute ratio
    tier: str | None  # where these entries would be kept; None if that was not asked
    computed: tuple[int, ...]  # which of the loads are computed instead, ascending
    ttft_s: float  # estimate under this decision
    why: tuple[str, ...]  # short sentences, with numbers


def crossing(profile: Profile, shape: Shape, loads: Sequence[Load]) -> float | None:
    """The ratio at which T_recompute = T_load in a layer: below 0 or above 1 where neither ever is.

    `None` if no ratio changes T_recompute: there are no candidates, or their recompute begins after all is loaded.
    """
    if shape.selection is Selection.ASKING or not shape.fused_tokens:
        return None
    a_ratio_s = shape.fused_tokens * profile.recompute.row_s(shape.prompt_tokens)
    if a_ratio_s == 0.0:
        return None
    at_zero = replace(shape, selection=Selection.STATIC)
    return (load_s(profile, loads).layer_s - recompute_s(profile, 0.0, at_zero).layer_s) / a_ratio_s


def choose_ratio(profile: Profile, shape: Shape, tiers: Sequence[Load], r_star: float = R_STAR) -> Decision:
    """The highest ratio that costs no time, never below `r_star`. `tiers` is what is loaded, and from where."""
    found = crossing(profile, shape, tiers)
    ratio = r_star if found is None else min(1.0, max(r_star, found))
    if ttft_s(profile, shape, ratio, tiers) > ttft_s(profile, shape, r_star, tiers) * (1 + SLACK):
        ratio = r_star  # a first recomputed token has a checking selector's every candidate pass layer 0
    return Decision(
        ratio, None, (), ttft_s(profile, shape, ratio, tiers), _why_ratio(profile, shape, tiers, r_star, ratio)
    )


def choose_tier(
    profile: Profile,
    shape: Shape,
    ratio: float,
    prices: PricesConfig,
    loads: Sequence[Load] | None = None,
    hours: float = HOURS_PER_MONTH,
) -> Decision:
    """The cheapest measured tier whose loading is hidden, T_recompute >= T_load; if there is none, the fastest.

    `loads` are the entries, wherever they lie now; left out, one entry of all that is placed. `hours` they are kept.
    """
    entries = list(loads) if loads is not None else [Load("", shape.placed_tokens)]
    tokens, busy_s = sum(load.tokens for load in entries), recompute_s(profile, ratio, shape).layer_s
    offers = {}
    for name in profile.tiers:
        there = [replace(load, tier=name) for load in entries]
        offers[name] = _Offer(there, load_s(profile, there).layer_s, storage_cost(profile, tokens, name, prices, hours))
    hidden = {name: offer for name, offer in offers.items() if offer.layer_s <= busy_s}
    if hidden:
        best = min(hidden, key=lambda name: (hidden[name].usd, hidden[name].layer_s))
        why = f"{best} is the cheapest tier whose loading is hidden"
    else:
        best = min(offers, key=lambda name: (offers[name].layer_s, offers[name].usd))
        why = f"no tier's loading is hidden: {best} is the fastest"
    costs = ", ".join(f"{name} {_ms(offer.layer_s)} and ${offer.usd:.2g}" for name, offer in offers.items())
    said = f"{why} (a layer of {tokens} tokens, {hours:.0f} h: {costs}; recompute at {ratio:.0%} {_ms(busy_s)})"
    return Decision(ratio, best, (), ttft_s(profile, shape, ratio, offers[best].loads), (said,))


def choose_computed(profile: Profile, shape: Shape, loads: Sequence[Load], ratio: float) -> Decision:
    """Which of `loads` to compute instead: of those that load slower than they compute, the set of least TTFT.

    Not simply all of them: while some are computed, others load for nothing. And none that loads faster than it
    computes, even where that would save time: what loading leaves free is the ratio's, which serves quality.
    """
    slow = [i for i, load in enumerate(loads) if loads_slower(profile, shape, load)]
    slow.sort(key=lambda i: -load_s(profile, [loads[i]]).layer_s / loads[i].tokens)
    sets = (tuple(sorted(some)) for some in _subsets(loads, slow))
    best_s, _, chosen = min((_ttft_without(profile, shape, loads, ratio, some), len(some), some) for some in sets)
    why = []
    if slow:
        load = loads[slow[0]]
        all_s = ttft_s(profile, shape, ratio, loads)
        why.append(
            f"{len(chosen)} of {len(loads)} chunks are computed instead of loaded: a layer of {load.tokens} tokens "
            f"takes {_ms(load_s(profile, [load]).layer_s)} from {load.tier}, "
            f"{_ms(_computing_s(profile, shape, load))} to compute "
            f"(first token {_ms(best_s)}, loading all {_ms(all_s)})"
        )
    return Decision(ratio, None, tuple(chosen), best_s, tuple(why))


def decide(profile: Profile, shape: Shape, loads: Sequence[Load], r_star: float, prices: PricesConfig) -> Decision:
    """All three for one request: what to compute at r*, the ratio for what is left to load, the cheapest tier."""
    computed = choose_computed(profile, shape, loads, r_star)
    kept = [load for i, load in enumerate(loads) if i not in computed.computed]
    rest = _without(shape, [loads[i] for i in computed.computed])
    chosen = choose_ratio(profile, rest, kept, r_star)
    tier = choose_tier(profile, shape, r_star, prices, loads) if loads else None
    why = (*computed.why, *chosen.why, *(tier.why if tier else ()))
    return Decision(chosen.ratio, tier.tier if tier else None, computed.computed, chosen.ttft_s, why)


def loads_slower(profile: Profile, shape: Shape, load: Load) -> bool:
    """Whether a layer of `load` takes longer to read than to compute, and it may be computed."""
    return not load.fixed and load_s(profile, [load]).layer_s > _computing_s(profile, shape, load)


@dataclass(frozen=True, slots=True)
class _Offer:
    """One tier for all entries of a request."""

    loads: list[Load]
    layer_s: float
    usd: float


def _computing_s(profile: Profile, shape: Shape, load: Load) -> float:
    """Seconds that computing `load` adds to a layer."""
    return load.tokens * profile.recompute.row_s(shape.prompt_tokens)


def _without(shape: Shape, computed: Sequence[Load]) -> Shape:
    """`shape` once these are holes."""
    fused = max(0, shape.fused_tokens - sum(load.tokens for load in computed if load.fused))
    forced = shape.forced_rows + sum(load.tokens for load in computed)
    return replace(shape, fused_tokens=fused, forced_rows=min(forced, shape.prompt_tokens - fused))


def _ttft_without(
    profile: Profile, shape: Shape, loads: Sequence[Load], ratio: float, computed: Sequence[int]
) -> float:
    kept = [load for i, load in enumerate(loads) if i not in computed]
    return ttft_s(profile, _without(shape, [loads[i] for i in computed]), ratio, kept)


def _subsets(loads: Sequence[Load], slow: Sequence[int]) -> Iterator[Sequence[int]]:
    """Sets of indices to try. Equal loads are interchangeable, so of each kind only how many counts.

    `slow` comes slowest a token first: where there are too many sets, its beginnings are tried, which are best but for
    the chunk on the edge.
    """
    kinds: dict[Load, list[int]] = defaultdict(list)
    for i in slow:
        kinds[loads[i]].append(i)
    if math.prod(len(same) + 1 for same in kinds.values()) <= MOST_SUBSETS:
        for counts in itertools.product(*(range(len(same) + 1) for same in kinds.values())):
            yield [i for same, count in zip(kinds.values(), counts, strict=True) for i in same[:count]]
    else:
        yield from (slow[:count] for count in range(len(slow) + 1))


def _why_ratio(profile: Profile, shape: Shape, loads: Sequence[Load], r_star: float, ratio: float) -> tuple[str, ...]:
    loading = load_s(profile, loads).layer_s
    at_r_star = recompute_s(profile, r_star, shape).layer_s
    sizes = " and ".join(f"{tokens} tokens from {tier}" for tier, tokens in tokens_by_tier(loads).items())
    times = (
        f"a layer of {sizes or 'nothing'} loads in {_ms(loading)} and is recomputed at {r_star:.0%} in {_ms(at_r_star)}"
    )
    if not shape.fused_tokens:
        return (f"ratio {ratio:.0%}: there is nothing to choose from",)
    if shape.selection is Selection.ASKING:
        return (
            f"ratio {ratio:.0%} = r*: the question looks at all that is loaded first, so loading hides no recompute",
        )
    if ratio == r_star:
        return (f"ratio {ratio:.0%} = r*: {times}, so more would cost time",)
    if ratio == 1.0:
        return (f"ratio 100 %: {times}, and in {_ms(recompute_s(profile, 1.0, shape).layer_s)} at 100 %",)
    return (f"ratio raised from r* = {r_star:.0%} to {ratio:.0%}, where both take as long: {times}",)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
