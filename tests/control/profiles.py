"""Profiles with simple numbers."""

from typing import Any

from ragkv.control.profile import LengthFit, Profile, RecomputeFit, Subject, TierSpeed

SUBJECT = Subject("w" * 32, "arch", "rope", "bfloat16", "raw", "desk", "Abacus 2000", 2, "cpu")


def profile(**changes: Any) -> Profile:
    """Three layers of 1 kB per token; a layer takes 1 s + 10 ms per row; placing is free; disk
    reads 1 kB a second.
    """
    values: dict[str, Any] = dict(
        subject=SUBJECT,
        layers=3,
        kv_bytes_per_token=3000,
        stored_bytes_per_token=3000.0,
        prefill=LengthFit(2.5, 0.02, 0.0),  # start and two layers
        recompute=RecomputeFit(1.0, 0.0, 0.01, 0.0),
        place_token_layer_s=0.0,
        start_s=0.5,
        tiers={"memory": TierSpeed(0.0, 0.0), "disk": TierSpeed(0.0, 1e-3)},
    )
    return Profile(**{**values, **changes})


def disk(seconds_a_token: float, latency_s: float = 0.0) -> TierSpeed:
    """A tier that reads one layer of one token in `seconds_a_token`."""
    return TierSpeed(latency_s, seconds_a_token / 1000)
