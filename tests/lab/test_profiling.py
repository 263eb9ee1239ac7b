"""A profile is measured through the engine's own fusor and tiers, saved, and used by the next engine."""

from pathlib import Path

from ragkv.lab import profiling
from ragkv.lab.profiling import measure
from tests.prompt.test_load_control import CHUNKS, QUESTION, engine


def test_a_measured_profile_is_saved_and_used_by_the_next_engine(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    with engine(tmp_path) as made:
        measured = measure(made, quick=True, on_progress=lambda done, total: steps.append((done, total)))
        path = profiling.save(made, measured)
        made.warm(CHUNKS)
        assert made.prefill(QUESTION, CHUNKS).reuse.decision
    assert path == tmp_path / "profile.json"
    assert steps == sorted(steps) and steps[-1][0] == steps[-1][1]
    with engine(tmp_path) as again:
        assert again.load_control.profile == measured
        assert again.prefill(QUESTION, CHUNKS).reuse.decision
    assert set(measured.tiers) == {"memory", "disk"}
    assert measured.tiers["memory"].per_byte_s < 1e-9 and measured.tiers["disk"].points
    assert measured.layers == 4 and measured.stored_bytes_per_token == measured.kv_bytes_per_token
    assert measured.prefill.at(400) >= measured.prefill.at(0) >= 0  # equal on a busy machine
    assert not list(tmp_path.glob("profile-*"))


def test_only_memory_is_measured_without_a_directory() -> None:
    with engine(None, memory=True) as made:
        measured = measure(made, quick=True)
        assert set(measured.tiers) == {"memory"}
        assert profiling.save(made, measured) is None
        made.warm(CHUNKS)
        assert made.prefill(QUESTION, CHUNKS).reuse.decision
