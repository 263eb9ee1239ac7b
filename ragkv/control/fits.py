"""Least-squares fits of measured times. No fitted coefficient is negative."""

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from .profile import LengthFit, RecomputeFit, TierSpeed, TimedPoint

# If bytes take a smaller share of a slice's time, bandwidth cannot be told from latency.
LEAST_SHARE = 0.01


def fit_length(times: Mapping[int, Sequence[float]]) -> LengthFit:
    """Seconds over a length, fitted to the medians of several times each.

    Squares make up at most half of the longest time, because they follow noise.
    """
    medians = {length: statistics.median(several) for length, several in times.items()}
    columns = [[1.0, float(length), length + length**2 / max(medians)] for length in medians]
    fixed_s, linear_s, both_s = _fit(columns, list(medians.values()))
    return LengthFit(fixed_s, linear_s + both_s, both_s / max(medians))


def fit_recompute(
    times: Mapping[tuple[int, int, int], Sequence[float]], with_placing: bool
) -> tuple[RecomputeFit, float | None]:
    """A layer's seconds over rows and keys; `times` are by rows, keys and placed tokens.

    If the times include placing (`with_placing`), the seconds to place one token are fitted too.
    """
    medians = {at: statistics.median(several) for at, several in times.items()}
    columns = [
        [1.0, float(placed if with_placing else keys), float(rows), float(rows * keys)]
        for rows, keys, placed in medians
    ]
    fixed_s, second_s, per_row_s, per_row_key_s = _fit(columns, list(medians.values()))
    # noise hides what rows take: as if they took all, else computing would seem free
    if not per_row_s + per_row_key_s:
        fixed_s = 0.0
        second_s = 0.0
        (per_row_s,) = _fit([[float(rows)] for rows, _, _ in medians], list(medians.values()))
    placed_s, per_key_s = (second_s, 0.0) if with_placing else (0.0, second_s)
    return RecomputeFit(
        fixed_s, per_key_s, per_row_s, per_row_key_s
    ), placed_s if with_placing else None


def fit_tier(times: Sequence[tuple[float, float]], in_place: bool = False) -> TierSpeed:
    """A tier's latency and speed; `times` are the bytes of a slice and the seconds that it takes.

    The speed is 0 seconds a byte if slices are used `in_place`, because nothing reads their bytes.
    It is also 0 if the bytes take less than `LEAST_SHARE` of the largest slice's time, because the
    fit's slope is then noise or a rounding error.
    """
    seconds = [took for _, took in times]
    latency_s, per_byte_s = _fit([[1.0, size] for size, _ in times], seconds)
    largest, largest_s = max(times)
    if in_place or largest * per_byte_s < LEAST_SHARE * largest_s:
        (latency_s,), per_byte_s = _fit([[1.0]] * len(times), seconds), 0.0
    points = tuple(TimedPoint(round(size), took) for size, took in times)
    return TierSpeed(latency_s, per_byte_s, points)


def _fit(columns: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """Coefficients of least relative squared error. A coefficient that would be negative is left
    out, as 0.
    """
    weights = 1.0 / np.maximum(np.array(times), 1e-9)
    matrix = np.array(columns) * weights[:, None]
    wanted = np.array(times) * weights
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    used = [column for column in range(matrix.shape[1]) if np.abs(matrix[:, column]).max() > 0]
    while used:
        found = np.linalg.lstsq(matrix[:, used] / scale[used], wanted, rcond=None)[0]
        if found.min() >= 0:
            break
        used.pop(int(found.argmin()))
    fitted = np.zeros(matrix.shape[1])
    if used:
        fitted[used] = found / scale[used]
    return [float(value) for value in fitted]
