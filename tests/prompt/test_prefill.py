"""A prefill's KV belongs to the caller; stored entries and the user's model are never changed."""

import copy
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from ragkv import Engine
from ragkv.errors import EntryDamagedError
from ragkv.fusion import PreparedPrompt
from ragkv.registry import SELECTORS
from tests import tiny_models
from tests.engine.helpers import A, B, C, Q, close, engine_of, full_prefill, ids, stored
from tests.faults import raising
from tests.fixed import fixed
from tests.scheduling.helpers import between_layers

CHUNKS = [A, B, C]


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "gemma3_text", "gpt_neox", "phi3", "cohere2"]
)
def test_the_transformers_model_continues_from_a_prefills_cache(family: str) -> None:
    following = tiny_models.tokens(5, seed=8)
    with engine_of(family) as engine:
        prefill = engine.prefill(Q, CHUNKS, ratio=1.0)
    length = len(prefill.token_ids)
    model = tiny_models.model(family)
    with torch.no_grad():
        going_on = model(
            torch.tensor([following]),
            past_key_values=prefill.cache,
            position_ids=torch.arange(length, length + 5)[None],
        )
    close(going_on.logits[0, -1], full_prefill([*ids(CHUNKS), *following], family)[0])


def test_a_cache_has_all_s_positions_in_every_layer() -> None:
    with engine_of("mistral") as engine:
        prefill = engine.prefill(Q, [*CHUNKS, A], ratio=0.2)
        shapes = {
            tuple(tensor.shape)
            for layer in prefill.cache.layers
            for tensor in (layer.keys, layer.values)
        }
        assert shapes == {(1, 2, len(ids([*CHUNKS, A])), 16)}
        assert prefill.cache.get_seq_length() == len(prefill.token_ids)


def test_every_read_of_the_cache_makes_a_new_one(engine: Engine) -> None:
    prefill = engine.prefill(Q, CHUNKS)
    first = prefill.cache
    kept = [layer.keys.clone() for layer in first.layers]
    for layer in first.layers:
        layer.keys.zero_()
        layer.values.zero_()
    assert all(
        torch.equal(layer.keys, k_rot)
        for layer, k_rot in zip(prefill.cache.layers, kept, strict=True)
    )


@pytest.mark.parametrize("selector", sorted(SELECTORS))
def test_no_request_changes_a_stored_byte_or_a_later_ones_tokens(selector: str) -> None:
    def held() -> list[torch.Tensor]:
        return [stored(engine, chunk) for chunk in CHUNKS]

    with engine_of(fusion=fixed(selector=selector)) as engine:
        engine.entries.encode(CHUNKS)
        before = held()
        first = engine.prefill(Q, [B, A, C, A], ratio=0.5, selector=selector)
        for layer in first.cache.layers:
            layer.keys.add_(1.0)
        engine.answer(Q, [C, A, B], ratio=0.5, selector=selector, max_new_tokens=3)
        again = engine.prefill(Q, [B, A, C, A], ratio=0.5, selector=selector)
        assert torch.equal(first.logits, again.logits)
        assert all(map(torch.equal, first.selected_by_layer, again.selected_by_layer))
        assert all(torch.equal(*pair) for pair in zip(held(), before, strict=True))


@pytest.mark.parametrize("family", ["llama", "llama-dynamic", "gemma3_text", "qwen3_moe"])
def test_the_users_model_is_not_changed(family: str) -> None:
    def own(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids(CHUNKS)]), use_cache=False).logits

    model = tiny_models.model(family)
    before = own(model)
    config = copy.deepcopy(model.config.to_dict())
    attention = model.config._attn_implementation
    names = [name for name, _ in model.named_modules()]
    with Engine(model) as engine:
        assert torch.equal(own(model), before)
        engine.entries.encode(CHUNKS)
        first = engine.prefill(Q, CHUNKS, ratio=0.5).logits
        assert torch.equal(own(model), before)
        events = engine.stream(Q, CHUNKS, max_new_tokens=4, min_new_tokens=4)
        for _ in events:
            assert torch.equal(own(model), before)
        assert torch.equal(engine.prefill(Q, CHUNKS, ratio=0.5).logits, first)
    assert torch.equal(own(model), before)
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == attention
    assert {
        module.config._attn_implementation
        for module in model.modules()
        if hasattr(module, "config")
    } == {attention}
    assert [name for name, _ in model.named_modules()] == names
    assert all(not parameter.grad_fn for parameter in model.parameters())


def test_an_entry_that_is_damaged_twice_ends_the_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a miss the second time; who reads it nevertheless would try for ever."""
    engine.entries.encode([A, B])
    key = engine.entries.identity.key(A)
    monkeypatch.setattr(PreparedPrompt, "result", raising(EntryDamagedError(key, "torn")))
    with pytest.raises(EntryDamagedError, match="torn"):
        engine.prefill(Q, [A, B])


def test_no_result_carries_a_gradient(engine: Engine) -> None:
    prefill = engine.prefill(Q, CHUNKS)
    assert not prefill.logits.requires_grad
    assert not any(layer.keys.requires_grad for layer in prefill.cache.layers)
    assert prefill.logits.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "llama-yarn", "gemma2", "qwen3_moe", "gpt_neox"])
def test_half_precision_at_ratio_one_is_close_to_its_own_full_prefill(
    family: str, dtype: torch.dtype
) -> None:
    if family == "gemma2" and dtype is torch.float16:
        pytest.skip("gemma's embedding scale overflows in float16")
    with Engine(tiny_models.model(family).to(dtype)) as engine:
        engine.entries.encode(CHUNKS)
        assert stored(engine, A).dtype is dtype
        logits = full_prefill(ids(CHUNKS), family)[0]
        for how in (dict(ratio=1.0), dict(reuse="none"), dict(reuse="prefix")):
            got = engine.prefill(Q, CHUNKS, **how).logits
            assert (got - logits).abs().mean() < 0.3 * logits.std()
        assert engine.answer(Q, CHUNKS, max_new_tokens=2, min_new_tokens=2).token_ids


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_engine_equals_the_cpu_engine() -> None:
    with Engine(tiny_models.model("llama").to("cuda")) as fast, engine_of() as slow:
        for engine in (fast, slow):
            engine.entries.encode(CHUNKS)
        for how in (
            dict(ratio=0.0),
            dict(ratio=1.0),
            dict(ratio=0.3, selector="first-k"),
            dict(ratio=0.3, selector="hkvd"),
            dict(ratio=0.3, selector="attention"),
            dict(reuse="none"),
        ):
            ours, wanted = (
                engine.prefill(Q, CHUNKS, **how).logits.cpu() for engine in (fast, slow)
            )
            torch.testing.assert_close(ours, wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_threads_with_streams_of_their_own_get_the_answers_of_the_default_stream() -> None:
    questions = [tiny_models.tokens(6, seed) for seed in range(20, 28)]

    def ask(engine: Engine, question: list[int]) -> tuple[int, ...]:
        with torch.cuda.stream(torch.cuda.Stream()):
            return engine.answer(question, CHUNKS, max_new_tokens=12, min_new_tokens=12).token_ids

    with Engine(tiny_models.model("llama").to("cuda")) as engine, ThreadPoolExecutor(4) as pool:
        engine.entries.encode(CHUNKS)
        wanted = [
            engine.answer(one, CHUNKS, max_new_tokens=12, min_new_tokens=12).token_ids
            for one in questions
        ]
        assert list(pool.map(partial(ask, engine), questions)) == wanted


def test_steps_of_other_answers_between_layers_count_as_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with engine_of() as engine:
        engine.entries.encode(CHUNKS)
        engine.prefill(Q, CHUNKS)
        between_layers(monkeypatch, engine, lambda: time.sleep(0.05))
        busy = engine.prefill(Q, CHUNKS).timing
    assert busy.queue_s >= 0.05
    assert 0 < busy.prefill_s < busy.first_token_s - 0.05
    assert busy.queue_s + busy.lookup_s + busy.prefill_s <= busy.first_token_s
