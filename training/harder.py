"""Harder worlds: what the plain ones leave out, written as documents of one to three chunks.

Facts that changed over the years, lists and counts over several chunks, chains of three facts, tables as text, and two
people of one name in different documents. There are no labels for auxiliary losses: a world has no statements. A corpus
is many worlds whose documents are shuffled, for a retriever to search. This file knows nothing of tokens.

Invariants: a question's answer follows from its supporting chunks; no name means two things, except that of namesakes.
Command line: `python -m training.harder --seed 1` prints a world.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from training.names import Kind, NameGenerator, NameSplit
from training.questions import Question
from training.templates import BY_NAME, FILLERS, RELATIONS, WORDS
from training.worlds import World

HEAD_OFFICE = next(one.name for one in RELATIONS if (one.subject, one.object) == ("company", "city"))
TYPES = ("plain", "pronoun", "dated", "list", "count", "three hops", "table", "namesake")
NUMBERS = ("none", "one", "two", "three", "four", "five")
DATED = ("In {y}, {s} joined {o}.", "{s} joined {o} in {y}.", "In {y}, {s} took a job with {o}.")
NOW = ("For which company does {s} work now?", "Which company employs {s} today?", "Who employs {s} now?")
AT_FIRST = ("For which company did {s} work first?", "Which company employed {s} first?")
LISTED = ("Who works for {s}?", "Who are the staff of {s}?", "Which people does {s} employ?")
COUNTED = ("How many people work for {s}?", "How many people does {s} employ?")
COLUMNS = {  # of tables -> the words of its column, and a question
    "job": ("job", "What is the job of {s}?"),
    "hobby": ("instrument", "Which instrument does {s} play?"),
    "home": ("home", "In which city is the home of {s}?"),
    "office": ("office", "In which city is the office of {s}?"),
    "dish": ("favourite", "What is the favourite of {s}?"),
}


@dataclass
class _Asked:
    """A question about a document, before the document has its place: support counts its own chunks."""

    type: str
    question: str
    answer: str
    support: set[tuple[int, int]]  # document, chunk of the document
    guess: float


@dataclass
class _Writer:
    """Writes the documents of one world."""

    random: Random
    names: NameGenerator
    documents: list[list[list[str]]] = field(default_factory=list)  # sentences of chunks of documents
    asked: list[_Asked] = field(default_factory=list)

    def write(self) -> None:
        """All documents, in the order in which they were thought of."""
        companies = [self.names.draw(Kind.COMPANY) for _ in range(self.random.randint(4, 6))]
        cities = [self.names.draw(Kind.CITY) for _ in range(self.random.randint(3, 4))]
        for city in cities:
            self._city(city)
        staffed = self.random.randint(1, 2)
        for company in companies[:staffed]:
            self._staff(company, cities, self.random.randrange(len(cities)), companies)
        others: list[Callable[[], None]] = [
            lambda: self._career(companies[staffed:]),
            lambda: self._table(cities),
            lambda: self._namesakes(cities),
        ]
        for write in self.random.sample(others, self.random.randint(1, 2)):
            write()

    def _city(self, city: str) -> None:
        country, dish = self.names.draw(Kind.COUNTRY), self.random.choice(WORDS["dish"])
        number = self._document([[self._said("country", city, country), self._said("dish", city, dish)]])
        self._ask("plain", self._words("country", city), country, {(number, 0)}, 0.3)
        self._ask("plain", self._words("dish", city), dish, {(number, 0)}, 0.3)

    def _career(self, companies: list[str]) -> None:
        """One person's dated employers, without staff, in any order; "she" in the second chunk needs the first."""
        man = self.random.random() < 0.5
        name, pronoun = self.names.draw(Kind.MAN if man else Kind.WOMAN), "he" if man else "she"
        count = min(self.random.randint(2, 3), len(companies))
        years = self.random.sample(WORDS["year"], count)
        employers = self.random.sample(companies, count)
        job, hobby = self.random.choice(WORDS["job"]), self.random.choice(WORDS["hobby"])
        chunks = [[self._said("job", name, job), self._joined(years[0], name, employers[0])]]
        for year, employer in zip(years[1:], employers[1:], strict=True):
            chunks.append([self._joined(year, pronoun, employer)])
        chunks[1].append(f"{pronoun.capitalize()} plays the {hobby}.")
        number = self._document(chunks)
        place = {year: place for place, year in enumerate(years)}
        for phrases, year in ((NOW, max(years)), (AT_FIRST, min(years))):
            support = {(number, 0), (number, place[year])}
            answer = employers[place[year]]
            self._ask("dated", self.random.choice(phrases).format(s=name), answer, support, 1 / len(companies))
        self._ask("plain", self._words("job", name), job, {(number, 0)}, 0.5)
        self._ask("pronoun", self._words("hobby", name), hobby, {(number, 0), (number, 1)}, 0.5)

    def _staff(self, company: str, cities: list[str], city: int, companies: list[str]) -> None:
        """Who works for a company, over two or three chunks, some by "the same company", and others elsewhere."""
        count = self.random.randint(2, 4)
        people = [self.names.draw(self.random.choice((Kind.MAN, Kind.WOMAN))) for _ in range(count)]
        chunks = [[self._said(HEAD_OFFICE, company, cities[city])], *([] for _ in range(self.random.randint(1, 2)))]
        at = [0, *sorted(self.random.randrange(len(chunks)) for _ in people[1:])]
        for person, place in zip(people, at, strict=True):
            there = company if place == 0 or self.random.random() < 0.4 else "the same company"
            chunks[place].append(self._said("employer", person, there))
        elsewhere = self.names.draw(Kind.MAN)
        chunks[-1].append(self._said("employer", elsewhere, companies[-1]))
        number = self._document([chunk for chunk in chunks if chunk])
        kept = [place for place, chunk in enumerate(chunks) if chunk]
        all_chunks = {(number, kept.index(place)) for place in at}
        names = f"{', '.join(people[:-1])} and {people[-1]}"
        self._ask("list", self.random.choice(LISTED).format(s=company), names, all_chunks, 0.0)
        self._ask("count", self.random.choice(COUNTED).format(s=company), NUMBERS[count], all_chunks, 1 / 3)
        person, place = self.random.choice(list(zip(people, at, strict=True)))
        country = next(a.answer for a in self.asked if a.support == {(city, 0)})  # of the city, whose document is first
        words = self._words("country", f"the city of the employer of {person}")
        self._ask("three hops", words, country, {(number, 0), (number, kept.index(place)), (city, 0)}, 0.3)

    def _table(self, cities: list[str]) -> None:
        """Rows in two chunks, of which the first has the column names; homes and offices are both cities."""
        columns = self.random.sample(list(COLUMNS), 3)
        if "home" in columns and "office" not in columns:
            columns[(columns.index("home") + 1) % 3] = "office"
        values = {column: WORDS.get(column, cities) for column in columns}
        people = [self.names.draw(self.random.choice((Kind.MAN, Kind.WOMAN))) for _ in range(self.random.randint(4, 6))]
        rows = [[self.random.choice(values[column]) for column in columns] for _ in people]
        lines = [" | ".join((person, *row)) + "." for person, row in zip(people, rows, strict=True)]
        head = " | ".join(("Name", *(COLUMNS[column][0] for column in columns))) + "."
        half = len(lines) // 2
        number = self._document([[head, *lines[:half]], lines[half:]], fillers=False)
        for place, (person, row) in enumerate(zip(people, rows, strict=True)):
            support = {(number, 0), (number, int(place >= half))}
            for column, value in zip(columns, row, strict=True):
                if self.random.random() < 0.5:
                    words = COLUMNS[column][1].format(s=person)
                    self._ask("table", words, value, support, 1 / min(len(people), len(values[column])))

    def _namesakes(self, cities: list[str]) -> None:
        """Two people of one name, told apart by the city that the first chunk of their document is about."""
        name = self.names.draw(self.random.choice((Kind.MAN, Kind.WOMAN)))
        jobs, hobbies = self.random.sample(WORDS["job"], 2), self.random.sample(WORDS["hobby"], 2)
        for city, job, hobby in zip(self.random.sample(cities, 2), jobs, hobbies, strict=True):
            first = [f"These notes are about the people of {city}.", self._said("job", name, job)]
            number = self._document([first, [self._said("hobby", name, hobby)]])
            whom = f"{name} of {city}"
            self._ask("namesake", self._words("job", whom), job, {(number, 0)}, 0.5)
            self._ask("namesake", self._words("hobby", whom), hobby, {(number, 0), (number, 1)}, 0.5)

    def _said(self, relation: str, subject: str, object_: str) -> str:
        text = self.random.choice(BY_NAME[relation].train).format(s=subject, o=object_)
        return text[0].upper() + text[1:]

    def _joined(self, year: str, subject: str, employer: str) -> str:
        text = self.random.choice(DATED).format(y=year, s=subject, o=employer)
        return text[0].upper() + text[1:]

    def _words(self, relation: str, subject: str) -> str:
        return self.random.choice(BY_NAME[relation].questions).format(s=subject)

    def _document(self, chunks: list[list[str]], fillers: bool = True) -> int:
        for chunk in chunks if fillers else ():
            if self.random.random() < 0.4:
                chunk.append(self.random.choice(FILLERS))
        self.documents.append(chunks)
        return len(self.documents) - 1

    def _ask(self, kind: str, question: str, answer: str, support: set[tuple[int, int]], guess: float) -> None:
        self.asked.append(_Asked(kind, question, answer, support, guess))


@dataclass(frozen=True)
class Corpus:
    """The documents of several worlds, and the questions about them; support counts chunks over all documents."""

    documents: tuple[tuple[str, ...], ...]
    questions: tuple[Question, ...]

    @property
    def chunks(self) -> tuple[str, ...]:
        """All chunks, document after document."""
        return tuple(chunk for document in self.documents for chunk in document)


def corpus(seed: int, worlds: int, names: NameSplit) -> Corpus:
    """The shuffled documents of `worlds` harder worlds, which share no name."""
    random = Random(seed)
    generator = NameGenerator(random, names)
    writers = [_Writer(random, generator) for _ in range(worlds)]
    for writer in writers:
        writer.write()
    order = [(which, number) for which, writer in enumerate(writers) for number in range(len(writer.documents))]
    random.shuffle(order)
    first, count = dict[tuple[int, int], int](), 0  # of each document, the number of its first chunk
    for place in order:
        first[place] = count
        count += len(writers[place[0]].documents[place[1]])
    questions = [
        Question(asked.type, asked.question, asked.answer, support, asked.guess)
        for which, writer in enumerate(writers)
        for asked in writer.asked
        for support in [tuple(sorted(first[which, number] + chunk for number, chunk in asked.support))]
    ]
    documents = [writers[which].documents[number] for which, number in order]
    return Corpus(tuple(tuple(" ".join(chunk) for chunk in document) for document in documents), tuple(questions))


def harder_world(seed: int, names: NameSplit = "train", questions: int = 24) -> World:
    """One world as a context for training: all its chunks, and some of its questions."""
    made, random = corpus(seed, 1, names), Random(seed + 1)
    asked = random.sample(made.questions, min(questions, len(made.questions)))
    return World(seed, made.chunks, tuple(asked), ())


def main() -> None:
    """Print a world."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=1)
    made = corpus(parser.parse_args().seed, 1, "heldout")
    for document in made.documents:
        print(*document, sep="\n    ")
    for question in made.questions:
        print(f"{question.type:12} {question.question} {question.answer} {question.support}")


if __name__ == "__main__":
    main()
