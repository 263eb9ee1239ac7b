"""Questions about a told world, their answers, the chunks that support them and how well guessing would do.

Reads statements (what was told, and by what reference); knows nothing of tokens or of training.

Invariant: every answer follows from the supporting chunks, and `unknown` is the answer exactly where nothing told it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from training.discourse import Entity, How, Statement
from training.templates import BY_NAME, COMPARISON, ROLES, Relation, TemplateSplit

UNKNOWN = "unknown"
TYPES = ("local", "pron", "same", "alias", "desc", "hop2", "hop2ref", "comparison", "followup", "unanswerable")
_TYPE_OF = {How.PRON: "pron", How.THAT: "same", How.SAME: "same", How.ALIAS: "alias", How.DESC: "desc"}
_PRONOUNS = {
    "man": {"p": "he", "m": "him", "h": "his"},
    "woman": {"p": "she", "m": "her", "h": "her"},
    "": {"p": "it", "m": "it", "h": "its"},
}


@dataclass(frozen=True)
class Question:
    """A typed question on a world."""

    type: str
    question: str
    answer: str
    support: tuple[int, ...]  # chunk numbers, ascending
    guess: float  # chance of a right answer for one who picks a word of the right kind from the context
    history: tuple[tuple[str, str], ...] = ()  # earlier turns: question, answer
    asked: str = ""  # the entity the question names, where it is one
    told: tuple[int, ...] = ()  # numbers of the statements to look up, in the order of the hops
    bridge: str = ""  # the entity in the middle of two hops, or the one a follow-up is about


@dataclass(frozen=True)
class Asker:
    """Asks about one told world."""

    random: Random
    entities: dict[str, Entity]
    relations: tuple[Relation, ...]  # what this world is about
    statements: tuple[Statement, ...]
    strangers: tuple[Entity, ...]  # entities the world never mentions
    templates: TemplateSplit
    variety: int = 99
    _by_subject: dict[str, list[Statement]] = field(default_factory=lambda: defaultdict(list))
    _answers: dict[str, set[str]] = field(
        default_factory=lambda: defaultdict(set)
    )  # kind of object -> words in the context

    def __post_init__(self) -> None:
        for told in self.statements:
            self._by_subject[told.fact.subject].append(told)
            self._answers[BY_NAME[told.fact.relation].object].add(told.fact.object)
            subject = self.entities[told.fact.subject]
            self._answers[subject.kind].add(subject.name)

    def ask(self, count: int, weights: dict[str, float]) -> list[Question]:
        """Up to `count` different questions, types drawn by weight; a type the world lacks is passed over."""
        found: dict[str, list[Question]] = defaultdict(list)
        for question in self.all():
            found[question.type].append(question)
        for questions in found.values():
            self.random.shuffle(questions)
        asked: list[Question] = []
        while len(asked) < count and any(found.values()):
            kinds = [kind for kind, questions in found.items() if questions]
            kind = self.random.choices(kinds, [weights.get(kind, 1.0) + 1e-9 for kind in kinds])[0]
            asked.append(found[kind].pop())
        return asked

    def all(self) -> Iterator[Question]:
        """Every question the world offers, each in one phrasing."""
        for told in self.statements:
            yield self._single(told)
            yield from self._two_hops(told)
            yield from self._follow_ups(told)
        yield from self._comparisons()
        yield from self._unanswerable()

    def _words(self, relation: str, subject: str) -> str:
        return self.random.choice(BY_NAME[relation].asked(self.templates)[: self.variety]).format(s=subject)

    def _numbers(self, *told: Statement) -> tuple[int, ...]:
        return tuple(self.statements.index(one) for one in told)

    def _guess(self, relation: str) -> float:
        return 1 / max(1, len(self._answers[BY_NAME[relation].object]))

    def _single(self, told: Statement) -> Question:
        kind = _TYPE_OF[told.references[0].how] if told.references else "local"
        fact = told.fact
        words = self._words(fact.relation, fact.subject)
        guess = self._guess(fact.relation)
        return Question(
            kind, words, fact.object, _sorted(told.support), guess, asked=fact.subject, told=self._numbers(told)
        )

    def _two_hops(self, first: Statement) -> Iterator[Question]:
        role = ROLES.get(first.fact.relation)
        for second in self._by_subject.get(first.fact.object, []) if role else []:
            assert role is not None
            references = first.references + second.references
            if not references and first.chunk == second.chunk:
                continue
            words = self._words(second.fact.relation, role.format(s=first.fact.subject))
            kind = "hop2ref" if references else "hop2"
            yield Question(
                kind, words, second.fact.object, _sorted(first.support | second.support),
                self._guess(second.fact.relation), asked=first.fact.subject,
                told=self._numbers(first, second), bridge=first.fact.object,
            )  # fmt: skip

    def _follow_ups(self, first: Statement) -> Iterator[Question]:
        """The turn before asks for `first`; this one goes on about its subject or about its answer."""
        turn = (self._words(first.fact.relation, first.fact.subject), first.fact.object)
        for about in (first.fact.subject, first.fact.object):
            for second in self._by_subject.get(about, []):
                if second is first:
                    continue
                words = BY_NAME[second.fact.relation].follow_up.format(**_PRONOUNS[self.entities[about].gender])
                yield Question(
                    "followup", words, second.fact.object, _sorted(first.support | second.support),
                    self._guess(second.fact.relation), (turn,), told=self._numbers(second), bridge=about,
                )  # fmt: skip

    def _comparisons(self) -> Iterator[Question]:
        founded = [told for told in self.statements if told.fact.relation == "founded"]
        for first in founded:
            for second in founded:
                if first is second or first.fact.object == second.fact.object:
                    continue
                words = self.random.choice(COMPARISON[self.templates]).format(
                    a=first.fact.subject, b=second.fact.subject
                )
                older = min(first, second, key=lambda told: int(told.fact.object))
                support = _sorted(first.support | second.support)
                yield Question("comparison", words, older.fact.subject, support, 0.5, told=self._numbers(first, second))

    def _unanswerable(self) -> Iterator[Question]:
        told = {(s.fact.subject, s.fact.relation) for s in self.statements}
        subjects = [self.entities[name] for name in self._by_subject] + list(self.strangers)
        for entity in subjects:
            for relation in self.relations:
                if relation.subject == entity.kind and (entity.name, relation.name) not in told:
                    yield Question(
                        "unanswerable", self._words(relation.name, entity.name), UNKNOWN, (), 0.0, asked=entity.name
                    )
        for first in self.statements:
            role = ROLES.get(first.fact.relation)
            for relation in self.relations:
                fitting = relation.subject == BY_NAME[first.fact.relation].object
                if role and fitting and (first.fact.object, relation.name) not in told:
                    words = self._words(relation.name, role.format(s=first.fact.subject))
                    yield Question("unanswerable", words, UNKNOWN, (), 0.0, asked=first.fact.subject)


def _sorted(chunks: frozenset[int]) -> tuple[int, ...]:
    return tuple(sorted(chunks))
