"""The floor of recomputed tokens: prompts of short chunks, where a share is a token or two."""

from typing import Any

import pytest

from ragkv import Engine, EngineConfig, FusionConfig
from ragkv.fusion import budget, with_floor
from ragkv.types import Reuse
from tests.reader import READER

from . import helpers
from .helpers import N

SELECTORS = ("hkvd", "hkvd-gradual", "first-k", "random", "attention")


@pytest.mark.parametrize(
    ("ratio", "count", "floor", "recomputed"),
    [
        (0.15, 20, 0, 3),  # no floor
        (0.15, 20, 8, 8),  # below the floor: raised to it
        (0.15, 20, 32, 20),  # fewer candidates than the floor: all
        (0.15, 1000, 32, 150),  # above the floor: the ratio's share
        (0.5, 20, 8, 10),
        (0.0, 20, 8, 0),  # 0 stays 0
        (0.15, 0, 8, 0),
        (1.0, 20, 8, 20),
    ],
)
def test_at_least_the_floor_is_recomputed_and_0_stays_0(
    ratio: float, count: int, floor: int, recomputed: int
) -> None:
    raised = with_floor(ratio, count, floor)
    assert budget(raised, count) == recomputed
    assert raised >= ratio
    if recomputed == budget(ratio, count):
        assert raised == ratio


@pytest.mark.parametrize("count", range(1, 70))
def test_the_floor_is_kept_to_the_token_whatever_the_number_of_candidates(count: int) -> None:
    for floor in (1, 7, 32):
        assert budget(with_floor(1e-6, count, floor), count) == min(floor, count)


def reuse_of(how: dict[str, Any], **fusion: Any) -> Reuse:
    with helpers.engine(**fusion) as engine:
        return engine.prefill(helpers.QUESTION, helpers.CHUNKS, **how).reuse


@pytest.mark.parametrize("selector", SELECTORS)
def test_a_request_without_a_ratio_recomputes_the_floor_and_says_so(selector: str) -> None:
    reuse = reuse_of({"selector": selector}, floor_tokens=9, ratio=0.05)
    assert reuse.recomputed == 9 or (selector == "hkvd-gradual" and 0 < reuse.recomputed < 9)
    assert reuse.ratio == 9 / N
    assert [note for note in reuse.notes if "floor" in note] == [
        f"floor: 9 of {N} fused tokens were recomputed; ratio 0.05 would be {budget(0.05, N)} "
        "(fusion.floor_tokens)"
    ]


@pytest.mark.parametrize(
    ("how", "fusion", "recomputed"),
    [
        ({"ratio": 0.05}, {"floor_tokens": 9}, budget(0.05, N)),  # a named ratio is taken as it is
        ({}, {"floor_tokens": 9, "ratio": 0.0}, 0),
        ({}, {"floor_tokens": 0, "ratio": 0.05}, budget(0.05, N)),
        ({}, {"floor_tokens": 9, "ratio": 1.0}, N),
        ({"reuse": "prefix"}, {"floor_tokens": 9}, 0),
        ({"ratio": None}, {"floor_tokens": 30}, 30),  # the controller's, without a profile r*
    ],
)
def test_the_floor_is_for_ratios_that_no_request_names(
    how: dict[str, Any], fusion: dict[str, Any], recomputed: int
) -> None:
    reuse = reuse_of(how, **fusion)
    assert reuse.recomputed == recomputed
    assert any("floor" in note for note in reuse.notes) == (recomputed == 30)


def test_a_prompt_shorter_than_the_floor_equals_a_full_prefill() -> None:
    with helpers.cold_engine(floor_tokens=32) as engine:
        chunks = [chunk[:10] for chunk in helpers.CHUNKS[:3]]
        engine.entries.encode(chunks)
        fused = engine.prefill(helpers.QUESTION, chunks)
        full = engine.prefill(helpers.QUESTION, chunks, reuse="none")
        assert (fused.reuse.fused, fused.reuse.recomputed) == (0, 20)
        assert float((fused.logits - full.logits).abs().max()) < 1e-4


def test_a_pronoun_in_a_short_chunk_finds_its_name_in_another() -> None:
    texts = ["Nesibissa founded the mill of Marl.", "She lives in Irvburg."]
    config = EngineConfig(fusion=FusionConfig())
    with Engine.from_pretrained(READER, config) as engine:
        chunks = [engine.chunk(text) for text in texts]
        engine.entries.encode(chunks)
        answers = {
            name: engine.answer(
                "Where does Nesibissa live?", chunks, max_new_tokens=8, **how
            ).text.strip()
            for name, how in {"full": {"reuse": "none"}, "default": {}}.items()
        }
    assert answers == {"full": "Irvburg", "default": "Irvburg"}
