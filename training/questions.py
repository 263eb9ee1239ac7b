"""Questions about a world, their answers, the chunks that support them, and the accuracy of
guessing.

This file reads statements (facts and the references they use). It knows nothing of tokens or of
training.

Invariant: every answer follows from the supporting chunks; the answer is `unknown` exactly if no
statement gives it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from training.discourse import Entity, MentionType, Narration, Statement
from training.templates import BY_NAME, COMPARISON, ROLES, Relation

UNKNOWN = "unknown"
TYPES = (
    "local",
    "pron",
    "same",
    "alias",
    "desc",
    "hop2",
    "hop2ref",
    "comparison",
    "followup",
    "unanswerable",
)
_TYPE_OF = {
    MentionType.PRONOUN: "pron",
    MentionType.THAT: "same",
    MentionType.SAME: "same",
    MentionType.ALIAS: "alias",
    MentionType.DESCRIPTION: "desc",
}
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
    # chance of a right answer when guessing among the words of the right kind in the context
    guess: float
    history: tuple[tuple[str, str], ...] = ()  # earlier turns: question, answer
    subject: str = ""  # the entity that the question names, if it is one
    # numbers of the statements to look up, in the order of the hops
    statements: tuple[int, ...] = ()
    bridge: str = ""  # the entity in the middle of two hops, or the one that a follow-up is about


@dataclass(frozen=True)
class QuestionGenerator:
    """Generates questions about one world."""

    random: Random
    entities: dict[str, Entity]
    relations: tuple[Relation, ...]  # what this world is about
    statements: tuple[Statement, ...]
    unmentioned: tuple[Entity, ...]  # entities that the world never mentions
    narration: Narration  # its templates and their variety
    _by_subject: dict[str, list[Statement]] = field(default_factory=lambda: defaultdict(list))
    # kind of object -> words in the context
    _answers: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def __post_init__(self) -> None:
        for statement in self.statements:
            self._by_subject[statement.fact.subject].append(statement)
            self._answers[BY_NAME[statement.fact.relation].object].add(statement.fact.object)
            subject = self.entities[statement.fact.subject]
            self._answers[subject.kind].add(subject.name)

    def ask(self, count: int, weights: dict[str, float]) -> list[Question]:
        """Up to `count` different questions, types drawn by weight; a type that the world lacks is
        skipped.
        """
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
        """Every question that the world allows, each in one phrasing."""
        for statement in self.statements:
            yield self._single(statement)
            yield from self._two_hops(statement)
            yield from self._follow_ups(statement)
        yield from self._comparisons()
        yield from self._unanswerable()

    def _words(self, relation: str, subject: str) -> str:
        return self.random.choice(
            BY_NAME[relation].asked(self.narration.templates)[: self.narration.variety]
        ).format(s=subject)

    def _numbers(self, *statements: Statement) -> tuple[int, ...]:
        return tuple(self.statements.index(one) for one in statements)

    def _guess(self, relation: str) -> float:
        return 1 / max(1, len(self._answers[BY_NAME[relation].object]))

    def _single(self, statement: Statement) -> Question:
        kind = _TYPE_OF[statement.references[0].type] if statement.references else "local"
        fact = statement.fact
        words = self._words(fact.relation, fact.subject)
        guess = self._guess(fact.relation)
        return Question(
            kind, words, fact.object, _sorted(statement.support), guess,
            subject=fact.subject, statements=self._numbers(statement),
        )  # fmt: skip

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
                self._guess(second.fact.relation), subject=first.fact.subject,
                statements=self._numbers(first, second), bridge=first.fact.object,
            )  # fmt: skip

    def _follow_ups(self, first: Statement) -> Iterator[Question]:
        """Questions whose previous turn asks for `first`, about its subject or its answer by a
        pronoun.
        """
        turn = (self._words(first.fact.relation, first.fact.subject), first.fact.object)
        for about in (first.fact.subject, first.fact.object):
            for second in self._by_subject.get(about, []):
                if second is first:
                    continue
                words = BY_NAME[second.fact.relation].follow_up.format(
                    **_PRONOUNS[self.entities[about].gender]
                )
                yield Question(
                    "followup", words, second.fact.object, _sorted(first.support | second.support),
                    self._guess(second.fact.relation), (turn,), statements=self._numbers(second), bridge=about,
                )  # fmt: skip

    def _comparisons(self) -> Iterator[Question]:
        founded = [
            statement for statement in self.statements if statement.fact.relation == "founded"
        ]
        for first in founded:
            for second in founded:
                if first is second or first.fact.object == second.fact.object:
                    continue
                words = self.random.choice(COMPARISON[self.narration.templates]).format(
                    a=first.fact.subject, b=second.fact.subject
                )
                older = min(first, second, key=lambda statement: int(statement.fact.object))
                support = _sorted(first.support | second.support)
                numbers = self._numbers(first, second)
                yield Question(
                    "comparison", words, older.fact.subject, support, 0.5, statements=numbers
                )

    def _unanswerable(self) -> Iterator[Question]:
        stated = {(s.fact.subject, s.fact.relation) for s in self.statements}
        subjects = [self.entities[name] for name in self._by_subject] + list(self.unmentioned)
        for entity in subjects:
            for relation in self.relations:
                if relation.subject == entity.kind and (entity.name, relation.name) not in stated:
                    yield Question(
                        "unanswerable",
                        self._words(relation.name, entity.name),
                        UNKNOWN,
                        (),
                        0.0,
                        subject=entity.name,
                    )
        for first in self.statements:
            role = ROLES.get(first.fact.relation)
            for relation in self.relations:
                fitting = relation.subject == BY_NAME[first.fact.relation].object
                if role and fitting and (first.fact.object, relation.name) not in stated:
                    words = self._words(relation.name, role.format(s=first.fact.subject))
                    yield Question(
                        "unanswerable", words, UNKNOWN, (), 0.0, subject=first.fact.subject
                    )


def _sorted(chunks: frozenset[int]) -> tuple[int, ...]:
    return tuple(sorted(chunks))
