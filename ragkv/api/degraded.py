"""What a replica does without while shared storage does not answer, as `/readyz` and `/v1/stats` say it."""

from collections.abc import Iterable

CONVERSATIONS = (
    "The Redis server of the conversations does not answer: a request that names a conversation is refused with 503, "
    "and a conversation without a name is computed from its messages."
)


def described(away: Iterable[str]) -> list[str]:
    """A sentence for each thing that does not answer; `away` is as in `Engine.away`."""
    tier = "{} does not answer: what only it holds is computed, and other replicas do not find what is stored here now."
    return [CONVERSATIONS if name == "conversations" else tier.format(name) for name in sorted(set(away))]
