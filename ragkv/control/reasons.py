"""Why a prompt is computed as it is: the sentences that a report shows."""

from enum import StrEnum


class Reason(StrEnum):
    """Why the controller decided as it did. The values are sentences with places for numbers
    (`Reason.X.format(...)`).
    """

    # the ratio
    UNPROFILED = "ratio {ratio:.0%} = r*: {error}"
    NO_CANDIDATES = "ratio {ratio:.0%}: there are no candidates"
    LEAST_RATIO = "ratio {ratio:.0%} = r*: {times}; more would cost time"
    RAISED_RATIO = (
        "ratio raised from r* = {r_star:.0%} to {ratio:.0%}, the highest step that costs no time: "
        "{times}"
    )
    TIMES = (  # of the two above
        "{loads} loads in {loading}, and at {r_star:.0%} the first token comes after {first}, "
        "{waiting} of it waiting"
    )
    FLOOR = (
        "floor: {floor} of {count} fused tokens were recomputed; ratio {ratio:.3g} would be "
        "{budget} (fusion.floor_tokens)"
    )
    EARLY = (
        "{early} more tokens are recomputed before the question chooses: it waits {waiting} for "
        "the layers over which it asks (first token {first}, without them {first_without})"
    )
    # what is computed instead of loaded
    MOST_ROWS = (
        "all is computed: of {tokens} tokens reuse would still compute {share:.0%} ({error})"
    )
    NOT_PAYING = (
        "fusing does not pay for {tokens} tokens: they are computed, which is exact "
        "(first token {exact}, fused {fused})"
    )
    SOME_COMPUTED = (
        "{computed} of {count} chunks are computed instead of loaded: a layer of {tokens} tokens "
        "takes {loading} from {tier}, {computing} to compute (first token {first}, loading all "
        "{loading_all})"
    )
    # the profile
    CORRECTED = "corrected: lately times were those of the profile by {factors}"


class Why(StrEnum):
    """Why a part of a prompt is computed and not reused. The values are the report's sentences."""

    FULL_RECOMPUTE = "the request asks for a full recompute"
    ONLY_EXACT = "the request asks for exact reuse, and no earlier prompt began like this one"
    MISSED = "no usable KV was stored yet"
    DAMAGED = "the stored KV could not be read; if it is damaged, it is made again"
    LEADING = "the first tokens of a prompt are computed"
    OTHER_PREFIX = "it stood behind another prefix"
    OTHER_FREQUENCIES = "the RoPE frequencies changed"
    WAS_INEXACT = "it was not exact"
    LOST = "its block was lost"
    SLOWER = "computing is quicker than loading the stored KV"
    NO_GAIN = "reuse would bring the first token no sooner"  # nor that of any other chunk
