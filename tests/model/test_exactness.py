"""Exactness on every family, RoPE variant and selector, in float32, against the models
themselves.
"""

import functools
from typing import Any

import pytest
import torch

from ragkv import Engine, EngineConfig
from ragkv.model import attention
from ragkv.registry import SELECTORS
from tests import reference, tiny_models

CHUNKS = [tiny_models.tokens(count, seed) for seed, count in enumerate((30, 26, 34))]
QUESTION = tiny_models.tokens(7, seed=9)
PREFIX = [1]
IDS = PREFIX + sum(CHUNKS, []) + QUESTION


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def same_cache(got: Any, wanted: Any) -> None:
    assert len(got.layers) == len(wanted.layers)
    for ours, theirs in zip(got.layers, wanted.layers, strict=True):
        close(ours.keys, theirs.keys)
        close(ours.values, theirs.values)


@pytest.fixture(scope="module", params=tiny_models.FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def fresh(family: str) -> Any:
    return functools.partial(tiny_models.model, family)


@pytest.fixture(scope="module")
def engine(fresh: Any) -> Any:
    with Engine(fresh(), config=EngineConfig()) as engine:
        engine.entries.encode(CHUNKS)
        yield engine


@pytest.fixture(scope="module")
def stored(fresh: Any) -> Any:
    """The position-aligned concatenation of all KV before the question, plus the question's own
    rows.
    """
    return functools.partial(reference.concatenation, fresh, PREFIX, CHUNKS, QUESTION)


class TestExactness:
    def test_every_selector_at_ratio_one_equals_a_full_prefill(
        self, engine: Engine, fresh: Any
    ) -> None:
        logits, cache = reference.full_prefill(fresh(), IDS)
        for selector in sorted(SELECTORS):
            prefill = engine.prefill(QUESTION, CHUNKS, ratio=1.0, selector=selector)
            assert prefill.token_ids.tolist() == IDS
            close(prefill.logits, logits)
            same_cache(prefill.cache, cache)

    def test_every_selector_at_ratio_zero_equals_position_aligned_concatenation(
        self, engine: Engine, stored: Any
    ) -> None:
        logits, cache = stored()
        for selector in sorted(SELECTORS):
            prefill = engine.prefill(QUESTION, CHUNKS, ratio=0.0, selector=selector)
            assert prefill.reuse.fused > 0
            close(prefill.logits, logits)
            same_cache(prefill.cache, cache)

    def test_reusing_only_the_prefix_or_nothing_equals_a_full_prefill(
        self, engine: Engine, fresh: Any
    ) -> None:
        logits, cache = reference.full_prefill(fresh(), IDS)
        for reuse in ("prefix", "none"):
            prefill = engine.prefill(QUESTION, CHUNKS, reuse=reuse)
            close(prefill.logits, logits)
            same_cache(prefill.cache, cache)

    def test_one_chunk_right_behind_the_prefix_is_exact(self, engine: Engine, fresh: Any) -> None:
        ids = PREFIX + CHUNKS[0] + QUESTION
        logits, cache = reference.full_prefill(fresh(), ids)
        prefill = engine.prefill(QUESTION, CHUNKS[:1], ratio=0.0)
        assert prefill.reuse.exact == len(PREFIX) + len(CHUNKS[0])
        close(prefill.logits, logits)
        same_cache(prefill.cache, cache)

    def test_a_raw_key_rotated_to_its_position_equals_the_models_own(
        self, engine: Engine, fresh: Any
    ) -> None:
        ids = PREFIX + CHUNKS[0]
        _, cache = reference.full_prefill(fresh(), ids)
        adapter = engine.model.adapter
        tables = engine.model.adapter.rope.tables(len(ids))
        lease = engine.parts.store.lease(engine.entries.encoder.identity, tuple(CHUNKS[0]))
        assert lease is not None
        with lease:
            for layer in range(adapter.layer_count):
                k_raw = lease.read_layer(layer)[0].unsqueeze(0)
                cos, sin = tables.span(adapter.rope_kind(layer), len(PREFIX), len(ids))
                close(
                    adapter.rotate(layer, k_raw, cos, sin),
                    cache.layers[layer].keys[:, :, len(PREFIX) :],
                )

    def test_recomputed_rows_see_only_earlier_positions_within_their_window(
        self, engine: Engine, fresh: Any, stored: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prefill = engine.prefill(QUESTION, CHUNKS, ratio=0.3, selector="random")
        rows = computed_rows(prefill)
        logits, cache = reference.selective(fresh, IDS, stored()[1], rows)
        close(prefill.logits, logits)
        same_cache(prefill.cache, cache)

        monkeypatch.setattr(attention, "allowed_keys", bottom_right_triangle)
        wrong = engine.prefill(QUESTION, CHUNKS, ratio=0.3, selector="random")
        assert (wrong.logits - logits).abs().max() > 1e-2, (
            "this test does not detect a bottom-right triangle"
        )

    def test_decoded_tokens_equal_the_models_own(self, engine: Engine, fresh: Any) -> None:
        answer = engine.answer(QUESTION, CHUNKS, ratio=1.0, max_new_tokens=8, min_new_tokens=8)
        model = fresh()
        logits, cache = reference.full_prefill(model, IDS)
        for token in answer.token_ids:
            logits[model.config.eos_token_id] = -torch.inf  # min_new_tokens keeps it out
            assert logits[token] > logits.max() - 1e-3
            with torch.no_grad():
                logits = model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1]


class TestSensitivityOfTheseTests:
    """Removing one mechanism must change the logits, else the tests above could not detect its
    absence.
    """

    def test_removing_rope_changes_the_logits(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        right = engine.prefill(QUESTION, CHUNKS, reuse="none").logits
        monkeypatch.setattr(engine.model.adapter, "rotate", lambda _layer, raw, _cos, _sin: raw)
        assert (engine.prefill(QUESTION, CHUNKS, reuse="none").logits - right).abs().max() > 1e-2

    def test_removing_the_causal_mask_changes_the_logits(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        right = engine.prefill(QUESTION, CHUNKS, reuse="none").logits
        monkeypatch.setattr(attention, "allowed_keys", lambda *_: None)
        monkeypatch.setattr(attention, "is_whole_prompt", lambda *_: False)
        assert (engine.prefill(QUESTION, CHUNKS, reuse="none").logits - right).abs().max() > 1e-2

    def test_removing_the_sliding_window_changes_the_logits(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        adapter = engine.model.adapter
        if all(adapter.window(layer) is None for layer in range(adapter.layer_count)):
            pytest.skip("no sliding layers in this family's tiny config")
        right = engine.prefill(QUESTION, CHUNKS, reuse="none").logits
        monkeypatch.setattr(adapter, "windows", [None] * adapter.layer_count)
        assert (engine.prefill(QUESTION, CHUNKS, reuse="none").logits - right).abs().max() > 1e-2


@pytest.mark.parametrize("family", tiny_models.LENGTH_DEPENDENT)
def test_a_span_encoded_under_other_frequencies_is_not_called_exact(family: str) -> None:
    chunk = tiny_models.tokens(20, seed=5)
    with Engine(tiny_models.model(family)) as engine:
        engine.entries.encode([chunk])
        short = engine.prefill(QUESTION, [chunk], ratio=0.0)
        assert short.reuse.exact == len(PREFIX) + len(chunk)
        long_question = tiny_models.tokens(60, seed=6)
        long = engine.prefill(long_question, [chunk], ratio=0.0)
        assert (long.reuse.exact, long.reuse.fused) == (0, len(chunk))
        again = engine.prefill(long_question, [chunk], ratio=1.0)
        logits, _ = reference.full_prefill(
            tiny_models.model(family), PREFIX + chunk + long_question
        )
        close(again.logits, logits)
        assert (long.logits - logits).abs().max() > 1e-2


def computed_rows(prefill: Any) -> torch.Tensor:
    """Positions computed in every layer: the question, the selected tokens, and the prefix if it is
    not exact.
    """
    question = torch.arange(len(IDS) - len(QUESTION), len(IDS))
    start = torch.arange(0 if prefill.reuse.exact else len(PREFIX))
    return torch.cat((start, prefill.selected, question)).sort().values


def bottom_right_triangle(
    positions: torch.Tensor, low: int, high: int, _window: int | None
) -> torch.Tensor:
    """The mask of public CacheBlend code: row i of R sees the first S - R + i + 1 keys at any
    position.
    """
    count = positions.numel()
    return torch.ones(count, high - low, dtype=torch.bool).tril(diagonal=high - low - count)
