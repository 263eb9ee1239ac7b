"""With `ratio=None` a saved profile decides the ratio and the loads. Without one r* is used, and the report says so."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from ragkv import Engine, EngineConfig, FusionConfig, StoreConfig
from ragkv.errors import ConfigError, ProfileError
from ragkv.fusion.gate_result import GateResult, Point, Tolerance
from ragkv.fusion.profile import LengthFit, Profile, RecomputeFit, TierSpeed, save
from ragkv.lab import profiling
from tests import reference, tiny_models

CHUNKS = [tiny_models.tokens(40, seed) for seed in range(4)]
QUESTION = tiny_models.tokens(8, seed=9)
S = 1 + 160 + 8  # of which 120 are candidates: the first chunk is exact


def engine(directory: Path | None, *, memory: bool = False, **fusion: Any) -> Engine:
    """A tiny engine whose chunks are on disk only, or also in memory."""
    store = StoreConfig(directory=str(directory) if directory else None, memory_bytes=1 << 30 if memory else 0)
    settings = FusionConfig(**{"selector": "first-k", "ratio": None, **fusion})
    return Engine(tiny_models.model("llama"), config=EngineConfig(store=store, fusion=settings))


def hand_made(made: Engine, disk_token_s: float) -> Profile:
    """A profile: a row takes 10 ms in each layer, a token from disk takes `disk_token_s`, nothing else takes time."""
    token_bytes = made.stats().kv_bytes_per_token
    return Profile(
        subject=made.load_control.subject,
        layers=4,
        kv_bytes_per_token=token_bytes,
        stored_bytes_per_token=float(token_bytes),
        prefill=LengthFit(0.0, 0.03, 0.0),
        recompute=RecomputeFit(0.0, 0.0, 0.01, 0.0),
        place_token_layer_s=0.0,
        start_s=0.0,
        decode=LengthFit(0.01, 0.0, 0.0),
        tiers={"memory": TierSpeed(0.0, 0.0), "disk": TierSpeed(0.0, disk_token_s / (token_bytes / 4))},
    )


def filed(directory: Path, disk_token_s: float, **how: Any) -> Engine:
    """An engine with warm chunks and a hand-made profile saved in its store directory."""
    with engine(directory, **how) as first:
        save(hand_made(first, disk_token_s), directory)
    made = engine(directory, **how)
    made.warm(CHUNKS)
    return made


def test_the_ratio_is_where_recompute_hides_loading(tmp_path: Path) -> None:
    with filed(tmp_path, disk_token_s=0.004) as made:  # a layer: 160 x 4 ms = 640 ms = (8 + r 120) x 10 ms: r = 7/15
        prefill = made.prefill(QUESTION, CHUNKS)
    reuse = prefill.reuse
    assert reuse.ratio == pytest.approx(7 / 15)
    assert (reuse.exact, reuse.fused, reuse.recomputed, reuse.computed) == (41, 64, 56, 8)
    assert "47%" in reuse.decision[0]
    assert "cheapest" in reuse.decision[1] or "fastest" in reuse.decision[1]
    assert reuse.notes == ()


def test_a_ratio_given_in_the_call_is_used_as_it_is(tmp_path: Path) -> None:
    with filed(tmp_path, disk_token_s=0.004) as made:
        reuse = made.prefill(QUESTION, CHUNKS, ratio=0.25).reuse
        assert (reuse.ratio, reuse.decision) == (0.25, ())
    with filed(tmp_path, disk_token_s=0.004, ratio=0.3) as made:
        assert made.prefill(QUESTION, CHUNKS).reuse.ratio == 0.3
        assert made.prefill(QUESTION, CHUNKS, ratio=None).reuse.ratio == pytest.approx(7 / 15)


def test_slow_chunks_are_computed_without_counting_as_misses_or_being_stored_again(tmp_path: Path) -> None:
    with filed(tmp_path, disk_token_s=1.0) as made:
        before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("entries/*/*")}
        prefill = made.prefill(QUESTION, CHUNKS)
        made.flush()
        assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("entries/*/*")} == before
    reuse = prefill.reuse
    assert (reuse.missed_chunks, reuse.computed, reuse.exact) == (0, 168, 1)
    assert reuse.bytes_by_tier.get("disk", 0) == 0
    assert "4 of 4 chunks are computed" in reuse.decision[0]
    whys = {span.why for span in prefill.spans if span.kind == "chunk"}
    assert whys == {"computing is quicker than loading the stored KV"}
    full, _ = reference.full_prefill(tiny_models.model("llama"), prefill.token_ids.tolist())
    torch.testing.assert_close(prefill.logits, full, atol=1e-4, rtol=1e-4)


def test_only_chunks_in_the_slow_tier_are_computed(tmp_path: Path) -> None:
    with filed(tmp_path, disk_token_s=1.0, memory=True) as made:  # every chunk in memory as well
        assert made.prefill(QUESTION, CHUNKS).reuse.computed == 8
    with filed(tmp_path, disk_token_s=1.0, memory=True) as made:  # a new engine: warm on disk alone
        made.prefill(QUESTION, CHUNKS[:2], ratio=0.0)
        made.flush()  # the first two were copied up
        reuse = made.prefill(QUESTION, CHUNKS).reuse
        assert (reuse.exact, reuse.computed, reuse.missed_chunks) == (41, 8 + 80, 0)
        assert "2 of 4 chunks" in reuse.decision[0]


def test_r_star_is_used_without_a_profile_and_the_report_says_so(tmp_path: Path) -> None:
    for directory in (tmp_path, None):
        with engine(directory, memory=True) as made:
            made.warm(CHUNKS)
            reuse = made.prefill(QUESTION, CHUNKS).reuse
        assert (reuse.ratio, reuse.decision) == (0.15, ())
        (note,) = reuse.notes
        assert "ratio 0.15" in note and ("ragkv profile" in note or "no store directory" in note)


def test_a_profile_of_another_machine_is_not_used_and_the_note_says_what_differs(tmp_path: Path) -> None:
    with engine(tmp_path) as made:
        theirs = hand_made(made, 0.004)
        theirs = dataclasses.replace(theirs, subject=dataclasses.replace(theirs.subject, cpu="Abacus", threads=77))
        save(theirs, tmp_path)
        with pytest.raises(ProfileError, match="threads is 77"):
            profiling.save(made, theirs)
    with engine(tmp_path) as made:
        made.warm(CHUNKS)
        reuse = made.prefill(QUESTION, CHUNKS).reuse
    assert reuse.ratio == 0.15
    assert "cpu is 'Abacus'" in reuse.notes[0] and "threads is 77" in reuse.notes[0]


def test_a_damaged_profile_never_fails_a_request(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text("{")
    with engine(tmp_path) as made:
        made.warm(CHUNKS)
        assert "cannot be read" in made.prefill(QUESTION, CHUNKS).reuse.notes[0]


def test_a_tier_that_was_not_measured_never_fails_a_request(tmp_path: Path) -> None:
    with engine(tmp_path) as made:
        made.warm(CHUNKS)
        profiling.save(made, dataclasses.replace(hand_made(made, 0.004), tiers={"memory": TierSpeed(0.0, 0.0)}))
        reuse = made.prefill(QUESTION, CHUNKS).reuse
    assert (reuse.ratio, reuse.decision) == (0.15, ())
    assert "no tier 'disk'" in reuse.notes[0]


def gate_result(agreement: float) -> GateResult:
    point = Point("first-k", 0.3, 0.0, 0.0, agreement, agreement, 3.0, 0.1, 0.3, 9)
    return GateResult(Tolerance(), (point,), (point,), "consecutive chunks", "a machine")


def test_r_star_is_the_gate_results_ratio(tmp_path: Path) -> None:
    with filed(tmp_path, disk_token_s=1e-6) as made:
        made.intake.apply_gate_result(gate_result(agreement=1.0))
        assert made.prefill(QUESTION, CHUNKS).reuse.ratio == 0.3
        assert made.prefill(QUESTION, CHUNKS, ratio=None).reuse.ratio == 0.3


def test_a_gate_result_that_refuses_fusion_leads_to_full_prefills(tmp_path: Path) -> None:
    with filed(tmp_path, disk_token_s=0.004) as made:
        made.intake.apply_gate_result(gate_result(agreement=0.5))
        reuse = made.prefill(QUESTION, CHUNKS).reuse
    assert (reuse.computed, reuse.decision) == (S, ())


@pytest.mark.parametrize("reuse", ["prefix", "none"])
def test_full_recompute_and_exact_prefix_need_no_decision(tmp_path: Path, reuse: Any) -> None:
    with filed(tmp_path, disk_token_s=0.004) as made:
        report = made.prefill(QUESTION, CHUNKS, reuse=reuse).reuse
    assert (report.decision, report.notes) == ((), ())


@pytest.mark.parametrize(
    ("selector", "ratio"),
    [("first-k", 7 / 15), ("hkvd", 7 / 15), ("hkvd-gradual", 7 / 15), ("none", 0.15), ("all", 0.15)],
)
def test_the_controller_decides_for_every_kind_of_selector(tmp_path: Path, selector: str, ratio: float) -> None:
    with filed(tmp_path, disk_token_s=0.004, selector=selector) as made:
        assert made.prefill(QUESTION, CHUNKS).reuse.ratio == pytest.approx(ratio)


def test_a_selector_that_runs_the_question_first_stays_at_r_star(tmp_path: Path) -> None:
    with filed(tmp_path, disk_token_s=0.004, selector="attention") as made:
        reuse = made.prefill(QUESTION, CHUNKS).reuse
    assert reuse.ratio == 0.15
    assert "after everything is loaded" in reuse.decision[0]


def test_a_damaged_entry_leads_to_a_new_decision(tmp_path: Path) -> None:
    with filed(tmp_path, disk_token_s=0.004) as made:
        newest = max(tmp_path.glob("entries/*/*"), key=lambda path: path.stat().st_mtime_ns)
        data = bytearray(newest.read_bytes())
        data[len(data) // 2 - 2048] ^= 0xFF
        newest.write_bytes(data)
        reuse = made.prefill(QUESTION, CHUNKS).reuse
    assert reuse.missed_chunks == 1
    assert reuse.ratio == 0.15  # 120 x 4 ms = 48 x 10 ms: computing the missed chunk hides the other loads
    assert len(reuse.decision) == 2


def test_the_setting_may_leave_the_ratio_to_the_controller(tmp_path: Path) -> None:
    toml = tmp_path / "ragkv.toml"
    toml.write_text('[fusion]\nratio = "none"\n[controller.prices]\ndisk_usd_per_gb_month = 1.5\n')
    config = EngineConfig.gather(toml, {})
    assert (config.fusion.ratio, config.controller.prices.disk_usd_per_gb_month) == (None, 1.5)
    assert EngineConfig.gather(None, {"RAGKV_FUSION__RATIO": "none"}).fusion.ratio is None
    assert EngineConfig.from_dict({"fusion": {"ratio": None}}).fusion.ratio is None
    with pytest.raises(ConfigError):
        EngineConfig.from_dict({"fusion": {"ratio": "some"}})
