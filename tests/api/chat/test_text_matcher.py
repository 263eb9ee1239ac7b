"""The matcher finds every known text that a prompt holds whole, and nothing else."""

import random
import string
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.api.chat import text_matcher
from ragkv.api.chat.template import PlainMessage, Template
from ragkv.api.chat.text_matcher import WINDOW, TextMatch, TextMatcher
from tests.prompt.test_layout import CHATML, HEADERS
from tests.toy_tokenizers import byte_tokenizer


def naive(prompt: str, known: Sequence[str]) -> list[TextMatch]:
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
                found.append(TextMatch(at, stop, text))
                at = stop - 1
                break
        at += 1
    return found


def known(*texts: str) -> TextMatcher:
    made = TextMatcher()
    made.add(texts)
    return made


def words(rng: random.Random, count: int) -> str:
    return " ".join("".join(rng.choices("abcdeé", k=rng.randint(1, 7))) for _ in range(count))


class Prompts:
    """Rendered prompts over one corpus, with the texts that each holds whole."""

    def __init__(self) -> None:
        self.rng = rng = random.Random(5)
        long = words(rng, 400).split()
        overlapping = [" ".join(long[at : at + 40]) for at in range(0, 360, 30)]  # ten words shared with the next
        alike = [f"# The report of the mill, page\n\n{words(rng, 25)}." for _ in range(40)]
        nested = [words(rng, 30) for _ in range(10)]
        self.corpus = [*(words(rng, rng.randint(5, 60)) + "." for _ in range(300)), *overlapping, *alike, *nested]
        self.corpus += [text + " and " + words(rng, 6) for text in nested]  # longer ones that begin with a known one
        self.templates = [Template(byte_tokenizer(form), "Be brief.") for form in (CHATML, HEADERS, None)]

    def one(self, number: int) -> tuple[str, list[str]]:
        """A prompt and the texts it holds whole. Two more texts are in it with one character missing."""
        rng = self.rng
        whole = rng.choices(self.corpus, k=rng.randint(1, 8))  # with replacement: some occur twice
        cut = rng.sample(self.corpus, 2)
        pieces = [(text, True) for text in whole]
        pieces += [(text[1:] if rng.random() < 0.5 else text[:-1], False) for text in cut]
        rng.shuffle(pieces)
        form = rng.choice(("\n\n{}", "\n{}\n", "[{n}] {}\n\n", "<doc id={n}>{}</doc>", " {}", "\n- {}"))
        context = "".join(form.format(text, n=n) for n, (text, _) in enumerate(pieces))
        turns = [
            PlainMessage("system", "Use what follows."),
            PlainMessage("user", f"Context:{context}\n\nQuestion: {words(rng, 5)}?"),
        ]
        if number % 3 == 0:  # documents in the system message
            turns = [PlainMessage("system", f"Use what follows.{context}"), PlainMessage("user", words(rng, 5) + "?")]
        prompt = self.templates[number % len(self.templates)].render(turns)
        return prompt, [text for text, is_whole in pieces if is_whole]


def test_in_500_prompts_every_whole_chunk_is_found_and_nothing_else() -> None:
    prompts = Prompts()
    texts = known(*prompts.corpus)
    placed = 0
    for number in range(500):
        prompt, whole = prompts.one(number)
        found = texts.find(prompt)
        assert found == naive(prompt, prompts.corpus)
        assert all(prompt[one.start : one.stop] == one.text for one in found)
        for text in whole:  # itself, or a longer known text that begins with it
            assert any(one.text.startswith(text) for one in found)
        placed += len(whole)
    assert placed > 2_000


SENTENCE = "The mill of Marl makes paper."


class TestFind:
    def test_a_text_is_found_at_every_position(self) -> None:
        prompt = f"{SENTENCE} x {SENTENCE}{SENTENCE}"
        starts = [0, 32, 61]
        assert [one.start for one in known(SENTENCE).find(prompt)] == starts

    @pytest.mark.parametrize("prompt", [SENTENCE[1:], SENTENCE[:-1], SENTENCE.replace("mill", "Mill"), ""])
    def test_a_text_with_a_missing_or_changed_character_is_not_found(self, prompt: str) -> None:
        assert known(SENTENCE).find(f"Read: {prompt} Why?") == []

    def test_a_text_is_not_found_inside_a_word(self) -> None:
        text = "the mill makes paper"
        assert known(text).find("the mill makes papers") == []
        assert known(text).find("bathe mill makes paper") == []
        assert len(known(text).find("(the mill makes paper)")) == 1

    def test_the_leftmost_text_wins_and_at_one_position_the_longest(self) -> None:
        texts = known("abcdefgh ijklmnop", "abcdefgh ijklmnop qrst", "ijklmnop qrst uvwxyz 0123456789")
        assert [one.text for one in texts.find("abcdefgh ijklmnop qrst uvwxyz 0123456789")] == [
            "abcdefgh ijklmnop qrst"
        ]

    def test_a_discarded_text_is_not_found(self) -> None:
        texts = known(SENTENCE)
        assert len(texts.find(SENTENCE)) == 1
        texts.discard([SENTENCE, "a text that was never added"])
        assert texts.find(SENTENCE) == []

    def test_discarded_texts_take_no_memory_once_new_texts_are_merged(self) -> None:
        texts, last = TextMatcher(), ""
        for number in range(2_000):
            texts.add([f"{number:>{WINDOW}} is a text"])
            texts.discard([last])
            last = f"{number:>{WINDOW}} is a text"
        assert len(texts._buckets) == 1
        assert len(texts._sorted) + len(texts._recent) < 600
        assert [match.text for match in texts.find(last)] == [last]

    def test_a_text_shorter_than_the_window_is_not_found(self) -> None:
        assert known("x" * (WINDOW - 1)).find(f"{'x' * (WINDOW - 1)} and more text") == []

    def test_texts_are_found_before_and_after_they_are_merged_into_the_sorted_array(self) -> None:
        rng = random.Random(1)
        corpus = list({words(rng, 12) for _ in range(1_500)})
        texts = TextMatcher()
        for text in corpus:
            texts.add([text])
        assert [one.text for one in texts.find("\n".join(corpus))] == corpus


def test_a_hash_collision_never_gives_a_false_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """All substrings of one length have the same hash here, so only a comparison of the texts tells them apart."""
    import numpy as np

    monkeypatch.setattr(
        text_matcher._Sums, "hashes", lambda self, length: np.zeros(len(self._sums) - length, np.uint64)
    )
    monkeypatch.setattr(text_matcher._Sums, "hashes_at", lambda *given: np.zeros(len(given[2]), np.uint64))
    corpus = ["one text of some length", "another of some length", "a third that is not there"]
    prompt = "x another of some length, one text of some length. another of some lengt"
    assert known(*corpus).find(prompt) == naive(prompt, corpus)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_it_finds_what_an_exhaustive_search_finds(data: st.DataObject) -> None:
    text = st.text(alphabet="ab \n𝒳", min_size=WINDOW, max_size=WINDOW + 8)
    corpus = data.draw(st.lists(text, min_size=1, max_size=6))
    parts = data.draw(st.lists(st.one_of(st.sampled_from(corpus), st.text(alphabet="ab \n", max_size=9)), max_size=8))
    prompt = "".join(parts)
    assert known(*corpus).find(prompt) == naive(prompt, corpus)


def test_threads_can_add_and_find_at_the_same_time() -> None:
    rng = random.Random(2)
    corpus = [words(rng, 10) + string.ascii_letters[n % 50] for n in range(400)]
    texts, first = TextMatcher(), corpus[0]
    texts.add([first])
    with ThreadPoolExecutor(8) as pool:
        adding = [pool.submit(texts.add, [text]) for text in corpus]
        assert all(pool.map(lambda _: texts.find(f"x {first} y")[0].text == first, range(200)))
        for done in adding:
            done.result()
    assert {match.text for match in texts.find("\n".join(corpus))} == set(corpus)
