"""Fictional worlds: who and what there is, what holds of them, told as chunks of prose, with typed questions.

`world(seed, spec)` is the one door: the same seed and spec give the same world on every machine. It knows nothing of
tokens; chunk sizes are sentences here and are checked in tokens by the tests.

Invariant: a world has one object for a subject and relation, so no two sentences contradict each other.
Command line: `python -m training.worlds --count 200 --seed 1 --out worlds.jsonl`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random

from training.discourse import Entity, Fact, Statement, Teller, Telling
from training.names import Kind, NameBook, NameSplit
from training.questions import Asker, Question
from training.templates import BY_NAME, RELATIONS, ROLES, WORDS, Relation

QUESTION_WEIGHTS = {
    "local": 0.7, "pron": 1.5, "same": 1.5, "alias": 2.0, "desc": 2.5, "hop2": 1.3, "hop2ref": 1.6,
    "comparison": 3.0, "followup": 1.0, "unanswerable": 1.2,
}  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """What kind of world to make."""

    telling: Telling
    names: NameSplit = "train"
    middle: float = 0.25  # share of names of three syllables
    questions: int = 10
    even: bool = False  # draw question types evenly, not by the weights of training
    relations: tuple[int, int] = (4, 6)  # few, so that each has many objects to choose among


@dataclass(frozen=True)
class World:
    """A told world."""

    seed: int
    chunks: tuple[str, ...]
    questions: tuple[Question, ...]
    statements: tuple[Statement, ...]


def level(number: int) -> Spec:
    """The curriculum: 0 is terse and tiny, 3 the world as it is asked about, 4 the long one."""
    sizes = (
        (Telling((2, 3), (2, 3), 0.6, 0.0, 0.0, 2), (1, 2)),
        (Telling((3, 4), (3, 4), 0.6, 0.05, 0.05, 3), (2, 3)),
        (Telling((3, 6), (3, 6), 0.6, 0.12, 0.1), (2, 5)),
        (Telling((4, 8), (4, 8), 0.6, 0.15, 0.12), (4, 6)),
        (Telling((8, 12), (6, 10), 0.6, 0.2, 0.12), (4, 8)),
    )
    telling, relations = sizes[number]
    middle = (0.0, 0.1, 0.25, 0.25, 0.25)[number]
    return Spec(telling, middle=middle, relations=relations)


def world(seed: int, spec: Spec) -> World:
    """The world of this seed."""
    random = Random(seed)
    names = NameBook(random, spec.names, spec.middle)
    telling = replace(spec.telling, chunks=(count := random.randint(*spec.telling.chunks), count))
    sentences = count * sum(telling.sentences) / 2 * (1 - telling.fillers)
    relations = _relations(random, random.randint(*spec.relations))
    entities = _entities(random, names, relations, sentences)
    facts = _facts(random, names, relations, entities)
    teller = Teller(random, telling, {entity.name: entity for entity in entities}, facts)
    chunks = tuple(teller.chunk(number) for number in range(count))
    strangers = tuple(_strangers(names))
    asker = Asker(
        random,
        teller.entities,
        tuple(relations),
        tuple(teller.statements),
        strangers,
        telling.templates,
        telling.variety,
    )
    return World(
        seed, chunks, tuple(asker.ask(spec.questions, {} if spec.even else QUESTION_WEIGHTS)), tuple(teller.statements)
    )


def _relations(random: Random, count: int) -> list[Relation]:
    """What this world is about: two relations that make a chain first, then others, people's more often."""
    chains = [
        (first, second)
        for first in RELATIONS
        if first.name in ROLES
        for second in RELATIONS
        if second.subject == first.object
    ]
    about_people = [relation for relation in RELATIONS if relation.subject == "person"]
    chosen = list(random.choice(chains)) if random.random() < 0.75 else random.sample(about_people, 2)
    for name, share in (("founded", 0.35), ("alias", 0.6), ("job", 0.3)):
        if BY_NAME[name] not in chosen and random.random() < share:
            chosen.append(BY_NAME[name])
    while len(chosen) < count:
        relation = random.choice(about_people if random.random() < 0.4 else RELATIONS)
        if relation not in chosen:
            chosen.append(relation)
    return chosen[:count]


def _entities(random: Random, names: NameBook, relations: list[Relation], sentences: float) -> list[Entity]:
    """Enough of every kind that there is more to tell than will be told."""
    subjects, objects = {relation.subject for relation in relations}, {relation.object for relation in relations}
    each = 1.5 * sentences / len(relations)
    entities = []
    for kind in ("person", "company", "city", "country", "event"):
        share = 1.0 if kind in subjects else 0.7 if kind in objects else 0.0
        for _ in range(max(2, round(min(each, 12) * share * random.uniform(0.8, 1.2))) if share else 0):
            drawn = random.choice((Kind.MAN, Kind.WOMAN)) if kind == "person" else Kind(kind)
            entities.append(Entity(names.draw(drawn), kind, drawn.value if kind == "person" else ""))
    return entities


def _facts(random: Random, names: NameBook, relations: list[Relation], entities: list[Entity]) -> list[Fact]:
    """All that holds: every relation of every entity."""
    by_kind: dict[str, list[str]] = {}
    for entity in entities:
        by_kind.setdefault(entity.kind, []).append(entity.name)
    facts = []
    for relation in relations:
        for subject in by_kind.get(relation.subject, []):
            if relation.object == "code":
                value = names.draw(Kind.CODE)
            else:
                value = random.choice(WORDS.get(relation.object) or by_kind[relation.object])
            facts.append(Fact(relation.name, subject, value))
    return facts


def _strangers(names: NameBook) -> list[Entity]:
    return [
        Entity(names.draw(Kind.MAN), "person", "man"),
        Entity(names.draw(Kind.WOMAN), "person", "woman"),
        Entity(names.draw(Kind.COMPANY), "company"),
        Entity(names.draw(Kind.CITY), "city"),
        Entity(names.draw(Kind.EVENT), "event"),
    ]


def record(made: World) -> dict[str, object]:
    """The world as a JSON object, without the tellings behind it."""
    return {"seed": made.seed, "chunks": made.chunks, "questions": [asdict(question) for question in made.questions]}


def main() -> None:
    """Write worlds as JSON lines."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--level", type=int, default=3)
    parser.add_argument("--names", choices=("train", "heldout", "any"), default="heldout")
    parser.add_argument("--templates", choices=("train", "variants", "heldout"), default="train")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    spec = level(options.level)
    spec = replace(spec, names=options.names, telling=replace(spec.telling, templates=options.templates))
    with options.out.open("w") as out:
        for number in range(options.count):
            out.write(json.dumps(record(world(options.seed * 1_000_000 + number, spec))) + "\n")


if __name__ == "__main__":
    main()
