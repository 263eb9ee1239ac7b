"""Telling facts as prose: which sentence comes next, and how it mentions its subject and object.

The teller keeps what a reader keeps: the man, the woman, the company, the city and the event named last, which code
names were introduced, which jobs and products were told. A mention is a name or a reference to one of these. It knows
nothing of questions or of tokens.

Invariant: a reference means the entity of its kind *named* last, or the one description or code name introduced
before; where another kind of mention has blurred that, no reference is made until the next name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from random import Random

from training.templates import BY_NAME, FILLERS, LEADS, SAME, THAT, WORDS, TemplateSplit


class How(Enum):
    """How a mention stands for its entity."""

    NAME = "name"
    PRON = "pron"  # she, he: a person
    THAT = "that"  # "that company": a subject
    SAME = "same"  # "the same city": an object
    ALIAS = "alias"  # a code name introduced before
    DESC = "desc"  # "the baker", "the maker of lamps"
    WORD = "word"  # a plain word, not an entity


@dataclass(frozen=True)
class Entity:
    """Someone or something with a name."""

    name: str
    kind: str  # person, company, city, country, event
    gender: str = ""  # man or woman, of persons

    @property
    def slot(self) -> str:
        """Under which kind it is remembered as named last."""
        return self.gender or self.kind


@dataclass(frozen=True)
class Fact:
    """One relation of one entity."""

    relation: str
    subject: str
    object: str


@dataclass(frozen=True)
class Mention:
    """A stretch of a chunk that stands for an entity or is a word."""

    start: int  # characters in the chunk
    end: int
    entity: str  # the name meant, or the word
    how: How
    source: int  # the chunk that says whom a reference means; its own chunk for a name


@dataclass(frozen=True)
class Statement:
    """One fact as told."""

    fact: Fact
    chunk: int
    start: int
    end: int
    subject: Mention
    object: Mention

    @property
    def references(self) -> tuple[Mention, ...]:
        """The mentions that another chunk resolves."""
        return tuple(m for m in (self.subject, self.object) if m.source != self.chunk)

    @property
    def support(self) -> frozenset[int]:
        """The chunks needed to understand it."""
        return frozenset({self.chunk, self.subject.source, self.object.source})


@dataclass(frozen=True)
class Telling:
    """How a world is told."""

    chunks: tuple[int, int] = (4, 8)
    sentences: tuple[int, int] = (4, 7)
    references: float = 0.6  # share of sentences that look for something to refer to in an earlier chunk
    fillers: float = 0.15
    leads: float = 0.12
    variety: int = 99  # templates a relation
    templates: TemplateSplit = "train"


_Choice = tuple[Fact, How, How]  # a fact, how to mention its subject, how its object
_REFERENCES = (How.PRON, How.SAME, How.THAT, How.ALIAS, How.DESC)
_WEIGHTS = (0.26, 0.2, 0.16, 0.2, 0.18)


class Teller:
    """Tells facts, one sentence at a time."""

    def __init__(self, random: Random, telling: Telling, entities: dict[str, Entity], facts: list[Fact]) -> None:
        self._random, self._telling, self.entities = random, telling, entities
        self._pool = list(facts)
        self._named: dict[str, tuple[str, int] | None] = {}
        self._described: dict[str, tuple[How, str, int]] = {}  # person or company -> description and the chunk of it
        self._aliases: dict[str, tuple[str, int]] = {}
        self._told_about: set[str] = set()
        values = [fact.object for fact in facts if fact.relation in ("job", "product")]
        self._unique = {value for value in values if values.count(value) == 1}
        self.statements: list[Statement] = []

    def chunk(self, number: int) -> str:
        """The prose of the next chunk."""
        text = ""
        for _ in range(self._random.randint(*self._telling.sentences)):
            filler = not self._pool or self._random.random() < self._telling.fillers
            text += " " * bool(text) + (
                self._random.choice(FILLERS) if filler else self._sentence(number, len(text) + bool(text))
            )
        return text

    def _sentence(self, chunk: int, offset: int) -> str:
        fact, subject_how, object_how = self._choose(chunk)
        self._pool.remove(fact)
        template, lead = self._template(fact, subject_how)
        subject, subject_source = self._mention(fact.subject, subject_how, chunk)
        object_, object_source = self._mention(fact.object, object_how, chunk)
        text, spans = _fill(template, {"s": subject, "o": object_}, lead)
        (s_start, s_end), (o_start, o_end) = spans["s"], spans["o"]
        statement = Statement(
            fact, chunk, offset, offset + len(text),
            Mention(offset + s_start, offset + s_end, fact.subject, subject_how, subject_source),
            Mention(offset + o_start, offset + o_end, fact.object, object_how, object_source),
        )  # fmt: skip
        self._remember(statement)
        self.statements.append(statement)
        return text

    def _choose(self, chunk: int) -> _Choice:
        if self._random.random() < self._telling.references:
            order = sorted(
                zip(_REFERENCES, _WEIGHTS, strict=True), key=lambda pair: -(self._random.random() ** (1 / pair[1]))
            )
            for how, _ in order:
                choices = [choice for fact in self._pool if (choice := self._with(fact, how, chunk))]
                if choices:
                    return self._random.choice(choices)
        weights = [
            4.0 if fact.relation == "alias" else 2.0 if fact.relation in ("job", "product") else 1.0
            for fact in self._pool
        ]
        fact = self._random.choices(self._pool, weights)[0]
        if self._random.random() < 0.3:  # a reference inside the chunk reads better than the name again
            for how in (How.PRON, How.THAT, How.SAME):
                if choice := self._with(fact, how, None):
                    return choice
        return fact, How.NAME, self._plain(fact.object)

    def _with(self, fact: Fact, how: How, chunk: int | None) -> _Choice | None:
        """The fact told with this reference, if that is clear; with a chunk, only if an earlier one resolves it."""
        mentioned = fact.object if how is How.SAME else fact.subject
        source = self._source(mentioned, how, fact)
        if source is None or (chunk is not None and source == chunk):
            return None
        return (fact, How.NAME, how) if how is How.SAME else (fact, how, self._plain(fact.object))

    def _source(self, name: str, how: How, fact: Fact) -> int | None:
        """The chunk that resolves this reference, or None where it would not be clear."""
        entity = self.entities.get(name)
        if entity is None:
            return None
        if how is How.ALIAS:
            return self._aliases[name][1] if name in self._aliases and fact.relation != "alias" else None
        if how is How.DESC:
            known = self._described.get(name)
            return known[2] if known and fact.relation not in ("job", "product") else None
        wanted = {How.PRON: ("person",), How.THAT: ("company", "city", "event"), How.SAME: ("company", "city")}[how]
        named = self._named.get(entity.slot)
        return named[1] if entity.kind in wanted and named and named[0] == name else None

    def _plain(self, name: str) -> How:
        return How.NAME if name in self.entities else How.WORD

    def _template(self, fact: Fact, subject_how: How) -> tuple[str, str]:
        templates = BY_NAME[fact.relation].sentences(self._telling.templates)[: self._telling.variety]
        if subject_how is How.PRON:
            templates = tuple(template for template in templates if template.startswith("{s} "))
        lead = self._random.choice(LEADS) if self._random.random() < self._telling.leads else ""
        template = self._random.choice(templates)
        return template, lead if template.startswith("{s}") else ""

    def _mention(self, name: str, how: How, chunk: int) -> tuple[str, int]:
        """The words of a mention, and the chunk that resolves it."""
        if how in (How.NAME, How.WORD):
            return name, chunk
        entity = self.entities[name]
        if how is How.ALIAS:
            return self._aliases[name]
        if how is How.DESC:
            return self._described[name][1:]
        named = self._named[entity.slot]
        assert named is not None and named[0] == name
        if how is How.PRON:
            return {"man": "he", "woman": "she"}[entity.gender], named[1]
        return self._random.choice((SAME if how is How.SAME else THAT)[entity.kind]), named[1]

    def _remember(self, told: Statement) -> None:
        for mention in (told.subject, told.object):
            entity = self.entities.get(mention.entity)
            if entity is None:
                continue
            if mention.how is How.NAME:
                self._named[entity.slot] = (entity.name, told.chunk)
            elif mention.how in (How.ALIAS, How.DESC):
                self._named[entity.slot] = None
        if told.subject.how is not How.NAME:
            return
        fact = told.fact
        if fact.relation == "alias":
            self._aliases[fact.subject] = (fact.object, told.chunk)
        elif fact.object in self._unique:
            words = f"the {fact.object}" if fact.relation == "job" else f"the maker of {fact.object}"
            self._described[fact.subject] = (How.DESC, words, told.chunk)


def _fill(template: str, values: dict[str, str], lead: str) -> tuple[str, dict[str, tuple[int, int]]]:
    """The sentence, its first letter a capital, and where each value stands in it."""
    text, spans = lead, {}
    for part in template.replace("{", "\0{").replace("}", "}\0").split("\0"):
        if part.startswith("{"):
            value = values[part[1:-1]]
            spans[part[1:-1]] = (len(text), len(text) + len(value))
            part = value
        text += part
    return text[0].upper() + text[1:], spans


def word_kinds() -> tuple[str, ...]:
    """The kinds of objects that are plain words."""
    return tuple(WORDS)
