"""The demo's step at a real size: cut to what the machine computes in time."""

import pytest

from ragkv.cli.demo_shape import BUDGET_S, Size, sizes, time_shape

FAST, SLOW, VERY_SLOW = 5e-5, 4e-4, 1e-2  # seconds of a row in a layer


def chosen(row_layer_s: float) -> Size:
    return next((size for size in sizes(24) if size.seconds(row_layer_s) <= BUDGET_S), sizes(24)[-1])


def test_a_fast_machine_times_everything_and_a_slow_one_fewer_chunks_then_fewer_layers() -> None:
    assert chosen(FAST) == Size(6, 2, 24)
    assert chosen(SLOW).chunks < 6 and chosen(SLOW).layers == 24
    assert chosen(VERY_SLOW).layers < 24
    estimates = [size.seconds(1.0) for size in sizes(24)]
    assert estimates == sorted(estimates, reverse=True)


@pytest.mark.parametrize(("budget_s", "is_cut"), [(1e9, False), (1e-9, True)])
def test_what_is_cut_is_said(budget_s: float, is_cut: bool) -> None:
    shown: list[str] = []
    times = time_shape("tiny", shown.append, budget_s)
    assert any("so it is cut" in line for line in shown) is is_cut
    assert (times["chunks"], times["layers"]) == ((2, 2) if is_cut else (6, 4))
    assert min(times[way] for way in ("full", "prefix", "warm", "reuse alone")) > 0
    assert "First token: full" in shown[-1] and f"{times['chunks']} chunks of 512 tokens" in shown[-1]
