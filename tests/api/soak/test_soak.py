"""The soak in short: one replica is killed under load and replaced. `make soak` is the long form."""

from pathlib import Path

import pytest

from tests.api.whole import needs_reader

from .run import Plan, soak


@needs_reader
@pytest.mark.enable_socket
@pytest.mark.timeout(600)
def test_a_replica_that_is_killed_under_mixed_load_loses_nothing_acknowledged_and_no_answer_is_wrong(
    tmp_path: Path,
) -> None:
    plan = Plan(
        minutes=0.1, out=tmp_path, quiet_s=1.0, replace_every_s=60.0, outage_every_s=8.0, outage_s=2.0, reading_s=2.0
    )
    assert soak(plan) == [], (tmp_path / "soak.log").read_text()
