"""How good an answer is: exact match and token F1 by SQuAD's rules, ROUGE-L by longest common
subsequence.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WORDS = re.compile(r"[a-z0-9]+")


def normalized(text: str) -> str:
    """SQuAD's normal form: lower case, without punctuation and articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, gold: str) -> float:
    """1.0 if both have the same normal form."""
    return float(normalized(answer) == normalized(gold))


def token_f1(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall over the words of both normal forms; 1.0 if both are
    empty.
    """
    got = normalized(answer).split()
    wanted = normalized(gold).split()
    if not got or not wanted:
        return float(got == wanted)
    return 2 * (Counter(got) & Counter(wanted)).total() / (len(got) + len(wanted))


def best(metric: Callable[[str, str], float], answer: str, golds: Sequence[str]) -> float:
    """The metric's best value over the gold answers."""
    return max(metric(answer, gold) for gold in golds)


def rouge_l(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall of the longest common subsequence of words, without
    stemming.
    """
    got = _WORDS.findall(answer.lower())
    wanted = _WORDS.findall(gold.lower())
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
