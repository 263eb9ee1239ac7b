"""From how many tokens on fusing pays, and after how many uses an entry has paid for its making.

Pure functions of a profile: times in seconds, lengths in tokens. Few tokens are computed in hardly more time than they
take to load, rotate and recompute in part; then a full recompute is as fast, and exact.
"""

import math
from dataclasses import dataclass

from ragkv.fusion.estimators import Load, Selection, Shape, pays, recompute_ttft_s, ttft_s
from ragkv.fusion.profile import Profile

FEWEST_TOKENS, MOST_TOKENS = 16, 1 << 17  # `least_tokens` looks between these tokens of chunks,
STEPS_A_DOUBLING = 4  # in so many steps for each doubling.


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests that differ only in the number of tokens in their chunks."""

    tier: str
    ratio: float
    chunk_tokens: int  # the longest chunks
    question_tokens: int
    selection: Selection = Selection.STATIC


def least_tokens(profile: Profile, kind: Kind) -> int | None:
    """From how many tokens of chunks on fusing pays; `None` if it does not up to `MOST_TOKENS`.

    There are at least two chunks, the first of which stands right behind the prefix and is exact.
    """
    for step in range(STEPS_A_DOUBLING * int(math.log2(MOST_TOKENS / FEWEST_TOKENS)) + 1):
        tokens = round(FEWEST_TOKENS * 2 ** (step / STEPS_A_DOUBLING))
        shape, loads = request(kind, tokens)
        if pays(ttft_s(profile, shape, kind.ratio, loads), recompute_ttft_s(profile, shape, loads)):
            return tokens
    return None


def request(kind: Kind, tokens: int) -> tuple[Shape, list[Load]]:
    """A request with that many tokens in its chunks."""
    count = max(2, math.ceil(tokens / kind.chunk_tokens))
    each = max(1, tokens // count)
    loads = [Load(kind.tier, each, fused=number > 0) for number in range(count)]
    shape = Shape(
        (count - 1) * each, kind.question_tokens, count * each + kind.question_tokens, selection=kind.selection
    )
    return shape, loads


def uses_until_paid(profile: Profile, entry_tokens: int, passes: float, gain_s: float) -> int | None:
    """After how many uses an entry has saved the time it took to make; `None` if a use saves nothing.

    Its making takes `passes` prefills of its tokens, and each use saves `gain_s`.
    """
    return None if gain_s <= 0 else math.ceil(passes * profile.prefill.at(entry_tokens) / gain_s)
