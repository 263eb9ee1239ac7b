"""Narrates facts as prose: which sentence comes next, and how it mentions its subject and object.

The narrator remembers what a reader remembers: the man, the woman, the company, the city and the
event named last, the code names that were introduced, the jobs and products that were stated. A
mention is a name or a reference to one of these. The narrator knows nothing of questions or of
tokens.

Invariant: a reference means the entity of its kind *named* last, or the one description or code
name introduced before. Where another kind of mention has made that unclear, no reference is made
until the next name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from random import Random

from training.templates import BY_NAME, FILLERS, LEADS, SAME, THAT, TemplateSplit


class MentionType(Enum):
    """The form of a mention: a name, a reference of some kind, or a plain word."""

    NAME = "name"
    PRONOUN = "pron"  # she, he: a person
    THAT = "that"  # "that company": a subject
    SAME = "same"  # "the same city": an object
    ALIAS = "alias"  # a code name introduced before
    DESCRIPTION = "desc"  # "the baker", "the maker of lamps"
    WORD = "word"  # a plain word, not an entity


@dataclass(frozen=True)
class Entity:
    """Someone or something with a name."""

    name: str
    kind: str  # person, company, city, country, event
    gender: str = ""  # man or woman, of persons

    @property
    def slot(self) -> str:
        """The kind under which it is remembered as named last."""
        return self.gender or self.kind


@dataclass(frozen=True)
class Fact:
    """One relation of one entity."""

    relation: str
    subject: str
    object: str


@dataclass(frozen=True)
class Mention:
    """A span of a chunk that stands for an entity or is a plain word."""

    start: int  # characters in the chunk
    end: int
    entity: str  # the name meant, or the word
    type: MentionType
    # the chunk that says which entity a reference means; the mention's own chunk for a name
    source: int


@dataclass(frozen=True)
class Statement:
    """One fact as stated in a chunk."""

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
        """The chunks that a reader needs to understand the statement."""
        return frozenset({self.chunk, self.subject.source, self.object.source})


@dataclass(frozen=True)
class Narration:
    """How the prose of a world is written."""

    chunks: tuple[int, int] = (4, 8)
    sentences: tuple[int, int] = (4, 7)
    # share of sentences that look for something to refer to in an earlier chunk
    references: float = 0.6
    fillers: float = 0.15
    leads: float = 0.12
    variety: int = 99  # templates a relation
    templates: TemplateSplit = "train"


# a fact, how to mention its subject, how to mention its object
_Choice = tuple[Fact, MentionType, MentionType]
_REFERENCES = (
    MentionType.PRONOUN,
    MentionType.SAME,
    MentionType.THAT,
    MentionType.ALIAS,
    MentionType.DESCRIPTION,
)
_WEIGHTS = (0.26, 0.2, 0.16, 0.2, 0.18)


class Narrator:
    """Narrates facts, one sentence at a time."""

    def __init__(
        self, random: Random, narration: Narration, entities: dict[str, Entity], facts: list[Fact]
    ) -> None:
        self._random = random
        self._narration = narration
        self.entities = entities
        self._pool = list(facts)
        self._named: dict[str, tuple[str, int] | None] = {}
        # person or company -> description and the chunk of it
        self._described: dict[str, tuple[str, int]] = {}
        self._aliases: dict[str, tuple[str, int]] = {}
        values = [fact.object for fact in facts if fact.relation in ("job", "product")]
        self._unique = {value for value in values if values.count(value) == 1}
        self.statements: list[Statement] = []

    def chunk(self, number: int) -> str:
        """The prose of the next chunk."""
        text = ""
        for _ in range(self._random.randint(*self._narration.sentences)):
            filler = not self._pool or self._random.random() < self._narration.fillers
            text += " " * bool(text) + (
                self._random.choice(FILLERS)
                if filler
                else self._sentence(number, len(text) + bool(text))
            )
        return text

    def _sentence(self, chunk: int, offset: int) -> str:
        fact, subject_type, object_type = self._choose(chunk)
        self._pool.remove(fact)
        template, lead = self._template(fact, subject_type)
        subject, subject_source = self._mention(fact.subject, subject_type, chunk)
        object_, object_source = self._mention(fact.object, object_type, chunk)
        text, spans = _fill(template, {"s": subject, "o": object_}, lead)
        (s_start, s_end), (o_start, o_end) = spans["s"], spans["o"]
        statement = Statement(
            fact, chunk, offset, offset + len(text),
            Mention(offset + s_start, offset + s_end, fact.subject, subject_type, subject_source),
            Mention(offset + o_start, offset + o_end, fact.object, object_type, object_source),
        )  # fmt: skip
        self._remember(statement)
        self.statements.append(statement)
        return text

    def _choose(self, chunk: int) -> _Choice:
        if self._random.random() < self._narration.references:
            order = sorted(
                zip(_REFERENCES, _WEIGHTS, strict=True),
                key=lambda pair: -(self._random.random() ** (1 / pair[1])),
            )
            for mention_type, _ in order:
                choices = [
                    choice
                    for fact in self._pool
                    if (choice := self._with(fact, mention_type, chunk))
                ]
                if choices:
                    return self._random.choice(choices)
        weights = [
            4.0 if fact.relation == "alias" else 2.0 if fact.relation in ("job", "product") else 1.0
            for fact in self._pool
        ]
        fact = self._random.choices(self._pool, weights)[0]
        # a reference inside the chunk reads better than the name again
        if self._random.random() < 0.3:
            for mention_type in (MentionType.PRONOUN, MentionType.THAT, MentionType.SAME):
                if choice := self._with(fact, mention_type, None):
                    return choice
        return fact, MentionType.NAME, self._plain(fact.object)

    def _with(self, fact: Fact, mention_type: MentionType, chunk: int | None) -> _Choice | None:
        """The choice of this reference for the fact, if it is clear and (given a chunk) an earlier
        one resolves it.
        """
        mentioned = fact.object if mention_type is MentionType.SAME else fact.subject
        source = self._source(mentioned, mention_type, fact)
        if source is None or (chunk is not None and source == chunk):
            return None
        if mention_type is MentionType.SAME:
            return fact, MentionType.NAME, mention_type
        return fact, mention_type, self._plain(fact.object)

    def _source(self, name: str, mention_type: MentionType, fact: Fact) -> int | None:
        """The chunk that resolves this reference, or None if the reference would be ambiguous."""
        entity = self.entities.get(name)
        if entity is None:
            return None
        if mention_type is MentionType.ALIAS:
            return (
                self._aliases[name][1]
                if name in self._aliases and fact.relation != "alias"
                else None
            )
        if mention_type is MentionType.DESCRIPTION:
            known = self._described.get(name)
            return known[1] if known and fact.relation not in ("job", "product") else None
        wanted = {
            MentionType.PRONOUN: ("person",),
            MentionType.THAT: ("company", "city", "event"),
            MentionType.SAME: ("company", "city"),
        }[mention_type]
        named = self._named.get(entity.slot)
        return named[1] if entity.kind in wanted and named and named[0] == name else None

    def _plain(self, name: str) -> MentionType:
        return MentionType.NAME if name in self.entities else MentionType.WORD

    def _template(self, fact: Fact, subject_type: MentionType) -> tuple[str, str]:
        templates = BY_NAME[fact.relation].sentences(self._narration.templates)[
            : self._narration.variety
        ]
        if subject_type is MentionType.PRONOUN:
            templates = tuple(template for template in templates if template.startswith("{s} "))
        lead = self._random.choice(LEADS) if self._random.random() < self._narration.leads else ""
        template = self._random.choice(templates)
        return template, lead if template.startswith("{s}") else ""

    def _mention(self, name: str, mention_type: MentionType, chunk: int) -> tuple[str, int]:
        """The words of a mention, and the chunk that resolves it."""
        if mention_type in (MentionType.NAME, MentionType.WORD):
            return name, chunk
        entity = self.entities[name]
        if mention_type is MentionType.ALIAS:
            return self._aliases[name]
        if mention_type is MentionType.DESCRIPTION:
            return self._described[name]
        named = self._named[entity.slot]
        assert named is not None and named[0] == name
        if mention_type is MentionType.PRONOUN:
            return {"man": "he", "woman": "she"}[entity.gender], named[1]
        return self._random.choice(
            (SAME if mention_type is MentionType.SAME else THAT)[entity.kind]
        ), named[1]

    def _remember(self, statement: Statement) -> None:
        for mention in (statement.subject, statement.object):
            entity = self.entities.get(mention.entity)
            if entity is None:
                continue
            if mention.type is MentionType.NAME:
                self._named[entity.slot] = (entity.name, statement.chunk)
            elif mention.type in (MentionType.ALIAS, MentionType.DESCRIPTION):
                self._named[entity.slot] = None
        if statement.subject.type is not MentionType.NAME:
            return
        fact = statement.fact
        if fact.relation == "alias":
            self._aliases[fact.subject] = (fact.object, statement.chunk)
        elif fact.object in self._unique:
            words = (
                f"the {fact.object}" if fact.relation == "job" else f"the maker of {fact.object}"
            )
            self._described[fact.subject] = (words, statement.chunk)


def _fill(
    template: str, values: dict[str, str], lead: str
) -> tuple[str, dict[str, tuple[int, int]]]:
    """The sentence with a capital first letter, and the span of each value in it."""
    text = lead
    spans = {}
    for part in template.replace("{", "\0{").replace("}", "}\0").split("\0"):
        if part.startswith("{"):
            value = values[part[1:-1]]
            spans[part[1:-1]] = (len(text), len(text) + len(value))
            part = value
        text += part
    return text[0].upper() + text[1:], spans
