"""The choices of the loading controller, as pure functions: recompute ratio, storage tier, entries
to compute instead, and tokens to recompute early (CacheBlend 5.1).

1. Where loading is slow, recomputing more tokens costs no time. The ratio is the highest that costs
   none, `r = max(r*, r where recompute hides loading)`.
2. An entry is computed if loading it is slower. A question that asks waits for the lower layers,
   and no ratio hides that. Meanwhile chunks at the front of the prompt are computed, which is
   exact. Then the first tokens of the other chunks are recomputed early, before the question
   chooses.
3. If fusing is not faster than computing everything, everything is computed, which is exact
   (`estimators.pays`).
4. Entries are kept out of memory if reading them from disk does not delay the first token.

The functions are pure: they turn a profile and numbers into a decision with its reasons. Ratios and
later measurements change in steps only (`Steady`), so that equal prompts get equal ratios.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ragkv.config import R_STAR
from ragkv.fusion import Selection, budget

from .estimators import exposed_s, load_s, pays, recompute_ttft_s, ttft_s
from .profile import Profile
from .reasons import Reason
from .token_counts import Load, TokenCounts, is_fused_chunk

# The grid of ratios above r*: without it a small change of a time would change an answer.
RATIO_STEP = 0.05
# Shared storage cannot be chosen, because other replicas read its entries.
DEVICES = ("disk", "memory")  # the lowest first: it costs the least
# The factor between two speeds that count: a measured speed must be a whole step off to change.
STEP = 2**0.25
# An entry's tier is chosen for a prompt of this length.
PROMPT_TOKENS = 1024
QUESTION_TOKENS = 32
# A first token that comes later by this factor counts as not delayed.
DELAY = 1.05
# The share by which a time may exceed a bound: sums in another order are rounded differently.
SLACK = 1e-6


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision of the controller."""

    ratio: float  # recompute ratio
    computed_loads: tuple[int, ...]  # indices of the loads that are computed instead, ascending
    ttft_s: float  # estimate under this decision
    reasons: tuple[str, ...]  # short sentences with numbers
    early: int = 0  # fused tokens that are recomputed before the question chooses
    pays: bool = True  # whether fusing does; otherwise every fused entry is computed


def choose_ratio(
    profile: Profile, counts: TokenCounts, loads: Sequence[Load], r_star: float = R_STAR
) -> Decision:
    """The highest step of the ratio that costs no time, never below `r_star`."""

    def at_s(ratio: float) -> float:
        return ttft_s(profile, counts, ratio, loads)

    least_s = at_s(r_star)
    ratio = r_star
    if counts.fused_tokens and _waits(profile, counts, r_star, loads):
        ratio = _highest_step(lambda step: at_s(step) <= least_s * (1 + SLACK), r_star)
    reason = _why_ratio(profile, counts, loads, r_star, ratio)
    return Decision(ratio, (), at_s(ratio), (reason,))


def _highest_step(costs_nothing: Callable[[float], bool], r_star: float) -> float:
    """The highest ratio on the grid above `r_star` up to which no step costs anything."""
    ratio = r_star
    for number in range(math.floor(r_star / RATIO_STEP + SLACK) + 1, round(1 / RATIO_STEP) + 1):
        step = round(number * RATIO_STEP, 9)
        if not costs_nothing(step):
            break
        ratio = step
    return ratio


def choose_tier(profile: Profile, counts: TokenCounts, ratio: float, loads: Sequence[Load]) -> str:
    """The lowest of `DEVICES` that does not delay the first token: by `DELAY` at most, against the
    fastest one. `loads` are the entries, from any tier.
    """
    first_s = {
        name: ttft_s(profile, counts, ratio, [replace(load, tier=name) for load in loads])
        for name in DEVICES
        if name in profile.tiers
    }
    least_s = min(first_s.values())
    return next(name for name, one_s in first_s.items() if one_s <= least_s * DELAY)


def belongs_in_memory(
    profile: Profile,
    tokens: int,
    like: TokenCounts,
    r_star: float,
    used: bool,
    room: bool,
) -> bool:
    """Whether an entry belongs in memory, or only in the tiers below: `choose_tier` for a prompt of
    such entries, with the selector of `like`.

    An entry that no request `used` yet takes no place from others: memory must have `room`.
    """
    if not (used or room):
        return False
    count = max(1, PROMPT_TOKENS // tokens)
    fused = count * tokens
    length = fused + QUESTION_TOKENS
    counts = replace(like, fused_tokens=fused, computed_rows=QUESTION_TOKENS, prompt_tokens=length)
    loads = [Load("memory", tokens)] * count
    return choose_tier(profile, counts, r_star, loads) == "memory"


@dataclass(frozen=True, slots=True)
class Steady:
    """Measured numbers, each in use until the latest measurement is a whole step away from it."""

    used: dict[str, float] = field(default_factory=dict)  # by name

    def of(self, name: str, latest: float) -> float:
        """The number to use for `name`, whose latest value is `latest` (above 0)."""
        used = self.used.get(name)
        if used is None or max(latest / used, used / latest) >= STEP:
            used = self.used[name] = STEP ** round(math.log(latest, STEP))
        return used


def choose_computed(
    profile: Profile, counts: TokenCounts, loads: Sequence[Load], ratio: float
) -> Decision:
    """Which of `loads` to compute instead: the slowest of those that load slower than they compute,
    for the least TTFT; or those at the front, if the question asks.

    Not all of them: while some are computed, others load at no cost. And never one that loads
    faster than it computes, even if that would save time: the time that loading leaves free is
    spent on a higher ratio, which improves quality. They are taken by their time per token, so the
    set is the best one but for the chunk at its end.

    Where the question asks first, no ratio fills the time before. There the chunks at the front are
    computed as long as the model waits for loading and one more costs at most `DELAY`: they are
    exact then.
    """
    computing_s = [_computing_s(profile, counts, load) for load in loads]
    slow = [
        i
        for i, load in enumerate(loads)
        if not load.fixed and load_s(profile, [load]) > computing_s[i]
    ]
    slow.sort(key=lambda i: -load_s(profile, [loads[i]]) / loads[i].tokens)

    def without(chosen: Sequence[int]) -> Decision:
        remaining, counts_without = _without(counts, loads, chosen)
        took_s = ttft_s(profile, counts_without, ratio, remaining)
        return Decision(ratio, tuple(sorted(chosen)), took_s, ())

    found = [without(slow[:count]) for count in range(len(slow) + 1)]
    best = min(found, key=lambda one: (one.ttft_s, len(one.computed_loads)))
    if counts.selection is Selection.ASKING:
        best = _front(profile, counts, loads, ratio, best, without)
    if not slow and not best.computed_loads:
        return best
    load = loads[(slow or best.computed_loads)[0]]
    reason = Reason.SOME_COMPUTED.format(
        computed=len(best.computed_loads),
        count=len(loads),
        tokens=load.tokens,
        loading=_ms(load_s(profile, [load])),
        tier=load.tier,
        computing=_ms(_computing_s(profile, counts, load)),
        first=_ms(best.ttft_s),
        loading_all=_ms(found[0].ttft_s),
    )
    return replace(best, reasons=(reason,))


def _front(
    profile: Profile,
    counts: TokenCounts,
    loads: Sequence[Load],
    ratio: float,
    best: Decision,
    without: Callable[[Sequence[int]], Decision],
) -> Decision:
    """The decision that computes as many chunks at the front as cost nothing, if it is not slower
    than `best`.
    """
    chosen: list[int] = []
    fused = [i for i, load in enumerate(loads) if is_fused_chunk(load)]
    found = [without(())]
    for index in fused:
        remaining, counts_without = _without(counts, loads, chosen)
        if not _waits(profile, counts_without, ratio, remaining):
            break
        chosen.append(index)
        found.append(without(chosen))
    least_s = min(best.ttft_s, *(one.ttft_s for one in found))
    near = [one for one in found if one.ttft_s <= least_s * DELAY]
    return near[-1] if near else best


def choose_early(
    profile: Profile, counts: TokenCounts, loads: Sequence[Load], ratio: float
) -> Decision:
    """How many tokens to recompute while a question that asks waits for the lower layers.

    The steps of the grid that are taken begin within that wait, and cost at most `DELAY` together.
    In the lower layers they cost no time. They are computed in the upper layers, too, so the first
    token comes a little later.
    """
    at_once = Decision(ratio, (), ttft_s(profile, counts, ratio, loads), ())
    chosen = at_once
    wanted = budget(ratio, counts.fused_tokens)
    if counts.selection is not Selection.ASKING or not wanted:
        return chosen
    for number in range(1, round(1 / RATIO_STEP)):
        early = budget(number * RATIO_STEP, counts.fused_tokens)
        waits = _waits(profile, replace(counts, early_tokens=chosen.early), ratio, loads)
        took_s = ttft_s(profile, replace(counts, early_tokens=early), ratio, loads)
        enough = early + wanted > counts.fused_tokens
        if enough or not waits or took_s > at_once.ttft_s * DELAY:
            break
        chosen = Decision(ratio, (), took_s, (), early)
    if not chosen.early:
        return chosen
    times = {
        "waiting": _ms(exposed_s(profile, counts, ratio, loads)),
        "first": _ms(chosen.ttft_s),
        "first_without": _ms(at_once.ttft_s),
    }
    return replace(chosen, reasons=(Reason.EARLY.format(early=chosen.early, **times),))


def choose_all(
    profile: Profile, counts: TokenCounts, loads: Sequence[Load], r_star: float
) -> Decision:
    """All for one request: which entries to compute at r*, the ratio for the others, and how many
    tokens to recompute early.

    If fusing does not pay, every fused entry is computed.
    """
    computed = choose_computed(profile, counts, loads, r_star)
    remaining, counts_without = _without(counts, loads, computed.computed_loads)
    chosen = choose_ratio(profile, counts_without, remaining, r_star)
    early = choose_early(profile, counts_without, remaining, chosen.ratio)
    fused = [
        i
        for i, load in enumerate(loads)
        if is_fused_chunk(load) and i not in computed.computed_loads
    ]
    exact_s = recompute_ttft_s(profile, counts_without, remaining)
    if fused and counts_without.fused_tokens and not pays(early.ttft_s, exact_s):
        tokens = counts_without.fused_tokens
        times = {"exact": _ms(exact_s), "fused": _ms(early.ttft_s)}
        reasons = (*computed.reasons, Reason.NOT_PAYING.format(tokens=tokens, **times))
        everything = tuple(sorted((*fused, *computed.computed_loads)))
        return Decision(chosen.ratio, everything, exact_s, reasons, pays=False)
    reasons = (*computed.reasons, *chosen.reasons, *early.reasons)
    return replace(early, computed_loads=computed.computed_loads, reasons=reasons)


def _waits(profile: Profile, counts: TokenCounts, ratio: float, loads: Sequence[Load]) -> bool:
    """Whether the model waits for more than the first layer."""
    waited_s = exposed_s(profile, counts, ratio, loads)
    return waited_s > load_s(profile, loads) * (1 + SLACK)


def _computing_s(profile: Profile, counts: TokenCounts, load: Load) -> float:
    """Seconds that computing `load` adds to a layer."""
    return load.tokens * profile.recompute.row_s(counts.prompt_tokens)


def _without(
    counts: TokenCounts, loads: Sequence[Load], computed: Sequence[int]
) -> tuple[list[Load], TokenCounts]:
    """The loads that remain, and the counts, when those of index `computed` become cache misses."""
    remaining = [load for i, load in enumerate(loads) if i not in computed]
    fused = max(0, counts.fused_tokens - sum(loads[i].tokens for i in computed if loads[i].fused))
    rows = counts.computed_rows + sum(loads[i].tokens for i in computed)
    leading = counts.leading_rows
    for i, load in enumerate(loads):  # up to the first candidate
        if i in computed:
            leading += load.tokens
        elif load.fused:
            break
    rows = min(rows, counts.prompt_tokens - fused)
    return remaining, replace(
        counts,
        fused_tokens=fused,
        computed_rows=rows,
        leading_rows=min(leading, rows - counts.unasked_rows),
    )


def _why_ratio(
    profile: Profile, counts: TokenCounts, loads: Sequence[Load], r_star: float, ratio: float
) -> str:
    if not counts.fused_tokens:
        return Reason.NO_CANDIDATES.format(ratio=ratio)
    tokens_by_tier: Counter[str] = Counter()
    for load in loads:
        tokens_by_tier[load.tier] += load.tokens
    sizes = " and ".join(f"{tokens} tokens from {tier}" for tier, tokens in tokens_by_tier.items())
    waits_s = exposed_s(profile, counts, r_star, loads)
    times = Reason.TIMES.format(
        loads=sizes or "nothing",
        loading=_ms(profile.layers * load_s(profile, loads)),
        r_star=r_star,
        first=_ms(ttft_s(profile, counts, r_star, loads)),
        waiting=_ms(waits_s),
    )
    reason = Reason.LEAST_RATIO if ratio == r_star else Reason.RAISED_RATIO
    return reason.format(r_star=r_star, ratio=ratio, times=times)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
