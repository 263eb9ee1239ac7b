"""A profile is measured through the engine's own fusor and tiers, saved, and used by the next
engine.
"""

from pathlib import Path

import pytest

from ragkv import Engine, EngineConfig
from ragkv.config import ControllerConfig, StoreConfig
from ragkv.store.store import Store
from tests import tiny_models
from tests.control.test_controller import CHUNKS, QUESTION, engine
from tests.store.toy_tier import ToyTier


def test_a_measured_profile_is_saved_and_used_by_the_next_engine(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    with engine(tmp_path) as made:
        on_progress = lambda done, total: steps.append((done, total))  # noqa: E731
        measured = made.parts.profiler.measure(quick=True, on_progress=on_progress)
        made.entries.encode(CHUNKS)
        assert made.prefill(QUESTION, CHUNKS).reuse.decision
    assert steps == sorted(steps) and steps[-1][0] == steps[-1][1]
    with engine(tmp_path) as again:
        assert again.parts.controller.in_use.profile == measured
        assert again.prefill(QUESTION, CHUNKS).reuse.decision
    assert set(measured.tiers) == {"memory", "disk"}
    assert measured.tiers["memory"].per_byte_s < 1e-9 and measured.tiers["disk"].points
    assert measured.layers == 4 and measured.stored_bytes_per_token == measured.kv_bytes_per_token
    assert measured.prefill.at(400) >= measured.prefill.at(0) >= 0  # equal on a busy machine
    assert not list(tmp_path.glob("profile-*"))


def test_a_tier_of_another_kind_is_measured_if_it_is_in_the_store(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    toy = Store([ToyTier(10**9)], write_buffer_bytes=0)
    config = EngineConfig(StoreConfig(directory=str(tmp_path)), controller=ControllerConfig(False))
    with Engine(tiny_models.model("llama"), config=config, store=toy) as made:
        on_progress = lambda done, total: steps.append((done, total))  # noqa: E731
        measured = made.parts.profiler.measure(quick=True, on_progress=on_progress)
    assert steps == sorted(steps) and steps[-1][0] == steps[-1][1]
    assert set(measured.tiers) == {"memory", ToyTier.kind}
    assert measured.tiers[ToyTier.kind].points
    assert not (tmp_path / "entries").exists()  # no tier of the disk was opened


def test_an_engine_without_a_profile_measures_one_while_no_request_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragkv.control.profiler.QUIET_S", 0.01)
    with engine(tmp_path, measure=True) as made:
        with made.parts.scheduler.request():  # nothing is measured while one runs
            assert not made.parts.profiler.in_use.file.exists()
        made.parts.profiler._thread.join()
        measured = made.parts.controller.in_use.profile
    with engine(tmp_path, measure=True) as again:  # and once only
        assert (
            again.parts.profiler._thread is None
            and again.parts.controller.in_use.profile == measured
        )


def test_an_engine_that_closes_drops_the_measurement_under_way(tmp_path: Path) -> None:
    with engine(tmp_path, measure=True) as made:
        thread = made.parts.profiler._thread
    assert not thread.is_alive() and not (tmp_path / "profile.json").exists()


def test_without_a_directory_memory_alone_is_measured_and_the_users_cache_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragkv.control.profile_in_use.cache_folder", lambda kind: tmp_path / kind)
    with engine(None, memory=True) as made:
        measured = made.parts.profiler.measure(quick=True)
        assert set(measured.tiers) == {"memory"}
        made.entries.encode(CHUNKS)
        assert made.prefill(QUESTION, CHUNKS).reuse.decision
    assert [path.name for path in (tmp_path / "profiles").iterdir()] == ["profile.json"]
    with engine(None, memory=True) as again:
        assert again.parts.controller.in_use.profile == measured
