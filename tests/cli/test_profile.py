"""`ragkv profile` and `ragkv explain`."""

import json
from pathlib import Path

import pytest

from ragkv.cli.explain import recommended

from .conftest import Run


def test_profile_prints_and_saves_the_measurements(run: Run, tmp_path: Path) -> None:
    done = run("profile", "--quick")
    assert done.code == 0, done.err
    for word in ("prefill", "decode step", "a layer of recompute", "us a slice"):
        assert word in done.out
    assert "memory: no longer for more bytes" in done.out  # slices in memory are used in place
    (saved,) = json.loads((tmp_path / "home/kv/profile.json").read_text()).values()
    assert saved["layers"] == 4


def test_profile_as_json_prints_one_document(run: Run) -> None:
    measured = run("profile", "--quick", "--json").json
    assert measured["tiers"]["disk"]["points"]
    assert measured["file"].endswith("profile.json")


def test_explain_of_a_question_shows_estimates_and_measured_times(run: Run, documents: Path) -> None:
    run("ingest", documents)
    before = run("explain", "Who founded Marl?")
    assert before.code == 0, before.err
    assert "no profile" in before.err.lower()
    run("profile", "--quick")
    after = run("explain", "Who founded Marl?")
    assert after.code == 0, after.err
    assert after.out.startswith("fusing is ") and "kcache" not in after.out
    # Which of the two is faster for so short a prompt depends on the machine.
    for words in ("fused", "full prefill", "first token", "measured"):
        assert words in after.out, after.out
    found = run("explain", "Who founded Marl?", "--json").json
    assert 0 < found["ratio"] <= 1
    times = found["times_s"]
    assert all(estimate >= 0 for estimate, _ in times.values())
    assert times["first token"][1] > 0


def test_explain_advises_on_kcache_if_the_settings_have_it(run: Run, documents: Path, tmp_path: Path) -> None:
    assert "ingest" in run("explain", "Who founded Marl?").err
    run("ingest", documents)
    run("profile", "--quick")
    settings = tmp_path / "kcache.toml"
    settings.write_text("[kcache]\ntop_n = 8\n")
    said = run("explain", "Who founded Marl?", "--config", settings)
    assert said.code == 0, said.err
    assert "kcache: " in said.out  # the sentence depends on the measurements


def test_profile_notes_a_bad_fit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragkv.cli.profile.BAD_FIT", -1.0)
    assert "when it is idle" in run("profile", "--quick").err
    monkeypatch.setattr("ragkv.cli.profile.BAD_FIT", 1e9)
    assert "when it is idle" not in run("profile", "--quick").err


@pytest.mark.parametrize(("fused_s", "full_s", "reuse"), [(0.1, 0.2, "fused"), (0.2, 0.1, "none"), (0.1, 0.1, "none")])
def test_fusing_is_recommended_only_if_its_first_token_is_estimated_to_be_earlier(
    fused_s: float, full_s: float, reuse: str
) -> None:
    assert recommended(fused_s, full_s) == reuse


def test_explain_recommends_what_its_own_table_shows_to_be_faster(run: Run, documents: Path) -> None:
    run("ingest", documents)
    run("profile", "--quick")
    found = run("explain", "Who founded Marl?", "--json").json
    estimates = {name: estimate for name, (estimate, _) in found["times_s"].items()}
    assert found["recommended"] == recommended(estimates["first token"], estimates["first token, full prefill"])
    assert ("--reuse none" in found["decision"][0]) == (found["recommended"] == "none")
