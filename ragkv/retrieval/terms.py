"""The terms of a text for BM25."""

import re
from itertools import pairwise

from ragkv.runtime.words import Word, words

# `_HANGUL` is a Korean word with what is appended to it; its pairs of characters find it, too.
_HANGUL = re.compile("[\uac00-\ud7a3]{3,}")


def terms(text: str) -> list[str]:
    """The words of a text; of scripts without spaces, and of Korean, also pairs of characters."""
    found: list[str] = []
    before: Word | None = None
    for word in words(text):
        found.append(word.text)
        if word.is_cut and before is not None and before.is_cut and before.end == word.start:
            found.append(before.text + word.text)
        elif _HANGUL.fullmatch(word.text):
            found += map("".join, pairwise(word.text))
        before = word
    return found
