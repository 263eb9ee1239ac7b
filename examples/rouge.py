"""ROUGE-L: how much of a right answer's words an answer has in the same order."""

import re
from collections.abc import Sequence

_WORDS = re.compile(r"[a-z0-9]+")


def rouge_l(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall of the longest common subsequence of words, without stemming."""
    got, wanted = _WORDS.findall(answer.lower()), _WORDS.findall(gold.lower())
    if not got or not wanted:
        return float(got == wanted)
    return 2 * _common_subsequence(got, wanted) / (len(got) + len(wanted))


def _common_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(other) + 1)
    for word in one:
        diagonal = 0
        for place, rival in enumerate(other, 1):
            above = row[place]
            row[place] = diagonal + 1 if word == rival else max(above, row[place - 1])
            diagonal = above
    return row[-1]
