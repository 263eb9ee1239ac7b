"""Drafts from the prompt. An answer often copies from its passages, so the tokens that follow in a
passage are tried as its next ones.

A draft is what follows an earlier occurrence of the answer's last tokens. One decoding step
verifies the whole draft: a few rows take hardly longer than a single one, because both read all
weights. Only tokens that the model would have chosen are kept. The answer is the same with and
without drafts, greedy or sampled.
"""

from collections.abc import Sequence

# the number of last tokens that must occur earlier; the longer match is tried first
LONGEST_MATCH = 3
SHORTEST_MATCH = 2
# The number doubles if all were accepted, and falls to the accepted ones if not.
FIRST_DRAFTS = 3
# Drafts that turn out wrong may cost an answer this share of its time without drafts.
MOST_LOST = 0.03
# tokens that count as decoded before an answer, so that its first drafts may be wrong
GRANTED = 36


class Drafts:
    """Proposes the next tokens of one answer, from its prompt and its tokens so far."""

    def __init__(self, prompt_ids: Sequence[int], most: int) -> None:
        """A step has at most `most` drafts; 0 turns them off."""
        self._ids = list(prompt_ids)
        self._begin = len(prompt_ids) - GRANTED
        # the last place after each run of tokens, except the very end
        self._ends: dict[tuple[int, ...], int] = {}
        # the number of ids whose runs are in `_ends`; 0 before the first token
        self._indexed = 0
        self._most = most
        self._length = FIRST_DRAFTS
        self._plain_s = 0.0  # time of a step without drafts; 0 before the first such step
        self._lost_s = 0.0  # time that all steps with drafts lost so far
        # Time that the next step with drafts loses if all of them are wrong. It is the least time
        # that drafts have added to a step so far.
        self._risk_s = 0.0
        self.proposed = self.accepted = 0

    def add(self, token: int) -> None:
        """Add the next token of the answer."""
        self._ids.append(token)

    def propose(self, room: int) -> tuple[int, ...]:
        """Tokens that may follow, at most `room`; none if nothing like it stood before, or if
        drafts do not pay.
        """
        if not self._most or self._lost_s + self._risk_s >= MOST_LOST * self._plain_s * (
            len(self._ids) - self._begin
        ):
            return ()
        for at in range(self._indexed, len(self._ids)):
            for length in range(SHORTEST_MATCH, min(LONGEST_MATCH, at) + 1):
                self._ends[tuple(self._ids[at - length : at])] = at
        self._indexed = len(self._ids)
        for length in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
            if (end := self._ends.get(tuple(self._ids[-length:]))) is not None:
                return tuple(self._ids[end : end + min(self._length, self._most, room)])
        return ()

    def verified(self, drafted: int, accepted: int, seconds: float) -> None:
        """Learn from a step: its number of drafts, how many were right, and its time."""
        if not drafted:  # the time to compare with; 0 for the first token, which needs no step
            self._plain_s = 0.8 * self._plain_s + 0.2 * seconds if self._plain_s else seconds
            return
        self._length = 2 * drafted if accepted == drafted else max(SHORTEST_MATCH, accepted)
        # a longer step was disturbed by other work
        longer_s = min(seconds - self._plain_s, drafted * self._plain_s)
        self._risk_s = min(self._risk_s, longer_s) if self.proposed else longer_s
        self._lost_s += longer_s - accepted * self._plain_s
        self.proposed = self.proposed + drafted
        self.accepted = self.accepted + accepted
