"""Decoding: greedy by default, seeded sampling, transformers' own logits processors."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ragkv.errors import InputError
from ragkv.model.decoding import SETTINGS, Sampler, end_tokens, generation_config

PROMPT = torch.tensor([1, 4, 4])
LOGITS = torch.tensor([0.0, 0.1, 3.0, 2.0, 2.9])


def chosen(count: int = 1, seed: int | None = 0, eos: tuple[int, ...] = (), **settings: Any) -> list[int]:
    sampler = Sampler(generation_config(settings), PROMPT, eos, seed)
    return [sampler.choose(LOGITS) for _ in range(count)]


def test_greedy_decoding_takes_the_largest_logit() -> None:
    assert chosen(3) == [2, 2, 2]


def test_equal_seeds_give_equal_samples_and_other_seeds_give_others() -> None:
    samples = {seed: chosen(20, seed, do_sample=True) for seed in (0, 1)}
    assert chosen(20, 0, do_sample=True) == samples[0]
    assert samples[0] != samples[1]
    assert chosen(40, None, do_sample=True) != chosen(40, None, do_sample=True)


def test_a_seed_does_not_change_the_global_generator_of_torch() -> None:
    before = torch.get_rng_state()
    chosen(5, 3, do_sample=True)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        (dict(top_k=1), {2}),
        (dict(top_k=2), {2, 4}),
        (dict(top_p=0.5), {2, 4}),
        (dict(min_p=0.8), {2, 4}),
        (dict(temperature=0.001), {2}),
        (dict(temperature=100.0, top_k=4), {1, 2, 3, 4}),
    ],
    ids=str,
)
def test_sampling_settings_limit_the_sampled_tokens(settings: dict[str, Any], allowed: set[int]) -> None:
    assert set(chosen(200, do_sample=True, **settings)) == allowed


def test_a_repetition_penalty_counts_the_prompt_and_the_answer() -> None:
    assert chosen(3, repetition_penalty=1.5) == [2, 2, 2]  # 3.0 / 1.5 still beats 2.0 and the prompt's 4
    assert chosen(3, repetition_penalty=2.0) == [2, 3, 2]


def test_no_repeat_ngram_size_prevents_repeated_ngrams() -> None:
    assert chosen(3, no_repeat_ngram_size=1) == [2, 3, 0]


def test_end_tokens_are_not_chosen_before_min_new_tokens() -> None:
    assert chosen(3, eos=(2,), min_new_tokens=2) == [4, 4, 2]


@pytest.mark.parametrize(
    "wrong",
    [
        dict(temperature=0.0, do_sample=True),
        dict(temperature=-1.0, do_sample=True),
        dict(top_k=-3, do_sample=True),
        dict(top_p=1.5, do_sample=True),
        dict(min_p=2.0, do_sample=True),
        dict(repetition_penalty=-1.0),
        dict(no_repeat_ngram_size=-1),
        dict(temperature="hot", do_sample=True),
    ],
    ids=str,
)
def test_generation_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="not valid"):
        generation_config(wrong)


@pytest.mark.parametrize("name", ["num_beams", "max_length", "temprature", "to_dict", "eos_token_id", "stop_strings"])
def test_generation_settings_without_effect_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"Unknown generation settings: {name}.*temperature"):
        generation_config({name: 2})


def test_every_supported_setting_exists_in_transformers() -> None:
    config = generation_config({})
    assert all(hasattr(config, name) for name in SETTINGS)


@pytest.mark.parametrize(
    ("of_generation", "of_model", "of_tokenizer", "wanted"),
    [([7, 8], 2, 3, (7, 8)), (7, 2, 3, (7,)), (None, 2, 3, (2,)), (None, None, 3, (3,)), (None, None, None, ())],
)
def test_end_tokens_come_from_the_first_source_that_names_them(
    of_generation: Any, of_model: Any, of_tokenizer: Any, wanted: tuple[int, ...]
) -> None:
    model = SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=of_generation), config=SimpleNamespace(eos_token_id=of_model)
    )
    assert end_tokens(model, SimpleNamespace(eos_token_id=of_tokenizer)) == wanted
