"""The sentences and questions of a world: words and phrasings, no logic. Those of relations are in `relations.toml`.

A relation links a subject of one kind to an object of one kind or to a plain word. Every relation has sentence and
question templates of three splits: those of training, variants that combine the same words differently, and held-out
ones with words that training never sees. `{s}` and `{o}` stand for the mentions of subject and object.

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
    object: str  # the kind of the object: one of the above, "country", "code" or a word list of WORDS
    train: tuple[str, ...]
    heldout: tuple[str, ...]
    questions: tuple[str, ...]
    heldout_questions: tuple[str, ...]
    follow_up: str  # asks for the object after a question that named the subject; {p}, {m} and {h} are its pronouns
    variants: tuple[str, ...] = ()  # the words of training, combined differently
    variant_questions: tuple[str, ...] = ()

    def sentences(self, split: TemplateSplit) -> tuple[str, ...]:
        """The sentence templates of one side of the split."""
        return {"train": self.train, "variants": self.variants, "heldout": self.heldout}[split]

    def asked(self, split: TemplateSplit) -> tuple[str, ...]:
        """The question templates of one side of the split."""
        return {"train": self.questions, "variants": self.variant_questions, "heldout": self.heldout_questions}[split]


WORDS: dict[str, tuple[str, ...]] = {
    "job": words(
        "baker teacher pilot doctor lawyer painter sailor tailor gardener librarian carpenter dentist potter weaver "
        "butcher judge clerk plumber printer singer dancer writer barber miller fisher hunter jeweller chemist"
    ),
    "hobby": words(
        "harp flute violin cello piano drums trumpet guitar banjo lute organ fiddle horn oboe bassoon tuba mandolin "
        "zither clarinet trombone bagpipes ukulele"
    ),
    "product": words(
        "lamps chairs boats clocks shoes pens radios cameras ovens ladders mirrors bicycles kettles hats tents knives "
        "candles carpets engines pumps bottles umbrellas blankets locks keys scales"
    ),
    "year": tuple(str(year) for year in range(1920, 1990)),
    "dish": words(
        "cheese honey bread soup wine beer plums cherries sausages mustard jam pickles cakes olives figs nuts pears "
        "trout salmon dumplings"
    ),
    "month": words("January February March April May June July August September October November December"),
}


def _relations() -> tuple[Relation, ...]:
    tables = tomllib.loads((Path(__file__).parent / "relations.toml").read_text(encoding="utf-8"))["relation"]
    return tuple(
        Relation(**{name: value if isinstance(value, str) else tuple(value) for name, value in table.items()})
        for table in tables
    )


RELATIONS = _relations()
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
COMPARISON: dict[TemplateSplit, tuple[str, ...]] = {
    "train": (
        "Which company was founded earlier, {a} or {b}?",
        "Who was founded earlier, {a} or {b}?",
        "Which is older, {a} or {b}?",
        "Which one was founded earlier, {a} or {b}?",
        "Of the two, which is older, {a} or {b}?",
    ),
    "variants": ("Which was founded earlier, {a} or {b}?", "Who is older, {a} or {b}?"),
    "heldout": ("Which company is older, {a} or {b}?", "Who was started earlier, {a} or {b}?"),
}
LEADS = (
    "Today ",
    "By all accounts, ",
    "As far as we know, ",
    "For some time now, ",
    "According to the register, ",
    "As everyone knows, ",
    "In fact, ",
    "Once more: ",
)
FILLERS = (
    "The weather stayed mild until late autumn.",
    "Prices rose a little in the spring.",
    "Many reports were written on the matter.",
    "Critics were not impressed at first.",
    "The old road was closed for repairs.",
    "Nothing else was recorded at the time.",
    "A short film was made about it.",
    "Readers asked for more details later.",
    "The archive keeps a copy of this note.",
    "The markets were busy that week.",
    "Letters from friends were lost in the post.",
    "Visitors brought flowers and cakes.",
    "The feast went on all night.",
    "The place was quiet again by the next year.",
    "Some people like it, and others do not.",
    "A map of the centre hangs on the wall.",
    "No money comes from that source any more.",
    "The streets were empty in the south.",
    "Snow covered the coast for a week.",
    "The trade in wool was never large.",
    "Work began early and went on all day.",
    "The bridge was painted green.",
    "Nobody took notice of the news.",
    "The papers called it a good year.",
    "It rained on the day of the parade.",
    "A new school was planned but never built.",
    "The train was late as always.",
    "Two of the letters are signed and dated.",
    "The museum bought three old maps.",
    "Tea was served in the garden.",
    "The story was told in many ways.",
    "A dog slept in front of the door.",
)
SYSTEM = (
    "Answer from the documents.",
    "Answer in one word.",
    "You are a careful reader.",
    "Use only what the documents say.",
    "If the documents do not say, answer unknown.",
    "Read the notes and answer the question.",
)
