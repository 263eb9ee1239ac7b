"""One value says how tokens are chosen: what samples, what is refused, and the penalties against
their definitions.
"""

import math
from typing import Any

import pytest
import torch

from ragkv.errors import InputError
from ragkv.model.decode.sampling import MOST_BIASES, Sampler, Sampling

PROMPT = torch.tensor([1, 4, 4])
LOGITS = torch.tensor([0.0, 0.1, 3.0, 2.0, 2.9])


def chosen(count: int = 1, eos: tuple[int, ...] = (), **settings: Any) -> list[int]:
    sampler = Sampler(Sampling(**{"seed": 0, **settings}), PROMPT, eos)
    return [sampler.choose(LOGITS) for _ in range(count)]


def penalised(
    logits: list[float],
    answer: list[int],
    presence: float,
    frequency: float,
    bias: dict[int, float],
) -> Any:
    """OpenAI's definition, token by token: mu[j] - c[j] * frequency - float(c[j] > 0) * presence,
    with bias added.
    """
    found = []
    for token, logit in enumerate(logits):
        count = sum(one == token for one in answer)
        found.append(logit + bias.get(token, 0.0) - count * frequency - float(count > 0) * presence)
    return found


def test_without_a_parameter_the_most_probable_token_is_taken() -> None:
    assert not Sampling().samples
    assert chosen(3) == [2, 2, 2]


@pytest.mark.parametrize(
    "asks", [dict(temperature=0.7), dict(top_p=0.9), dict(top_k=3), dict(min_p=0.1)], ids=str
)
def test_a_parameter_of_sampling_samples_when_it_is_given(asks: dict[str, Any]) -> None:
    assert Sampling(**asks).samples
    assert len(set(chosen(200, **asks))) > 1


@pytest.mark.parametrize(
    "neutral",
    [dict(temperature=0.0), dict(top_p=1.0), dict(top_k=0), dict(min_p=0), dict(seed=3)],
    ids=str,
)
def test_a_value_that_asks_for_nothing_leaves_decoding_greedy(neutral: dict[str, Any]) -> None:
    assert not Sampling(**neutral).samples


def test_what_has_no_effect_is_noted() -> None:
    assert Sampling(temperature=0.0, top_p=0.5, seed=3).notes == (
        "decoding is greedy because temperature is 0: top_p, seed has no effect",
    )
    assert Sampling(seed=3).notes == (
        "decoding is greedy because no temperature was given: seed has no effect",
    )
    assert Sampling(temperature=1.0, top_p=0.5, seed=3).notes == Sampling().notes == ()


def test_equal_seeds_give_equal_samples_and_other_seeds_give_others() -> None:
    samples = {seed: chosen(20, seed=seed, temperature=1.0) for seed in (0, 1)}
    assert chosen(20, seed=0, temperature=1.0) == samples[0]
    assert samples[0] != samples[1]
    assert chosen(40, seed=None, temperature=1.0) != chosen(40, seed=None, temperature=1.0)


def test_a_seed_does_not_change_the_global_generator_of_torch() -> None:
    before = torch.get_rng_state()
    chosen(5, seed=3, temperature=1.0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        (dict(top_k=1), {2}),
        (dict(top_k=2), {2, 4}),
        (dict(top_p=0.5), {2, 4}),
        (dict(min_p=0.8), {2, 4}),
        (dict(temperature=0.001), {2}),
        (dict(temperature=1e-300), {2}),
        (dict(temperature=2.0, top_k=4), {1, 2, 3, 4}),
    ],
    ids=str,
)
def test_sampling_settings_limit_the_sampled_tokens(
    settings: dict[str, Any], allowed: set[int]
) -> None:
    assert set(chosen(300, **settings)) == allowed


def test_sampled_shares_are_the_probabilities_of_the_scores() -> None:
    """Penalties and biases change the distribution as a plain softmax of the plain
    definition says.
    """
    sampler = Sampler(Sampling(seed=0, temperature=0.5, logit_bias={3: 1.5}), PROMPT, ())
    drawn = (
        torch.bincount(torch.tensor([sampler.choose(LOGITS) for _ in range(4000)]), minlength=5)
        / 4000
    )
    wanted = (torch.tensor(penalised(LOGITS.tolist(), [], 0, 0, {3: 1.5})) / 0.5).softmax(0)
    assert torch.allclose(drawn, wanted, atol=0.03)


@pytest.mark.parametrize("presence", [-2.0, 0.0, 0.7])
@pytest.mark.parametrize("frequency", [-0.5, 0.0, 1.9])
@pytest.mark.parametrize("bias", [{}, {0: 5.5, 4: -100.0}], ids=str)
def test_penalties_and_biases_are_openais(
    presence: float, frequency: float, bias: dict[int, float]
) -> None:
    settings = Sampling(presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias)
    generator = torch.Generator().manual_seed(5)
    logits = [torch.randn(5, generator=generator) * 2 for _ in range(40)]
    sampler = Sampler(settings, PROMPT, ())
    answer = list[int]()
    for row in logits:
        scores = penalised(row.tolist(), answer, presence, frequency, bias)
        before = row.clone()
        answer.append(sampler.choose(row))
        assert answer[-1] == max(range(5), key=scores.__getitem__)
        assert torch.equal(row, before)


def test_a_repetition_penalty_counts_the_prompt_and_the_answer() -> None:
    # 3.0 / 1.5 still beats 2.0 and the prompt's 4
    assert chosen(3, repetition_penalty=1.5) == [2, 2, 2]
    assert chosen(3, repetition_penalty=2.0) == [2, 3, 2]


def test_end_tokens_are_not_chosen_before_min_new_tokens() -> None:
    assert chosen(3, eos=(2,), min_new_tokens=2) == [4, 4, 2]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("top_k", 1.5),
        ("min_p", 2.0),
        ("seed", 2**63),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("min_new_tokens", -1),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {"3": 1.0}),
        ("logit_bias", [3]),
        ("logit_bias", dict.fromkeys(range(MOST_BIASES + 1), 1.0)),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=name):
        Sampling(**{name: value})
