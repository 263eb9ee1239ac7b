"""`ragkv profile`."""

import json
from pathlib import Path

from .conftest import Run


def test_profile_prints_and_saves_the_measurements_and_prints_them_as_json(
    run: Run, tmp_path: Path
) -> None:
    done = run("profile", "--quick")
    assert done.code == 0, done.err
    for word in ("prefill", "a layer that recomputes", "us a slice"):
        assert word in done.out
    assert "memory: no longer for more bytes" in done.out  # slices in memory are used in place
    (saved,) = json.loads((tmp_path / "home/kv/profile.json").read_text()).values()
    assert saved["layers"] == 4
    measured = run("profile", "--quick", "--json").json
    assert measured["tiers"]["disk"]["points"]
    assert measured["file"].endswith("profile.json")
