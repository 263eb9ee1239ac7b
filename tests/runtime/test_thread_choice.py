"""The number of threads follows the processors that others leave free."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from ragkv.runtime import ThreadChoice, openmp, processor
from ragkv.runtime.processor import Use, measured_use

QUOTA = processor.quota


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "PERIOD_S", 0.0)
    monkeypatch.setattr(processor, "quota", lambda: None)


@pytest.fixture
def used() -> Iterator[list[int]]:
    """The numbers of threads that are set, without setting them."""
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        found: list[int] = []
        patch.setattr(openmp, "use_threads", found.append)
        yield found
    assert torch.get_num_threads() == before


def counts(most: int, cores: int, uses: list[Use | None]) -> list[int]:
    """The number after each reading."""
    readings = iter(uses)
    choice = ThreadChoice(most, lambda: next(readings), cores)
    found = []
    for _ in uses[1:]:  # the first is of when it was made
        choice.begin()
        found.append(choice.count)
    return found


def over_time(others: list[float], own: float = 1.0) -> list[Use | None]:
    """A second between readings in which others use so many processors, and this process `own`."""
    busy = own_s = 0.0
    uses: list[Use | None] = [Use(100.0, 0.0, 0.0)]
    for place, each in enumerate(others, start=101):
        busy += each + own
        own_s += own
        uses.append(Use(float(place), busy, own_s))
    return uses


@pytest.mark.parametrize(
    ("most", "cores", "others", "wanted"),
    [
        (2, 2, [0.0, 0.3, 0.67, 1.0, 2.0, 1.0, 0.0], [2, 2, 1, 1, 1, 1, 2]),
        (4, 4, [1.3, 2.0, 4.0, 0.1], [3, 2, 1, 4]),
        (2, 8, [5.0, 7.0], [2, 1]),
    ],
)
@pytest.mark.usefixtures("used")
def test_as_many_threads_compute_as_others_leave_processors(
    most: int, cores: int, others: list[float], wanted: list[int]
) -> None:
    assert counts(most, cores, over_time(others)) == wanted


@pytest.mark.usefixtures("used")
def test_a_system_that_says_nothing_leaves_the_number_as_it_is() -> None:
    assert counts(2, 2, [None, None, *over_time([2.0])]) == [2, 2, 1]


def test_a_turn_ends_with_the_threads_own_number(used: list[int]) -> None:
    uses = iter(over_time([2.0]))
    choice = ThreadChoice(2, lambda: next(uses), 2)
    choice.begin()
    choice.end()
    assert used == [1, 2]


def test_one_thread_needs_no_reading(used: list[int]) -> None:
    choice = ThreadChoice(1, lambda: pytest.fail("it was read"), 2)
    choice.begin()
    choice.end()
    assert used == []


@pytest.mark.parametrize(("limit", "wanted"), [(None, 8), (2.0, 2), (0.5, 1), (1.5, 2), (9.0, 8)])
def test_no_more_threads_compute_than_the_quota_allows(
    limit: float | None, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "quota", lambda: limit)
    assert ThreadChoice(8, lambda: None, 8).count == wanted


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_the_quota_is_read_in_both_forms_of_control_groups(
    files: dict[str, str],
    wanted: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(processor, "CGROUP", tmp_path)
    assert QUOTA() == wanted


def test_what_linux_counts_is_read_of_the_processors_that_may_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  0 0 0 0 0 0 0 0 0 0\n"
        "cpu0 100 900 30 7000 800 4 5 6 0 0\n"
        "cpu1 1 2 3 4 5 6 7 8 9 10\n"
        "cpu10 9 9 9 9 9 9 9 9 9 9\n"
        "procs_running 3\n"
    )
    monkeypatch.setattr(processor, "STAT", stat)
    monkeypatch.setattr(processor, "processors", lambda: {0, 1})
    monkeypatch.setattr("os.sysconf", lambda _: 100)
    found = []
    for niceness in (0, 5):
        monkeypatch.setattr("os.getpriority", lambda *_, niceness=niceness: niceness)
        use = measured_use()
        assert use is not None
        found.append(use.busy_s)
    assert found == [pytest.approx(1.7), pytest.approx(1.7 + 9.02)]
    monkeypatch.setattr(processor, "STAT", tmp_path / "none")
    assert measured_use() is None


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="this system does not count")
def test_what_is_read_here_only_grows() -> None:
    uses = [measured_use() for _ in range(3)]
    for before, after in pairwise(uses):
        assert before is not None and after is not None
        assert (before.at_s, before.busy_s, before.own_s) <= (
            after.at_s,
            after.busy_s,
            after.own_s,
        )
