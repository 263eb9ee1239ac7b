"""`ragkv profile` and `ragkv explain`."""

import importlib.util
import json
from pathlib import Path

import pytest

from .conftest import Run


def test_profile_measures_shows_draws_and_files(run: Run, tmp_path: Path) -> None:
    done = run("profile", "--quick")
    assert done.code == 0, done.err
    for word in ("prefill", "decode step", "a layer of recompute", "a slice from disk", "a slice from memory"):
        assert word in done.out
    (filed,) = json.loads((tmp_path / "home/kv/profile.json").read_text()).values()
    assert filed["layers"] == 4
    assert (tmp_path / "home/kv/profile.png").is_file() == (importlib.util.find_spec("matplotlib") is not None)


def test_profile_as_json_is_one_document(run: Run) -> None:
    measured = run("profile", "--quick", "--json").json
    assert measured["tiers"]["disk"]["points"]
    assert measured["file"].endswith("profile.json")


def test_without_matplotlib_no_plot_is_drawn_and_it_is_said(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    done = run("profile", "--quick")
    assert done.code == 0, done.err
    assert "matplotlib" in done.err
    assert not (tmp_path / "home/kv/profile.png").exists()


def test_explain_describes_a_request_from_the_filed_profile(run: Run) -> None:
    refused = run("explain", "--chunks", "4", "--tokens", "64")
    assert refused.code == 1
    assert "ragkv profile" in refused.err
    run("profile", "--quick")
    for tier in ("disk", "memory"):
        described = run("explain", "--chunks", "4", "--tokens", "64", "--tier", tier, "--selector", "first-k")
        assert described.code == 0, described.err
        assert "tier" in described.out and "first token" in described.out and "a month" in described.out
    found = run("explain", "--chunks", "4", "--tokens", "64", "--json").json
    assert 0.15 <= found["ratio"] <= 1
    assert found["tier"] in ("disk", "memory")
    assert len(found["decision"]) >= 2


def test_explain_of_an_unmeasured_tier_is_refused(run: Run) -> None:
    run("profile", "--quick")
    refused = run("explain", "--chunks", "4", "--tier", "tape")
    assert refused.code == 1
    assert "tape" in refused.err


def test_explain_of_a_question_shows_estimates_beside_times(run: Run, documents: Path) -> None:
    run("ingest", documents)
    before = run("explain", "Who founded Marl?")
    assert before.code == 0, before.err
    assert "no profile" in before.err.lower()
    run("profile", "--quick")
    after = run("explain", "Who founded Marl?")
    assert after.code == 0, after.err
    assert "ratio" in after.out and "first token" in after.out and "measured" in after.out
    times = run("explain", "Who founded Marl?", "--json").json["times_s"]
    assert all(estimate >= 0 for estimate, _ in times.values())
    assert times["first token"][1] > 0


def test_explain_needs_a_question_or_a_description(run: Run) -> None:
    assert "--chunks" in run("explain").err
    assert run("explain", "Who?", "--chunks", "3").code == 1
    assert "ingest" in run("explain", "Who?").err


def test_explain_says_whether_kcache_pays_where_the_settings_have_it(run: Run, tmp_path: Path) -> None:
    run("profile", "--quick")
    settings = tmp_path / "kcache.toml"
    settings.write_text("[kcache]\ntop_n = 8\n")
    said = run("explain", "--chunks", "4", "--tokens", "64", "--config", settings)
    assert said.code == 0, said.err
    assert "kcache: " in said.out  # which sentence depends on what was measured
    assert "kcache" not in run("explain", "--chunks", "4", "--tokens", "64").out


def test_a_fit_far_off_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragkv.cli.profile.FAR_OFF", -1.0)
    assert "when it is not" in run("profile", "--quick").err
    monkeypatch.setattr("ragkv.cli.profile.FAR_OFF", 1e9)
    assert "when it is not" not in run("profile", "--quick").err
