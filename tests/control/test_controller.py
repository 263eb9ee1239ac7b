"""With `ratio=None` a saved profile decides the ratio and the loads. Without one r* is used, and
the report says so.
"""

import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.config import ControllerConfig, SessionConfig
from ragkv.control import decision
from ragkv.control.gate_result import GateResult, Point, Tolerance
from ragkv.control.profile import LengthFit, Profile, RecomputeFit, TierSpeed, save
from ragkv.control.profile_in_use import FORGET_S, OUTCOMES
from ragkv.control.reasons import Why
from ragkv.errors import ProfileError
from ragkv.fusion import PassResult, Plan, Recompute
from ragkv.fusion.selectors import Attention
from ragkv.store.policies import Policy
from tests import reference, tiny_models
from tests.fixed import fixed

CHUNKS = [tiny_models.tokens(40, seed) for seed in range(4)]
QUESTION = tiny_models.tokens(8, seed=9)
S = 1 + 160 + 8  # of which 120 are candidates: the first chunk is exact


def engine(
    directory: Path | None, *, memory: bool = False, measure: bool = False, **fusion: Any
) -> Engine:
    """A tiny engine whose chunks are on disk only, or also in memory; it measures nothing by
    itself.
    """
    store = StoreConfig(
        directory=str(directory) if directory else None, memory_bytes=1 << 30 if memory else 0
    )
    settings = fixed(**{"selector": "first-k", "ratio": None, **fusion})
    return Engine(
        tiny_models.model("llama"),
        config=EngineConfig(store=store, fusion=settings, controller=ControllerConfig(measure)),
    )


def hand_made(made: Engine, disk_token_s: float) -> Profile:
    """A profile: a row takes 10 ms in each layer, a token from disk takes `disk_token_s`, nothing
    else takes time.
    """
    token_bytes = made.stats().kv_bytes_per_token
    return Profile(
        subject=made.parts.profiler.in_use.subject,
        layers=4,
        kv_bytes_per_token=token_bytes,
        stored_bytes_per_token=float(token_bytes),
        prefill=LengthFit(0.0, 0.03, 0.0),
        recompute=RecomputeFit(0.0, 0.0, 0.01, 0.0),
        place_token_layer_s=0.0,
        start_s=0.0,
        tiers={
            "memory": TierSpeed(0.0, 0.0),
            "disk": TierSpeed(0.0, disk_token_s / (token_bytes / 4)),
        },
    )


def filed(directory: Path, disk_token_s: float, **how: Any) -> Engine:
    """An engine with warm chunks and a hand-made profile saved in its store directory."""
    with engine(directory, **how) as first:
        save(hand_made(first, disk_token_s), directory)
    made = engine(directory, **how)
    made.entries.encode(CHUNKS)
    return made


def test_the_ratio_is_where_recompute_hides_loading(tmp_path: Path) -> None:
    # a layer: 160 x 4 ms = 640 ms = (8 + r 120) x 10 ms: r = 7/15
    with filed(tmp_path, disk_token_s=0.004) as made:
        prefill = made.prefill(QUESTION, CHUNKS)
        assert made.prefill(QUESTION, CHUNKS).reuse.ratio == prefill.reuse.ratio
    reuse = prefill.reuse
    assert reuse.ratio == 0.45  # the step below
    assert (reuse.exact, reuse.fused, reuse.recomputed, reuse.computed) == (41, 66, 54, 8)
    assert "45%" in reuse.decision[0]


@pytest.mark.parametrize("floor", [0, 100])
def test_a_time_is_expected_of_the_ratio_that_is_computed(tmp_path: Path, floor: int) -> None:
    with filed(tmp_path, disk_token_s=0.004, floor_tokens=floor) as made:
        reuse = made.prefill(QUESTION, CHUNKS).reuse
    assert reuse.recomputed == max(54, floor)
    assert any(why.startswith("expected") for why in reuse.decision) == (not floor)


def test_tokens_are_recomputed_early_while_the_question_waits_to_ask(tmp_path: Path) -> None:
    """A layer loads in .48 s. The question's rows take .08 s in each of two layers."""
    asking = Attention((0.0, 0.5))
    with filed(tmp_path, disk_token_s=0.003) as made:
        reuse = made.prefill(QUESTION, CHUNKS, selector=asking).reuse
    assert (reuse.ratio, reuse.recomputed) == (0.15, 18 + 6)
    assert any(why.startswith("6 more tokens are recomputed") for why in reuse.decision)


def test_a_ratio_given_in_the_call_is_used_as_it_is_and_reuse_without_a_ratio_needs_no_decision(
    tmp_path: Path,
) -> None:
    with filed(tmp_path, disk_token_s=0.004) as made:
        reuse = made.prefill(QUESTION, CHUNKS, ratio=0.25).reuse
        assert (reuse.ratio, reuse.decision) == (0.25, ())
        for how in ("prefix", "none"):
            assert made.prefill(QUESTION, CHUNKS, reuse=how).reuse.decision == ()
    with filed(tmp_path, disk_token_s=0.004, ratio=0.3) as made:
        assert made.prefill(QUESTION, CHUNKS).reuse.ratio == 0.3
        assert made.prefill(QUESTION, CHUNKS, ratio=None).reuse.ratio == 0.45


def test_the_report_says_whether_loading_is_slow_or_fusing_does_not_pay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = tiny_models.tokens(8, seed=99)  # first, so that no chunk is exact

    def whys(made: Engine) -> set[str | None]:
        spans = made.prefill(QUESTION, [unknown, *CHUNKS]).spans
        return {span.why for span in spans if span.kind == "chunk" and span.chunk}

    with filed(tmp_path / "slow", disk_token_s=1.0) as made:
        assert whys(made) == {Why.SLOWER}
    monkeypatch.setattr(decision, "pays", lambda *_: False)
    with filed(tmp_path / "no gain", disk_token_s=0.004) as made:
        assert whys(made) == {Why.NO_GAIN}


def test_slow_chunks_are_computed_without_counting_as_misses_or_being_stored_again(
    tmp_path: Path,
) -> None:
    with filed(tmp_path, disk_token_s=1.0) as made:
        before = {path: path.stat().st_ino for path in tmp_path.glob("entries/*/*")}
        prefill = made.prefill(QUESTION, CHUNKS)
        made.flush()
        assert {path: path.stat().st_ino for path in tmp_path.glob("entries/*/*")} == before
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


def test_r_star_is_used_without_a_readable_profile_and_the_report_says_so(tmp_path: Path) -> None:
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "profile.json").write_text("{")
    whys = {
        tmp_path: "ragkv profile",
        None: "No profile",
        tmp_path / "damaged": "No profile",  # it is moved aside, and said in the log
    }
    for directory, why in whys.items():
        with engine(directory, memory=True) as made:
            made.entries.encode(CHUNKS)
            reuse = made.prefill(QUESTION, CHUNKS).reuse
        assert (reuse.ratio, reuse.notes) == (0.15, ())
        (said,) = reuse.decision
        assert "ratio 15%" in said and why in said


@pytest.mark.parametrize(("question", "whole"), [(8, False), (150, True)])
def test_without_a_profile_a_prompt_is_computed_whole_if_reuse_would_compute_most_of_it(
    monkeypatch: pytest.MonkeyPatch, question: int, whole: bool
) -> None:
    monkeypatch.setattr("ragkv.control.controller.MOST_ROWS", 0.5)
    with engine(None, memory=True) as made:
        made.entries.encode(CHUNKS[:2])
        asked = tiny_models.tokens(question, seed=9)
        reuse = made.prefill(asked, CHUNKS[:2]).reuse
        named = made.prefill(asked, CHUNKS[:2], ratio=0.15).reuse
    assert (reuse.fused == 0) == whole and named.fused > 0
    assert ("all is computed" in reuse.decision[0]) == whole


def test_a_profile_of_another_machine_is_not_used_and_the_note_says_what_differs(
    tmp_path: Path,
) -> None:
    with engine(tmp_path) as made:
        theirs = hand_made(made, 0.004)
        theirs = dataclasses.replace(
            theirs, subject=dataclasses.replace(theirs.subject, cpu="Abacus", threads=77)
        )
        save(theirs, tmp_path)
        with pytest.raises(ProfileError, match="threads is 77"):
            made.parts.profiler.use(theirs)
    with engine(tmp_path) as made:
        made.entries.encode(CHUNKS)
        reuse = made.prefill(QUESTION, CHUNKS).reuse
    assert reuse.ratio == 0.15
    assert "cpu is 'Abacus'" in reuse.decision[0] and "threads is 77" in reuse.decision[0]


def test_a_tier_that_was_not_measured_never_fails_a_request(tmp_path: Path) -> None:
    with engine(tmp_path) as made:
        made.entries.encode(CHUNKS)
        only_memory = dataclasses.replace(
            hand_made(made, 0.004), tiers={"memory": TierSpeed(0.0, 0.0)}
        )
        made.parts.profiler.use(only_memory)
        reuse = made.prefill(QUESTION, CHUNKS).reuse
    assert reuse.ratio == 0.15
    assert "no tier 'disk'" in reuse.decision[0]


@pytest.mark.parametrize(
    ("computing", "reading", "whole"),
    [(0.85, 3.36, 1.0), (1.2, 1.0, 1.0), (1.0, 0.5, 1.0), (1.0, 12.0, 0.5)],
)
def test_what_requests_took_leads_to_the_quickest_choice_also_if_some_chunks_are_computed_and_others_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, computing: float, reading: float, whole: float
) -> None:
    """Computing and reading take so many times what the profile says; a row of a pass that loads
    nothing `whole`.
    """
    # in a layer
    row_s = computing * 0.01
    token_s = reading * 0.004

    def compute_s(rows: int, tokens: int) -> float:
        return 3 * rows * row_s * (1.0 if tokens else whole)

    def first_token_s(computed: int, ratio: float) -> float:
        tokens = 160 - computed
        fused = min(120, 160 - computed)
        return token_s * tokens + max(
            3 * token_s * tokens, compute_s(8 + computed + round(ratio * fused), tokens)
        )

    with filed(tmp_path, disk_token_s=0.004) as made:
        control = made.parts.controller
        token_bytes = made.stats().kv_bytes_per_token
        made.parts.profiler.use(
            dataclasses.replace(control.in_use.profile, prefill=LengthFit(0.0, 0.03 * whole, 0.0))
        )
        learn_from = control.learn_from

        def took(plan: Plan, recompute: Recompute, passed: PassResult) -> None:
            rows = plan.computed.numel() + passed.selected_by_layer[0].numel()
            tokens = passed.bytes_by_tier.get("disk", 0) // token_bytes
            times = dict(
                pass_s=7 + compute_s(rows, tokens),
                load_s=3.0,
                others_s=4.0,
                read_s=4 * tokens * token_s,
            )
            learn_from(plan, recompute, dataclasses.replace(passed, **times))
            joint = {**times, "prompts": 2, "pass_s": 99.0}
            learn_from(plan, recompute, dataclasses.replace(passed, **joint))

        monkeypatch.setattr(control, "learn_from", took)
        for _ in range(2 * OUTCOMES):
            made.prefill(QUESTION, CHUNKS)
        reuse = made.prefill(QUESTION, CHUNKS).reuse
        for _ in range(OUTCOMES):  # these read the first chunk alone
            made.prefill(QUESTION, CHUNKS, ratio=1.0)
        assert made.prefill(QUESTION, CHUNKS).reuse.decision[:-1] == reuse.decision[:-1]
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + FORGET_S)
        monkeypatch.setattr("ragkv.control.profile_in_use.time", later)
        forgotten = made.prefill(QUESTION, CHUNKS).reuse.decision[-2]
    assert ("corrected" in forgotten) == (computing != 1.0), (
        "computing is seen in each pass, so it is not forgotten"
    )
    assert not ("corrected" in forgotten and "disk" in forgotten)
    assert ("by compute" in reuse.decision[-2]) == (computing != 1.0)
    assert reuse.decision[-1].startswith("expected")
    assert first_token_s(reuse.computed - 8, reuse.ratio) <= 1.1 * min(
        first_token_s(40 * n, 0.15) for n in range(5)
    )


@pytest.mark.parametrize(
    ("target_ms", "blocks", "warned"), [(1000.0, 2, False), (399.0, 0, True), (None, 3, False)]
)
def test_the_policies_threshold_is_what_the_profile_computes_within_the_target(
    tmp_path: Path,
    target_ms: float | None,
    blocks: int,
    warned: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A token takes 25 ms, so 1,000 ms are 40 tokens: two blocks of 16."""
    given = dict(xi_tokens=48) if target_ms is None else dict(ttft_target_ms=target_ms)
    store = StoreConfig(directory=str(tmp_path), policy="t-lru", **given)
    # what keeps conversations is told: the store, or one of their own
    for own in (None, str(tmp_path / "own")):
        settings = EngineConfig(
            store, session=SessionConfig(16, directory=own), controller=ControllerConfig(False)
        )
        with Engine(tiny_models.model("llama"), config=settings) as made:
            quick = dataclasses.replace(hand_made(made, 0.004), prefill=LengthFit(0.0, 0.025, 0.0))
            made.parts.profiler.use(quick)
            told: list[Policy] = []
            for tier in made.sessions.blocks.writer.store.tiers:
                told.append(tier.ledger.informed_policy())
            assert {policy.settings.xi_blocks for policy in told} == {blocks}
    assert ("no block of 16 tokens" in caplog.text) == warned


def test_entries_stay_on_disk_where_its_loading_is_hidden_and_in_memory_elsewhere(
    tmp_path: Path,
) -> None:
    for disk_token_s, in_memory in ((1e-4, 0), (0.005, 4)):
        with filed(tmp_path / str(in_memory), disk_token_s=disk_token_s, memory=True) as made:
            for _ in range(2):  # after the first, what belongs in memory is copied there
                made.prefill(QUESTION, CHUNKS)
                made.parts.store.flush()
            memory, disk = made.stats().store.tiers
            assert (memory.entries, disk.entries >= 4) == (in_memory, True)
    settings = EngineConfig(
        store=StoreConfig(directory=str(tmp_path / "0")),
        controller=ControllerConfig(limit_memory=False),
    )
    with Engine(tiny_models.model("llama"), config=settings) as everywhere:
        everywhere.entries.encode(tiny_models.tokens(40, 99) for _ in range(1))
        assert everywhere.stats().store.tiers[0].entries > 0


def gate_result(agreement: float) -> GateResult:
    point = Point("first-k", 0.3, 0.0, 0.0, agreement, agreement, 3.0, 0.1, 0.3, 9)
    return GateResult(Tolerance(), (point,), (point,), "consecutive chunks", "a machine")


def test_a_new_profile_is_not_corrected_by_what_was_measured_against_the_old_one(
    tmp_path: Path,
) -> None:
    with filed(tmp_path, disk_token_s=0.004) as made:
        in_use = made.parts.controller.in_use
        before = made.prefill(QUESTION, CHUNKS).reuse.ratio
        for _ in range(OUTCOMES):
            in_use.note_outcome("disk", 100.0, 1.0)
        assert "corrected" in " ".join(made.prefill(QUESTION, CHUNKS).reuse.decision)
        made.parts.profiler.use(in_use.profile)
        again = made.prefill(QUESTION, CHUNKS).reuse
    assert "corrected" not in " ".join(again.decision)
    assert again.ratio == before


def test_r_star_is_the_gate_results_ratio(tmp_path: Path) -> None:
    with filed(tmp_path, disk_token_s=1e-6) as made:
        made.parts.controller.methods.gate_result = gate_result(agreement=1.0)
        assert made.prefill(QUESTION, CHUNKS).reuse.ratio == 0.3


def test_a_gate_result_that_refuses_fusion_leads_to_full_prefills(tmp_path: Path) -> None:
    with filed(tmp_path, disk_token_s=0.004) as made:
        made.parts.controller.methods.gate_result = gate_result(agreement=0.5)
        reuse = made.prefill(QUESTION, CHUNKS).reuse
    assert (reuse.computed, reuse.decision) == (S, ())


@pytest.mark.parametrize(
    ("selector", "ratio"),
    [
        ("first-k", 0.45),
        ("hkvd", 0.2),
        ("hkvd-gradual", 0.2),
        ("attention", 0.15),
    ],
)
def test_the_controller_decides_for_every_kind_of_selector(
    tmp_path: Path, selector: str, ratio: float
) -> None:
    with filed(tmp_path, disk_token_s=0.004, selector=selector) as made:
        reuse = made.prefill(QUESTION, CHUNKS).reuse
    assert reuse.ratio == ratio
    assert ("1 of 4 chunks" in " ".join(reuse.decision)) == (selector == "attention")


def test_a_damaged_entry_leads_to_a_new_decision(tmp_path: Path) -> None:
    with filed(tmp_path, disk_token_s=0.004) as made:
        key = made.entries.encoder.identity.key(CHUNKS[-1])
        (file,) = tmp_path.glob(f"entries/*/{key.to_text()}.*")
        data = bytearray(file.read_bytes())
        data[len(data) // 2 - 2048] ^= 0xFF
        file.write_bytes(data)
        reuse = made.prefill(QUESTION, CHUNKS).reuse
    assert reuse.missed_chunks == 1
    # 120 x 4 ms = 48 x 10 ms: computing the missed chunk hides the other loads
    assert reuse.ratio == 0.15
    assert len(reuse.decision) == 2
