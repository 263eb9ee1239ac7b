"""KCache: chosen rows equal a naive reference, N >= S equals ordinary attention, and where the
bytes are.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv import KCacheConfig
from ragkv.errors import ConfigError
from ragkv.model import Adapter, PromptKV, Rows, adapt, full_pass, grown, run_layer
from ragkv.model.attention import whole_blocks
from ragkv.model.decode.batching import DecodeRow, decode_rows
from ragkv.model.kcache import HostValues, OffloadedKV, Offloading, attend_top, choose
from ragkv.prompt.request import dynamic_cache
from tests import tiny_models

CPU = torch.device("cpu")
STEPS = 200
PROMPT = 60
HEADROOM = STEPS + 5
# the last three: MHA, RoPE, NoPE
TOP = ("llama", "gemma2", "mistral", "qwen3", "gpt_neox", "llama-dynamic", "cohere2")

ON_A_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
)


def offloaded(adapter: Adapter, capacity: int, config: KCacheConfig) -> OffloadedKV:
    return OffloadedKV(adapter.kv_shape, capacity, adapter.dtype, adapter.device, config)


@torch.no_grad()
def prefilled(adapter: Adapter, kv: PromptKV, seed: int = 1, length: int = PROMPT) -> int:
    """Prefill `kv`; returns the greedy next token."""
    hidden = full_pass(
        adapter, torch.tensor(tiny_models.tokens(length, seed), device=adapter.device), kv
    )
    for layer in range(adapter.layer_count):
        kv.finish_prefill(layer, length)
    return int(adapter.logits(hidden)[-1].argmax())


def step(adapter: Adapter, kv: PromptKV, token: int) -> torch.Tensor:
    return decode_rows(adapter, [DecodeRow(kv, token)])[0]


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = 1e-3 if wanted.is_cuda else 1e-5
    torch.testing.assert_close(got, wanted, atol=tolerance * float(wanted.abs().max()), rtol=0)


# The choice of rows


def naive(
    q_rot: torch.Tensor,
    k_rot: torch.Tensor,
    v: torch.Tensor,
    top_n: int,
    scaling: float,
    softcap: float | None,
):  # type: ignore[no-untyped-def]
    """Rows and output, head by head: softmax over all keys, the N largest weights, their rows."""
    rows = set()
    out = torch.zeros(q_rot.shape[0], q_rot.shape[1], v.shape[2])
    for group, queries in enumerate(q_rot):
        for head, query in enumerate(queries):
            scores = (k_rot[group] @ query) * scaling
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            weights = (scores - scores.max()).double().exp()
            weights = weights / weights.sum()
            best = sorted(range(len(weights)), key=lambda at: -float(scores[at]))[:top_n]
            rows |= {(at, group) for at in best}
            out[group, head] = sum(float(weights[at]) * v[group, at] for at in best)
    return rows, out


@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    keys=st.integers(1, 40),
    top_n=st.integers(1, 45),
    start=st.integers(0, 9),
    softcap=st.sampled_from([None, 3.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=150)
def test_chosen_rows_and_their_attention_equal_a_naive_reference_for_every_n(
    kv_heads: int, group: int, keys: int, top_n: int, start: int, softcap: float | None, seed: int
) -> None:
    chance = torch.Generator().manual_seed(seed)
    q_rot = torch.randn(kv_heads, group, 8, generator=chance)
    k_rot, v = (torch.randn(kv_heads, keys, 8, generator=chance) for _ in range(2))
    wanted_rows, wanted = naive(q_rot, k_rot, v, top_n, 0.3, softcap)
    choice = choose(q_rot, k_rot, top_n, 0.3, softcap, start)
    rows = choice.rows.tolist()
    assert {(row // kv_heads - start, row % kv_heads) for row in rows} == wanted_rows
    assert rows == sorted(set(rows))  # once each, for all query heads of a KV head
    by_position = v.transpose(0, 1).reshape(-1, 8)
    got = attend_top(choice, lambda rows: by_position[rows - start * kv_heads])
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    if top_n < keys:
        # the paper does not scale them to sum to 1
        assert (choice.weights.sum(-1) < 1.0 - 1e-7).all()


# Values in host memory


@given(st.data())
@settings(max_examples=80)
def test_values_in_host_memory_behave_like_a_tensor(data: st.DataObject) -> None:
    heads = 2
    loaded = data.draw(st.integers(0, 9))
    chance = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    plain = torch.zeros(heads, 60, 3)
    values = HostValues(heads, 3, 60, torch.float32, CPU)
    plain[:, :loaded] = torch.randn(heads, loaded, 3, generator=chance)
    values.load(plain[:, :loaded])
    end = loaded
    for _ in range(data.draw(st.integers(1, 8))):
        start = data.draw(st.integers(max(0, end - 4), end))  # a repeated step, a discarded tail
        count = data.draw(st.integers(1, 6))
        end = start + count
        plain[:, start:end] = torch.randn(heads, count, 3, generator=chance)
        values.put(start, plain[:, start:end])
        low = data.draw(st.integers(0, end - 1))
        assert torch.equal(values.take(low, end), plain[:, low:end])
        rows = torch.tensor(sorted(data.draw(st.sets(st.integers(0, end * heads - 1), min_size=1))))
        assert torch.equal(values.fetch(rows), plain[:, :end].transpose(0, 1).reshape(-1, 3)[rows])


@pytest.mark.parametrize("resident", [0, 1, 3])
def test_device_bytes_fall_to_the_resident_layers(resident: int) -> None:
    adapter = adapt(tiny_models.model("llama"))
    layers = 4
    kv = offloaded(adapter, PROMPT, KCacheConfig(4, resident))
    prefilled(adapter, kv)
    token_bytes = 2 * 16 * 4  # G D float32
    assert kv.device_bytes == (layers + resident) * whole_blocks(PROMPT) * token_bytes  # K; V
    assert kv.host_bytes == (layers - resident) * PROMPT * token_bytes
    assert sum(v.shape[2] > 0 for v in kv.values) == resident  # their device memory is released


def test_during_prefill_at_most_one_more_layer_of_values_is_on_the_device() -> None:
    adapter = adapt(tiny_models.model("llama"))
    kv = offloaded(adapter, PROMPT, KCacheConfig(4, resident_layers=1))
    hidden = adapter.embed(torch.tensor(tiny_models.tokens(PROMPT)))
    rows = Rows.span(0, PROMPT, CPU)
    held = []
    with torch.no_grad():
        for layer in range(4):
            hidden = run_layer(adapter, layer, hidden, rows, kv, adapter.rope.tables(PROMPT))
            held.append(kv.device_bytes)
            kv.finish_prefill(layer, PROMPT)
    # K; V of the resident layer, of another one
    assert max(held) == (4 + 1 + 1) * whole_blocks(PROMPT) * 2 * 16 * 4


# Decoding


@pytest.mark.parametrize("family", TOP)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def test_kcache_with_n_of_all_keys_equals_ordinary_decoding_over_200_tokens(
    family: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = adapt(tiny_models.model(family).to(device))
    fetch = HostValues.fetch
    fetched = []
    monkeypatch.setattr(
        HostValues, "fetch", lambda own, rows: fetched.append(len(rows)) or fetch(own, rows)
    )
    ordinary = adapter.new_kv(PROMPT + HEADROOM)
    top = offloaded(adapter, PROMPT + HEADROOM, KCacheConfig(PROMPT + HEADROOM, resident_layers=1))
    token = prefilled(adapter, ordinary)
    assert prefilled(adapter, top) == token
    for _ in range(STEPS):
        wanted = step(adapter, ordinary, token)
        same(step(adapter, top, token), wanted)
        token = int(wanted.argmax())
    assert len(fetched) == STEPS * (adapter.layer_count - 1) and min(fetched) > 0
    for layer in range(adapter.layer_count):
        for own, other in zip(
            top.view(layer, top.length), ordinary.view(layer, top.length), strict=True
        ):
            tolerance = 1e-3 if own.is_cuda else 1e-4
            torch.testing.assert_close(own, other, atol=tolerance, rtol=tolerance)


def test_prompts_with_and_without_kcache_decode_in_one_batch() -> None:
    adapter = adapt(tiny_models.model("gemma2"))

    def fresh() -> list[PromptKV]:
        kinds = (None, KCacheConfig(7, 0), KCacheConfig(12, 2), None, KCacheConfig(5, 1))
        return [
            adapter.new_kv(PROMPT + 40) if kind is None else offloaded(adapter, PROMPT + 40, kind)
            for kind in kinds
        ]

    together = fresh()
    alone = fresh()
    for kvs in (together, alone):
        for at, kv in enumerate(kvs):
            prefilled(adapter, kv, seed=at, length=20 + 7 * at)
    for at in range(20):
        tokens = tiny_models.tokens(5, seed=100 + at)
        logits = decode_rows(
            adapter, [DecodeRow(kv, token) for kv, token in zip(together, tokens, strict=True)]
        )
        for got, kv, token in zip(logits, alone, tokens, strict=True):
            same(got, step(adapter, kv, token))


def test_reading_offloaded_kv_returns_all_values() -> None:
    adapter = adapt(tiny_models.model("llama"))
    ordinary = adapter.new_kv(PROMPT + 5)
    kv = offloaded(adapter, PROMPT + 5, KCacheConfig(PROMPT + 99, 1))
    longer = list[PromptKV]()
    for each in (kv, ordinary):
        prefilled(adapter, each)
        for token in tiny_models.tokens(5):
            step(adapter, each, token)
        with torch.no_grad():  # five more in one pass
            full_pass(
                adapter,
                torch.tensor(tiny_models.tokens(5, 9)),
                more := grown(each, 5),
                start=each.length,
            )
        longer.append(more)
    mine = dynamic_cache(longer[0])
    its = dynamic_cache(longer[1])
    for own, other in zip(mine.layers, its.layers, strict=True):
        torch.testing.assert_close(own.keys, other.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(own.values, other.values, atol=1e-5, rtol=1e-5)


# Settings that use ordinary attention


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (KCacheConfig(top_n=None), "top_n is None"),
        (KCacheConfig(top_n=60), "top_n is 60, the prompt has 60 tokens"),
        (KCacheConfig(top_n=8, resident_layers=4), "resident_layers is 4, the model has 4"),
    ],
)
def test_settings_that_cannot_help_use_ordinary_attention_and_say_so(
    config: KCacheConfig, says: str
) -> None:
    offloading = Offloading(adapt(tiny_models.model("llama")), config)
    assert says in str(offloading.refusal(PROMPT))
    assert type(offloading.new_kv(PROMPT)(70)) is PromptKV


@pytest.mark.parametrize("wrong", [{"top_n": 0}, {"top_n": -1}, {"resident_layers": -1}])
def test_an_invalid_kcache_setting_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        KCacheConfig(**wrong)  # type: ignore[arg-type]
