"""Fits of measured times: a tier's latency and bandwidth."""

import math

import pytest

from ragkv.fusion.fits import fit_tier

SIZES = (1e5, 2e5, 4e5, 8e5)


def test_latency_and_bandwidth_are_found_in_exact_times() -> None:
    found = fit_tier([(size, 1e-4 + size / 1e9) for size in SIZES])
    assert found.latency_s == pytest.approx(1e-4)
    assert found.bytes_per_s == pytest.approx(1e9)


def test_slices_used_in_place_have_no_bandwidth_however_their_times_scatter() -> None:
    found = fit_tier([(size, 1e-6 * (1 + size / 1e6)) for size in SIZES], in_place=True)
    assert found.per_byte_s == 0.0
    assert found.latency_s == pytest.approx(1.3e-6, rel=0.3)


@pytest.mark.parametrize("took_s", [1e-6, 2.5e-6, 0.1 + 0.2, 1 / 3])
def test_equal_times_of_all_sizes_give_no_bandwidth_out_of_a_rounding_error(took_s: float) -> None:
    found = fit_tier([(size, took_s * (1 + number * 1e-15)) for number, size in enumerate(SIZES)])
    assert found.bytes_per_s == math.inf
    assert found.latency_s == pytest.approx(took_s)


def test_a_bandwidth_that_is_a_small_share_of_the_time_is_still_found() -> None:
    found = fit_tier([(size, 1e-2 + size / 1e9) for size in SIZES])  # a far server: 0.8 of 10.8 ms are the bytes
    assert found.bytes_per_s == pytest.approx(1e9, rel=1e-3)
