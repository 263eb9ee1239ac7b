"""The depth of the read buffer (CachedAttention section 3.2.1)."""

import pytest

from ragkv.fusion.pipeline import MOST_BYTES, UNMEASURED, Speeds, layers_ahead

LAYERS = 24


@pytest.mark.parametrize(
    ("load_s", "compute_s", "layers"),
    [(2.0, 1.0, 12), (1.0, 0.0, 24), (4.0, 1.0, 18), (1.0, 3.0, 1), (0.0, 1.0, 1)],
)
def test_the_layers_ahead_are_the_share_of_loading_that_computing_does_not_hide(
    load_s: float, compute_s: float, layers: int
) -> None:
    assert layers_ahead(load_s, compute_s, LAYERS) == layers


@pytest.mark.parametrize("load", [0.5, 1.0, 1.7, 4.0])
@pytest.mark.parametrize("compute", [0.3, 1.0, 2.0])
def test_a_filled_buffer_of_that_depth_leaves_no_gap(load: float, compute: float) -> None:
    """Simulated: with that many layers loaded when computing starts, every later layer arrives in
    time.
    """
    ahead = layers_ahead(load * LAYERS, compute * LAYERS, LAYERS)
    loaded = [max(0.0, (layer - ahead + 1) * load) for layer in range(LAYERS)]
    at = waited = 0.0
    for layer in range(LAYERS):
        waited += max(0.0, loaded[layer] - at)
        at = max(at, loaded[layer]) + compute
    assert waited <= load + 1e-9  # the depth is rounded up to whole layers


def test_the_read_ahead_follows_measured_speeds() -> None:
    speeds = Speeds()
    assert speeds.ahead(1000, 10, LAYERS) == UNMEASURED
    speeds.add_read(1000, 2.0)
    speeds.add_compute(100, 1.0)
    assert speeds.ahead(1000, 100, LAYERS) == 12
    for _ in range(50):  # the disk became as fast as the model
        speeds.add_read(1000, 1.0)
    assert speeds.ahead(1000, 100, LAYERS) == 1
    assert speeds.ahead(1000, 100, LAYERS, least=7) == 7


def test_the_buffer_is_bounded_at_any_measured_speed() -> None:
    speeds = Speeds()
    speeds.add_read(1, 1.0)
    speeds.add_compute(100, 1e-6)
    assert speeds.ahead(6 * MOST_BYTES, 1, LAYERS) == LAYERS // 6
    assert speeds.ahead(100 * MOST_BYTES, 1, LAYERS, least=7) == 1
