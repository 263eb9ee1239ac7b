"""The rules that harder worlds and their questions keep, and how they become rows and a benchmark's prompts."""

import re
from functools import cache

import pytest

from benchmarks import harder as benchmark
from benchmarks.quality_run import Outcome
from training.batches import HARDER, Encoder, Stream
from training.harder import AT_FIRST, COLUMNS, NUMBERS, TYPES, Corpus, corpus, harder_world
from training.names import is_held_out
from training.questions import Question
from training.tokenizer import build
from training.worlds import level, world


@cache
def corpora() -> tuple[Corpus, ...]:
    return tuple(corpus(seed, 3, "train") for seed in range(12))


def of_type(kind: str) -> list[tuple[Question, str]]:
    """Questions of a type, each with the text of the chunks that support it."""
    return [
        (question, " ".join(made.chunks[number] for number in question.support))
        for made in corpora()
        for question in made.questions
        if question.type == kind
    ]


def test_the_same_seed_makes_the_same_corpus() -> None:
    assert corpus(4, 2, "train") == corpus(4, 2, "train") != corpus(5, 2, "train")


@pytest.mark.parametrize("kind", TYPES)
def test_there_are_questions_of_every_type(kind: str) -> None:
    assert len(of_type(kind)) >= 10


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind not in ("list", "count")])
def test_the_supporting_chunks_say_the_answer(kind: str) -> None:
    for question, text in of_type(kind):
        assert re.search(rf"\b{question.answer}\b", text), question


def test_the_year_decides_which_employer_is_the_last_and_which_the_first() -> None:
    for made in corpora():
        for question in made.questions:
            if question.type != "dated":
                continue
            name = next(word for word in re.findall(r"[A-Z]\w+", question.question)[1:])
            document = next(d for d in made.documents if name in d[0] and re.search(r"\d{4}", d[0]))
            years = {
                employer: year
                for sentence in re.findall(r"[^.]*\d{4}[^.]*\.", " ".join(document))
                for year in re.findall(r"\d{4}", sentence)
                for employer in re.findall(r"(?:joined|job with) (\w+)", sentence)
            }
            wanted = min if question.question in [form.format(s=name) for form in AT_FIRST] else max
            assert question.answer == wanted(years, key=lambda employer: years[employer])


def test_lists_and_counts_include_every_employee() -> None:
    listed = {re.findall(r"[A-Z]\w+", question.question)[-1]: question for question, _ in of_type("list")}
    counted = {re.findall(r"[A-Z]\w+", question.question)[-1]: question for question, _ in of_type("count")}
    assert listed.keys() == counted.keys()
    for company, question in listed.items():
        people = re.split(", | and ", question.answer)
        assert len(set(people)) == NUMBERS.index(counted[company].answer)
        assert question.support == counted[company].support


def test_nobody_joins_a_company_whose_staff_is_asked_for() -> None:
    for made in corpora():
        text = " ".join(made.chunks)
        for question in made.questions:
            if question.type == "list":
                company = re.findall(r"[A-Z]\w+", question.question)[-1]
                assert not re.search(
                    rf"\d{{4}}, \w+ (joined|took a job with) {company}|joined {company} in \d{{4}}", text
                )


def test_a_list_is_in_the_order_of_the_text() -> None:
    for question, text in of_type("list"):
        places = [text.index(person) for person in re.split(", | and ", question.answer)]
        assert places == sorted(places)


def test_a_value_of_a_table_stands_in_the_column_that_its_heading_names() -> None:
    heads = dict(COLUMNS.values())
    for question, text in of_type("table"):
        head, *rows = [line.split(" | ") for line in text.split(". ")]
        row = next(row for row in rows if row[0] in question.question)
        column = next(n for n, word in enumerate(head) if heads.get(word, "").format(s=row[0]) == question.question)
        assert row[column].rstrip(".") == question.answer


def test_namesakes_are_told_apart_by_the_city_of_their_document() -> None:
    for question, text in of_type("namesake"):
        name, city = re.findall(r"([A-Z]\w+) of ([A-Z]\w+)", question.question)[-1]
        assert text.startswith(f"These notes are about the people of {city}.") and name in text


def test_held_out_names_are_used_where_they_are_asked_for() -> None:
    names = re.findall(r"(?:employer of|people of) ([A-Z]\w+)", " ".join(corpus(1, 6, "heldout").chunks))
    assert names and all(is_held_out(name) for name in names)


def test_a_stream_contains_harder_and_plain_worlds() -> None:
    batch = next(iter(Stream(1, {HARDER: 1.0}, 2000)))
    assert not len(batch.labels) and (batch.targets >= 0).any()
    mixed = iter(Stream(1, {HARDER: 0.5, 2: 0.5}, 2000))
    assert any(len(next(mixed).labels) for _ in range(4))


def test_a_training_row_contains_every_question_of_a_harder_world() -> None:
    made = harder_world(3)
    row = Encoder(build()).row(made, None, None, extras=False)  # type: ignore[arg-type]  # draws nothing
    assert max(row.branch) == len(made.questions)


def test_the_longest_level_has_some_2000_tokens() -> None:
    encoder = Encoder(build())
    for seed in range(5):
        chunks = world(seed, level(5)).chunks
        assert 15 <= len(chunks) <= 17
        assert 1700 <= sum(len(encoder.ids(chunk)) for chunk in chunks) <= 2600


class TestBenchmark:
    def test_a_miss_of_the_retriever_is_mended_and_told_apart(self) -> None:
        made = corpora()[0]
        asked = benchmark.retrieved(made, k=4)
        assert len(asked) == len(made.questions)
        assert {one.found for one in asked} == {True, False}
        for one, question in zip(asked, made.questions, strict=True):
            support = {made.chunks[number] for number in question.support}
            assert support <= set(one.mended.chunks)
            assert one.found == (support <= set(one.retrieved.chunks))
            assert len(one.mended.chunks) <= 4
            places = [made.chunks.index(chunk) for chunk in one.mended.chunks]
            assert places == sorted(places)

    def test_end_to_end_counts_a_miss_with_the_answer_to_what_was_retrieved(self) -> None:
        asked = benchmark.retrieved(corpora()[0], k=4)
        missed = [number for number, one in enumerate(asked) if not one.found]
        even = [outcome(2 * number, 1.0) for number in range(len(asked))]
        odd = [outcome(2 * number + 1, 0.0) for number in missed]
        names = ("no context", "full prefill", "full reuse")
        results = benchmark.summarized(asked, {name: [*even, *odd] for name in names})
        assert results["questions"] == len(asked)
        assert results["methods"]["full prefill"]["exact"] == 1
        assert results["methods"]["full prefill"]["end_to_end"] == pytest.approx(1 - len(missed) / len(asked))
        assert results["found"] == pytest.approx(1 - len(missed) / len(asked))


def outcome(context: int, exact: float) -> Outcome:
    return Outcome(context, "plain", "", exact, exact, exact, 0.0, 0.0, 0.0, 0.0, 0.0)
