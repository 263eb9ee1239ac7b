"""Whether KCache pays: the paper's figures, and that the inequality is the time it stands for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv import KCacheConfig
from ragkv.fusion.profile import LengthFit
from ragkv.lab.kcache_gain import (
    Bandwidths,
    advise,
    bandwidths_of,
    decode_pays,
    most_rows,
    prefill_hides,
    tokens_from_which_it_pays,
)
from tests.fusion.profiles import profile

A100 = Bandwidths(device=2039e9, to_device=32e9, to_host=32e9)
SOME = st.floats(1e6, 1e13)


def decode_saves_s(tokens: int, rows: float, row_bytes: int, kv_heads: int, bandwidths: Bandwidths) -> float:
    """Seconds saved in one layer of a decode step, negative if none; `row_bytes` is V of one KV head and token."""
    size = row_bytes * kv_heads
    return (tokens - rows) * size / bandwidths.device - rows * size / bandwidths.to_device


def prefill_hides_by_flops(tokens: int, hidden: int, flops: float, to_host: float) -> bool:
    """The paper's count for a LLaMA-2 block: 11 d + 2 s > FLOPS / bandwidth (equation 2)."""
    return 11 * hidden + 2 * tokens > flops / to_host


def test_on_an_a100_kcache_pays_from_contexts_of_about_64_n() -> None:
    assert A100.ratio == pytest.approx(63.7, abs=0.1)
    assert not decode_pays(128 * 64, 128, A100)
    assert decode_pays(128 * 65, 128, A100)
    assert tokens_from_which_it_pays(128, A100) == 8285


def test_on_an_a100_a_prefill_of_llama_2_7b_hides_the_copy() -> None:
    assert prefill_hides_by_flops(1024, 4096, 312e12, 32e9)
    assert not prefill_hides_by_flops(1024, 512, 312e12, 32e9)


@given(tokens=st.integers(1, 10**6), rows=st.integers(1, 10**6), device=SOME, road=SOME)
def test_kcache_pays_exactly_if_it_saves_time(tokens: int, rows: int, device: float, road: float) -> None:
    speeds = Bandwidths(device, road, road)
    saved = decode_saves_s(tokens, rows, 256, 8, speeds)
    if abs(saved) > 1e-9 * (tokens + rows) * 256 * 8 * (1 / device + 1 / road):
        assert decode_pays(tokens, rows, speeds) == (saved > 0)


@given(rows=st.integers(1, 10_000), device=SOME, road=SOME)
def test_kcache_pays_from_the_shortest_context_on_and_not_below_it(rows: int, device: float, road: float) -> None:
    speeds = Bandwidths(device, road, road)
    least = tokens_from_which_it_pays(rows, speeds)
    assert decode_pays(least + 1, rows, speeds)
    assert not decode_pays(least - 1, rows, speeds)


def test_the_most_rows_are_n_per_query_head_but_never_more_than_all() -> None:
    assert most_rows(32, 4, 1000) == 128
    assert most_rows(32, 4, 100) == 100


def test_seconds_are_bytes_over_bandwidth() -> None:
    speeds = Bandwidths(device=1000.0, to_device=100.0, to_host=50.0)
    assert decode_saves_s(100, 10, 2, 5, speeds) == pytest.approx(90 * 10 / 1000 - 10 * 10 / 100)
    assert prefill_hides(2.1, 100, 1.0, speeds)
    assert not prefill_hides(1.9, 100, 1.0, speeds)


class TestAdvice:
    """The profile reads 3000 B in 1 ms, so 3 MB/s; its prefill takes 10 ms a token and layer, and 0.33 s."""

    def test_the_profile_of_a_gpu_decides_from_its_bandwidth_ratio(self) -> None:
        gpu = profile(copy_bytes_per_s=300_000.0)
        assert bandwidths_of(gpu).ratio == pytest.approx(10.0)
        config = KCacheConfig(top_n=8, resident_layers=1)
        assert not advise(gpu, config, 80, group=1).pays
        assert advise(gpu, config, 90, group=1).pays
        assert not advise(gpu, config, 90, group=2).pays
        assert "67%" in advise(gpu, config, 90, group=1).why[1]

    def test_the_prefill_hides_the_copy_if_it_takes_longer(self) -> None:
        config = KCacheConfig(top_n=8)
        assert advise(profile(copy_bytes_per_s=300_000.0), config, 100, 1).hidden  # 0.17 s against 1.3 s
        assert not advise(profile(copy_bytes_per_s=10_000.0), config, 100, 1).hidden  # 5 s

    def test_the_advice_for_a_cpu_says_that_host_and_device_share_one_memory(self) -> None:
        advice = advise(profile(), KCacheConfig(top_n=8), 100, 1)
        assert advice.pays  # S / U of 12.5 against 2: of bytes alone
        assert "one memory" in advice.why[-1]

    def test_kcache_does_not_pay_without_top_n_or_a_measured_decode_speed(self) -> None:
        assert not advise(profile(), KCacheConfig(top_n=None), 100, 1).pays
        flat = profile(decode=LengthFit(0.1, 0.0, 0.0))
        assert not advise(flat, KCacheConfig(top_n=8), 100, 1).pays
