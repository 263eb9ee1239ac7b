"""Fits of measured times: a tier's latency and bandwidth, and prefills."""

import math

import pytest

from ragkv.control.fits import fit_length, fit_recompute, fit_tier

SIZES = (1e5, 2e5, 4e5, 8e5)


@pytest.mark.parametrize("latency_s", [1e-4, 1e-2])  # of 10.8 ms to a far server 0.8 are the bytes
def test_latency_and_bandwidth_are_found_in_exact_times(latency_s: float) -> None:
    found = fit_tier([(size, latency_s + size / 1e9) for size in SIZES])
    assert (found.latency_s, found.bytes_per_s) == pytest.approx((latency_s, 1e9), rel=1e-3)


def test_a_prefill_is_found_in_exact_times_and_noise_of_its_squares_does_not_explode_beyond_them() -> (
    None
):
    assert fit_length({size: [1.0 + size + size**2 / 1e3] for size in (128, 384, 768)}).at(
        4e3
    ) == pytest.approx(20001)
    # 2.2 without the bound
    assert fit_length({128: [0.61], 384: [1.3], 768: [3.4]}).at(2048) < 1.7 * 3.4 * 2048 / 768


def test_slices_used_in_place_have_no_bandwidth_however_their_times_scatter() -> None:
    found = fit_tier([(size, 1e-6 * (1 + size / 1e6)) for size in SIZES], in_place=True)
    assert found.per_byte_s == 0.0
    assert found.latency_s == pytest.approx(1.3e-6, rel=0.3)


@pytest.mark.parametrize("took_s", [1e-6, 2.5e-6, 0.1 + 0.2, 1 / 3])
def test_equal_times_of_all_sizes_give_no_bandwidth_out_of_a_rounding_error(took_s: float) -> None:
    found = fit_tier([(size, took_s * (1 + number * 1e-15)) for number, size in enumerate(SIZES)])
    assert found.bytes_per_s == math.inf
    assert found.latency_s == pytest.approx(took_s)


def test_rows_are_never_free_however_a_busy_machine_scatters_their_times() -> None:
    falling = {
        (rows, keys, keys - 32): [1e-3 * (20 - rows / 50)]
        for rows in (50, 200, 400)
        for keys in (512, 2048)
    }
    found, _ = fit_recompute(falling, with_placing=False)
    assert found.at(400, 2048) > 1.5 * found.at(200, 2048) > 1e-3
