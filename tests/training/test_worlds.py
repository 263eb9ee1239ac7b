"""The rules that worlds, their questions and their tokens keep."""

import re
from dataclasses import replace
from functools import cache
from random import Random

from training.batches import Encoder
from training.names import Kind, NameGenerator, is_held_out
from training.questions import TYPES, UNKNOWN
from training.tokenizer import ASSISTANT, BOS, USER, build
from training.worlds import QUESTION_WEIGHTS, World, level, record, world

SEEDS = range(60)


@cache
def worlds(number: int = 3) -> tuple[World, ...]:
    return tuple(world(seed, replace(level(number), questions=40)) for seed in SEEDS)


def test_the_same_seed_makes_the_same_world() -> None:
    assert world(11, level(3)) == world(11, level(3))
    assert record(world(11, level(3))) != record(world(12, level(3)))


def test_answers_follow_from_the_statements() -> None:
    seen = set()
    for made in worlds():
        facts = {(one.fact.subject, one.fact.relation): one.fact.object for one in made.statements}
        for question in made.questions:
            seen.add(question.type)
            assert list(question.support) == sorted(set(question.support))
            if question.answer == UNKNOWN:
                assert question.type == "unanswerable" and not question.support
            elif question.type == "comparison":
                first, second = [
                    (name, facts[name, "founded"])
                    for name, relation in facts
                    if relation == "founded" and named(name, question.question)
                ]
                assert question.answer == min(first, second, key=lambda pair: int(pair[1]))[0]
            else:
                assert question.answer in facts.values()
    assert seen == set(TYPES) == set(QUESTION_WEIGHTS)


def named(name: str, text: str) -> bool:
    return name in re.findall(r"\w+", text)


def test_held_out_names_are_never_drawn_in_training() -> None:
    training = {
        NameGenerator(Random(seed), "train").draw(kind) for seed in range(200) for kind in Kind
    }
    held_out = {
        NameGenerator(Random(seed), "heldout").draw(kind) for seed in range(200) for kind in Kind
    }
    assert not training & held_out
    assert all(map(is_held_out, held_out)) and not any(map(is_held_out, training))


def test_a_chunk_has_the_same_ids_alone_and_in_a_prompt() -> None:
    tokenizer = build()
    encoder = Encoder(build())
    for made in worlds()[:10]:
        question = made.questions[0].question
        runs = [encoder.ids(chunk) for chunk in made.chunks] + [encoder.ids(question)]
        content = " ".join((*made.chunks, question))
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        assert tokenizer(prompt, add_special_tokens=False)["input_ids"] == [
            BOS,
            USER,
            *sum(runs, []),
            ASSISTANT,
        ]
