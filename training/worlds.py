"""Fictional worlds: entities and facts, narrated as chunks of prose, with typed questions.

`world(seed, spec)` is the entry point: the same seed and spec give the same world on every machine.
This file knows nothing of tokens: it counts chunk sizes in sentences, and the tests check them in
tokens.

Invariant: a world has one object for a subject and relation, so no two sentences contradict each
other.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from random import Random

from training.discourse import Entity, Fact, Narration, Narrator, Statement
from training.names import Kind, NameGenerator, NameSplit
from training.questions import Question, QuestionGenerator
from training.templates import BY_NAME, RELATIONS, ROLES, WORDS, Relation

QUESTION_WEIGHTS = {
    "local": 0.7, "pron": 1.5, "same": 1.5, "alias": 2.0, "desc": 2.5, "hop2": 1.3, "hop2ref": 1.6,
    "comparison": 3.0, "followup": 1.0, "unanswerable": 1.2,
}  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """The parameters of a world."""

    narration: Narration
    names: NameSplit = "train"
    middle: float = 0.25  # share of names with three syllables
    questions: int = 10
    even: bool = False  # draw question types evenly instead of by the weights of training
    relations: tuple[int, int] = (4, 6)  # few, so that each relation has many possible objects


@dataclass(frozen=True)
class World:
    """A narrated world."""

    seed: int
    chunks: tuple[str, ...]
    questions: tuple[Question, ...]
    statements: tuple[Statement, ...]


def level(number: int) -> Spec:
    """The curriculum: level 0 is terse and tiny, 3 is used for evaluation, 4 has long contexts, 5
    some 2,000 tokens.
    """
    sizes = (
        (Narration((2, 3), (2, 3), 0.6, 0.0, 0.0, 2), (1, 2)),
        (Narration((3, 4), (3, 4), 0.6, 0.05, 0.05, 3), (2, 3)),
        (Narration((3, 6), (3, 6), 0.6, 0.12, 0.1), (2, 5)),
        (Narration((4, 8), (4, 8), 0.6, 0.15, 0.12), (4, 6)),
        (Narration((8, 12), (6, 10), 0.6, 0.2, 0.12), (4, 8)),
        (Narration((15, 17), (14, 17), 0.6, 0.2, 0.12), (5, 8)),
    )
    narration, relations = sizes[number]
    middle = (0.0, 0.1, 0.25, 0.25, 0.25, 0.25)[number]
    return Spec(narration, middle=middle, relations=relations)


def world(seed: int, spec: Spec) -> World:
    """The world of this seed and spec."""
    random = Random(seed)
    names = NameGenerator(random, spec.names, spec.middle)
    narration = replace(
        spec.narration, chunks=(count := random.randint(*spec.narration.chunks), count)
    )
    sentences = count * sum(narration.sentences) / 2 * (1 - narration.fillers)
    relations = _relations(random, random.randint(*spec.relations))
    entities = _entities(random, names, relations, sentences)
    facts = _facts(random, names, relations, entities)
    narrator = Narrator(random, narration, {entity.name: entity for entity in entities}, facts)
    chunks = tuple(narrator.chunk(number) for number in range(count))
    unmentioned = tuple(_unmentioned(names))
    statements = tuple(narrator.statements)
    generator = QuestionGenerator(
        random, narrator.entities, tuple(relations), statements, unmentioned, narration
    )
    questions = generator.ask(spec.questions, {} if spec.even else QUESTION_WEIGHTS)
    return World(seed, chunks, tuple(questions), statements)


def _relations(random: Random, count: int) -> list[Relation]:
    """The relations of a world: first two that form a chain, then others, more often relations of
    people.
    """
    chains = [
        (first, second)
        for first in RELATIONS
        if first.name in ROLES
        for second in RELATIONS
        if second.subject == first.object
    ]
    about_people = [relation for relation in RELATIONS if relation.subject == "person"]
    chosen = (
        list(random.choice(chains)) if random.random() < 0.75 else random.sample(about_people, 2)
    )
    for name, share in (("founded", 0.35), ("alias", 0.6), ("job", 0.3)):
        if BY_NAME[name] not in chosen and random.random() < share:
            chosen.append(BY_NAME[name])
    while len(chosen) < count:
        relation = random.choice(about_people if random.random() < 0.4 else RELATIONS)
        if relation not in chosen:
            chosen.append(relation)
    return chosen[:count]


def _entities(
    random: Random, names: NameGenerator, relations: list[Relation], sentences: float
) -> list[Entity]:
    """Enough entities of every kind that there are more facts than sentences."""
    subjects = {relation.subject for relation in relations}
    objects = {relation.object for relation in relations}
    each = 1.5 * sentences / len(relations)
    entities = []
    for kind in ("person", "company", "city", "country", "event"):
        share = 1.0 if kind in subjects else 0.7 if kind in objects else 0.0
        for _ in range(
            max(2, round(min(each, 12) * share * random.uniform(0.8, 1.2))) if share else 0
        ):
            drawn = random.choice((Kind.MAN, Kind.WOMAN)) if kind == "person" else Kind(kind)
            entities.append(
                Entity(names.draw(drawn), kind, drawn.value if kind == "person" else "")
            )
    return entities


def _facts(
    random: Random, names: NameGenerator, relations: list[Relation], entities: list[Entity]
) -> list[Fact]:
    """All facts: every relation of every entity."""
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


def _unmentioned(names: NameGenerator) -> list[Entity]:
    return [
        Entity(names.draw(Kind.MAN), "person", "man"),
        Entity(names.draw(Kind.WOMAN), "person", "woman"),
        Entity(names.draw(Kind.COMPANY), "company"),
        Entity(names.draw(Kind.CITY), "city"),
        Entity(names.draw(Kind.EVENT), "event"),
    ]


def record(made: World) -> dict[str, object]:
    """The world as a JSON object, without its statements."""
    return {
        "seed": made.seed,
        "chunks": made.chunks,
        "questions": [asdict(question) for question in made.questions],
    }
