"""The matcher finds every known text that a prompt holds whole, and nothing else."""

import random
import re
import string
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.api.chat.text_matcher import WINDOW, Place, TextMatcher


def naive(prompt: str, known: Sequence[str]) -> list[Place]:
    """Leftmost, longest, whole words: tries every text at every position."""
    found, at = [], 0
    candidates = defaultdict(list)
    for text in sorted((text for text in known if len(text) >= WINDOW), key=len, reverse=True):
        candidates[text[:4]].append(text)
    while at < len(prompt):
        for text in candidates.get(prompt[at : at + 4], ()):
            stop = at + len(text)
            inside = at > 0 and prompt[at - 1].isalnum() and text[0].isalnum()
            inside |= stop < len(prompt) and prompt[stop].isalnum() and text[-1].isalnum()
            if prompt.startswith(text, at) and not inside:
                found.append(Place(at, text))
                at = stop - 1
                break
        at += 1
    return found


def find(texts: TextMatcher, prompt: str) -> list[Place]:
    """What is found in `prompt`, whose words are letters and digits."""

    def is_border(start: int, stop: int) -> bool:
        return not re.search(r"\w\w", prompt[max(0, start - 1) : start + 1] + " " + prompt[stop - 1 : stop + 1])

    return texts.find(prompt, is_border)


def known(*texts: str) -> TextMatcher:
    made = TextMatcher()
    made.add(texts)
    return made


def words(rng: random.Random, count: int) -> str:
    return " ".join("".join(rng.choices("abcdeé", k=rng.randint(1, 7))) for _ in range(count))


SENTENCE = "The mill of Marl makes paper."


class TestFind:
    @pytest.mark.parametrize("prompt", [SENTENCE[1:], SENTENCE[:-1], SENTENCE.replace("mill", "Mill"), ""])
    def test_a_text_with_a_missing_or_changed_character_is_not_found(self, prompt: str) -> None:
        assert find(known(SENTENCE), f"Read: {prompt} Why?") == []

    def test_a_text_is_not_found_inside_a_word(self) -> None:
        text = "the mill makes paper"
        assert find(known(text), "the mill makes papers") == []
        assert find(known(text), "bathe mill makes paper") == []
        assert len(find(known(text), "(the mill makes paper)")) == 1

    def test_the_leftmost_text_wins_and_at_one_position_the_longest(self) -> None:
        texts = known("abcdefgh ijklmnop", "abcdefgh ijklmnop qrst", "ijklmnop qrst uvwxyz 0123456789")
        assert [one.text for one in find(texts, "abcdefgh ijklmnop qrst uvwxyz 0123456789")] == [
            "abcdefgh ijklmnop qrst"
        ]

    def test_a_discarded_text_is_not_found(self) -> None:
        texts = known(SENTENCE)
        assert len(find(texts, SENTENCE)) == 1
        texts.discard([SENTENCE, "a text that was never added"])
        assert find(texts, SENTENCE) == []


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_it_finds_what_an_exhaustive_search_finds(data: st.DataObject) -> None:
    text = st.text(alphabet="ab \n𝒳", min_size=WINDOW, max_size=WINDOW + 8)
    corpus = data.draw(st.lists(text, min_size=1, max_size=6))
    parts = data.draw(st.lists(st.one_of(st.sampled_from(corpus), st.text(alphabet="ab \n", max_size=9)), max_size=8))
    prompt = "".join(parts)
    assert find(known(*corpus), prompt) == naive(prompt, corpus)


def test_threads_can_add_and_find_at_the_same_time() -> None:
    rng = random.Random(2)
    corpus = [words(rng, 10) + string.ascii_letters[n % 50] for n in range(400)]
    texts, first = TextMatcher(), corpus[0]
    texts.add([first])
    with ThreadPoolExecutor(8) as pool:
        adding = [pool.submit(texts.add, [text]) for text in corpus]
        assert all(pool.map(lambda _: find(texts, f"x {first} y")[0].text == first, range(200)))
        for done in adding:
            done.result()
    assert {match.text for match in find(texts, "\n".join(corpus))} == set(corpus)
