"""The sentences and questions of a world: words and phrasings, no logic. They are in `world.toml`.

A relation links a subject of one kind to an object of one kind or to a plain word. Every relation
has sentence and question templates of three splits: those of training, variants that combine the
same words differently, and held-out ones with words that training never sees. `{s}` and `{o}` stand
for the mentions of subject and object.

Invariant: the splits share no template.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from training.names import words

TemplateSplit = Literal["train", "variants", "heldout"]


@dataclass(frozen=True)
class Relation:
    """One fact a subject may have."""

    name: str
    subject: str  # "person", "company", "city", "event"
    # the kind of the object: one of the above, "country", "code" or a word list of WORDS
    object: str
    train: tuple[str, ...]
    heldout: tuple[str, ...]
    questions: tuple[str, ...]
    heldout_questions: tuple[str, ...]
    # asks for the object after a question that named the subject; {p}, {m} and {h} are its pronouns
    follow_up: str
    variants: tuple[str, ...] = ()  # the words of training, combined differently
    variant_questions: tuple[str, ...] = ()

    def sentences(self, split: TemplateSplit) -> tuple[str, ...]:
        """The sentence templates of one side of the split."""
        return {"train": self.train, "variants": self.variants, "heldout": self.heldout}[split]

    def asked(self, split: TemplateSplit) -> tuple[str, ...]:
        """The question templates of one side of the split."""
        return {
            "train": self.questions,
            "variants": self.variant_questions,
            "heldout": self.heldout_questions,
        }[split]


_WORLD = tomllib.loads((Path(__file__).parent / "world.toml").read_text(encoding="utf-8"))
LEADS, FILLERS, SYSTEM = (tuple(_WORLD[name]) for name in ("leads", "fillers", "system"))
COMPARISON: dict[TemplateSplit, tuple[str, ...]] = {
    split: tuple(asked) for split, asked in _WORLD["comparison"].items()
}
WORDS: dict[str, tuple[str, ...]] = {kind: words(text) for kind, text in _WORLD["words"].items()}
RELATIONS = tuple(
    Relation(
        **{name: value if isinstance(value, str) else tuple(value) for name, value in table.items()}
    )
    for table in _WORLD["relation"]
)
BY_NAME: dict[str, Relation] = {relation.name: relation for relation in RELATIONS}

# How the answer of a first question is named inside a second one: "the employer of Talus".
ROLES: dict[str, str] = {
    "employer": "the employer of {s}",
    "home": "the home city of {s}",
    "seat": "the city of {s}",
    "venue": "the host city of {s}",
    "sponsor": "the sponsor of {s}",
}
SAME: dict[str, tuple[str, ...]] = {
    "company": ("the same company", "that company"),
    "city": ("the same city", "that city"),
}
THAT: dict[str, tuple[str, ...]] = {
    "company": ("that company", "this company", "the company"),
    "city": ("that city", "this city", "the city"),
    "event": ("that event", "this event", "the event"),
}
