"""Question sets for `benchmarks.real`: real prose, each with passages that need each other, dev and
test apart.

Files are read as published and never copied into the project. A question's half is decided by what
it is about (its article, its conversation or its own text), so that no passage of a test question
was seen while a constant was chosen.
"""

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.quality_data import read
from ragkv.errors import InputError

_SENTENCE_ENDS = re.compile(r"(?<=\.) ")
# Longer passages of MuSiQue and mtRAG are cut here, so that ten fit a context of 8,192.
PASSAGE_CHARACTERS = 1_600


@dataclass(frozen=True)
class Asked:
    """A question over passages, with the answers that count as right."""

    key: str  # the same in every run: results are found again by it
    passages: tuple[str, ...]
    question: str
    golds: tuple[str, ...]


def half_of(topic: str) -> str:
    """ "dev" or "test": three of ten topics are for choosing, the others for reporting."""
    return "dev" if hashlib.blake2b(topic.encode(), digest_size=2).digest()[0] % 10 < 3 else "test"


def _seeded(key: str) -> random.Random:
    return random.Random(hashlib.blake2b(key.encode(), digest_size=8).hexdigest())


def _file(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        raise InputError(
            f"{folder} has no {name}, which this set is read from: docs/research/selection.md says where "
            "it is."
        )
    return folder / name


def _articles(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(_file(folder, "xquad.en.json").read_text("utf-8"))[
        "data"
    ]
    return found


def paragraphs(folder: Path) -> Iterator[str]:
    """All paragraphs of XQuAD's articles."""
    for article in _articles(folder):
        yield from (one["context"] for one in article["paragraphs"])


def _xquad(folder: Path, half: str, same: int = 4, others: int = 3) -> Iterator[Asked]:
    """The paragraph that answers among `same` of its article and `others` of other articles, in any
    order.
    """
    articles = _articles(folder)
    for at, article in enumerate(articles):
        if half_of(article.get("title") or str(at)) != half:
            continue
        elsewhere = [
            one["context"]
            for other in articles
            if other is not article
            for one in other["paragraphs"]
        ]
        for paragraph in article["paragraphs"]:
            siblings = [one["context"] for one in article["paragraphs"] if one is not paragraph]
            for asked in paragraph["qas"]:
                rng = _seeded(asked["id"])
                near = rng.sample(siblings, min(same, len(siblings)))
                passages = [*near, *rng.sample(elsewhere, others), paragraph["context"]]
                rng.shuffle(passages)
                golds = tuple(dict.fromkeys(one["text"] for one in asked["answers"]))
                yield Asked(asked["id"], tuple(passages), asked["question"], golds)


def _six(folder: Path, half: str) -> Iterator[Asked]:
    """Like XQuAD with six passages of three sentences: prompts of about 600 tokens, so that many
    questions can be asked.
    """
    for asked in _xquad(folder, half, same=3, others=2):
        passages = tuple(_sentences(text, asked.golds, before=2) for text in asked.passages)
        if any(gold in text for gold in asked.golds for text in passages):
            yield Asked(f"six-{asked.key}", passages, asked.question, asked.golds)


def _long(folder: Path, half: str) -> Iterator[Asked]:
    """Like XQuAD with 16 chunks of about 250 tokens: each is two paragraphs."""
    for asked in _xquad(folder, half, same=4, others=27):
        pairs = zip(asked.passages[::2], asked.passages[1::2], strict=False)
        chunks = tuple("\n\n".join(pair) for pair in pairs)
        if any(gold in chunk for gold in asked.golds for chunk in chunks):
            yield Asked(f"long-{asked.key}", chunks, asked.question, asked.golds)


def _short(folder: Path, half: str) -> Iterator[Asked]:
    """Like XQuAD with ten passages of two sentences, about as short as those of HotpotQA."""
    for asked in _xquad(folder, half, same=4, others=5):
        passages = tuple(_sentences(text, asked.golds, before=1) for text in asked.passages)
        if any(gold in text for gold in asked.golds for text in passages):
            yield Asked(f"short-{asked.key}", passages, asked.question, asked.golds)


def _sentences(text: str, golds: Sequence[str], before: int) -> str:
    """The sentence with an answer and so many before it; as many from the beginning if none has
    one.
    """
    found = _SENTENCE_ENDS.split(text)
    at = next((n for n, one in enumerate(found) if any(gold in one for gold in golds)), before)
    return " ".join(found[max(0, at - before) : max(before + 1, at + 1)])


def _published(name: str) -> Callable[[Path, str], Iterator[Asked]]:
    """A set in the form of LongBench, HotpotQA or MuSiQue, as `benchmarks.papers_quality`
    reads it.
    """

    def read_half(folder: Path, half: str) -> Iterator[Asked]:
        for context in read(_file(folder, name)):
            for question in context.questions:
                if half_of(question.text) == half:
                    passages = tuple(one[:PASSAGE_CHARACTERS].strip() for one in context.chunks)
                    yield Asked(f"{name}-{question.text}", passages, question.text, question.golds)

    return read_half


def _mtrag(folder: Path, half: str) -> Iterator[Asked]:
    """The last turn of a conversation over retrieved passages; the earlier turns stand before its
    question.
    """
    for line in _file(folder, "mtragun_reference.jsonl").read_text("utf-8").splitlines():
        task = json.loads(line)
        if (
            half_of(task["conversation_id"]) != half
            or len(task["contexts"]) < 2
            or not task["targets"]
        ):
            continue
        said = "\n".join(
            f"{turn['speaker'].capitalize()}: {turn['text']}" for turn in task["input"]
        )
        passages = tuple(one["text"].strip()[:PASSAGE_CHARACTERS] for one in task["contexts"])
        yield Asked(task["task_id"], passages, said, tuple(one["text"] for one in task["targets"]))


_NAMES = (
    "Alder",
    "Birch",
    "Cedar",
    "Dorset",
    "Elmore",
    "Farrow",
    "Garnet",
    "Hollis",
    "Ibsen",
    "Jarrow",
    "Kestrel",
)


def _needles(folder: Path, half: str) -> Iterator[Asked]:
    """Sentences of ours in real prose: several keys, several values of one key, a variable followed
    through chunks.
    """
    prose = [one["context"] for article in _articles(folder) for one in article["paragraphs"]]
    for number in range(120):
        key = f"needle-{number}"
        if half_of(key) != half:
            continue
        rng = _seeded(key)
        names = rng.sample(_NAMES, 4)
        codes = [str(rng.randrange(10_000, 99_999)) for _ in range(4)]
        passages = rng.sample(prose, 8)
        if number % 3 == 0:  # several keys
            sentences = [
                f"The access code of room {name} is {code}."
                for name, code in zip(names, codes, strict=True)
            ]
            question = f"What is the access code of room {names[2]}?"
            golds = (codes[2],)
        elif number % 3 == 1:  # several values of one key
            sentences = [
                f"One of the keepers of the house {names[0]} is {name}." for name in names[1:]
            ]
            question = f"Who are the keepers of the house {names[0]}?"
            golds = (", ".join(names[1:]),)
        else:  # a variable through chunks
            sentences = [
                f"The box {names[0]} holds the number {codes[0]}.",
                f"The box {names[1]} holds the same number as the box {names[0]}.",
                f"The box {names[2]} holds the same number as the box {names[1]}.",
            ]
            question = f"Which number does the box {names[2]} hold?"
            golds = (codes[0],)
        for sentence, at in zip(
            sentences, sorted(rng.sample(range(8), len(sentences))), strict=True
        ):
            parts = _SENTENCE_ENDS.split(passages[at])
            parts.insert(rng.randrange(1, len(parts) + 1), sentence)
            passages[at] = " ".join(parts)
        yield Asked(key, tuple(passages), question, golds)


def _chat(folder: Path, half: str) -> Iterator[Asked]:
    """The needles, each behind twelve other questions and their answers in one message, as a client
    sends a chat.
    """
    paragraphs = (one for article in _articles(folder) for one in article["paragraphs"])
    pool = [
        (asked["question"], asked["answers"][0]["text"])
        for one in paragraphs
        for asked in one["qas"]
    ]
    for asked in _needles(folder, half):
        turns = _seeded(asked.key).sample(pool, 12)
        said = "".join(f"User: {question}\nAssistant: {answer}\n" for question, answer in turns)
        yield replace(asked, question=f"{said}User: {asked.question}")


SETS: dict[str, Callable[[Path, str], Iterator[Asked]]] = {
    "xquad": _xquad,
    "six": _six,
    "short": _short,
    "long": _long,
    "musique": _published("musique_s_100.json"),
    "2wikimqa": _published("MiniLongBench_2wikimqa.json"),
    "mtrag": _mtrag,
    "needles": _needles,
    "chat": _chat,
}


def questions(name: str, folder: Path, half: str, count: int | None) -> Sequence[Asked]:
    """`count` questions of a half of a set (all: `None`), always the same ones, spread over its
    topics.
    """
    found = sorted(
        SETS[name](folder, half), key=lambda one: hashlib.blake2b(one.key.encode()).digest()
    )
    return found[:count]
