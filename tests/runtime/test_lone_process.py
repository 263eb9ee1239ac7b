"""A process for what strangers wrote: it is bounded, it is ended, and it tells why."""

import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import active_children

import pytest

from ragkv.errors import CancelledError, MissingExtraError
from ragkv.runtime.lone_process import Bounds, LoneProcess, LoneProcessError, NotStartedError
from tests.faults import raising

from . import lone_work

BOUNDS = Bounds(wall_s=60.0, memory_bytes=256 << 20, cpu_s=20)


@pytest.fixture
def process() -> Iterator[LoneProcess]:
    with LoneProcess("ragkv-test") as process:
        yield process


def alive() -> int:
    return sum(child.name == "ragkv-test" for child in active_children())


def test_one_process_does_all_work_until_it_is_closed(process: LoneProcess) -> None:
    assert alive() == 0
    assert process.run(BOUNDS, lone_work.own_id) == process.run(BOUNDS, lone_work.own_id)
    assert alive() == 1
    process.close()
    process.close()
    assert alive() == 0


def test_it_may_write_nothing_begin_nothing_and_knows_no_environment(process: LoneProcess) -> None:
    assert process.run(BOUNDS, lone_work.rights) == (0, 0, 1, True)


@pytest.mark.parametrize(
    ("bounds", "work", "bound"),
    [
        (Bounds(1.0, 256 << 20), lone_work.endless, "wall_s"),
        (Bounds(60.0, 256 << 20, cpu_s=1), lone_work.endless, "cpu_s"),
        (BOUNDS, lone_work.large, "memory_bytes"),
        (BOUNDS, lone_work.panicking, "memory_bytes"),
        (BOUNDS, lone_work.dying, None),
    ],
)
def test_work_above_a_bound_ends_its_process_and_the_next_work_gets_another(
    bounds: Bounds, work: Callable[..., object], bound: str | None
) -> None:
    with LoneProcess("ragkv-test") as process:
        first = process.run(BOUNDS, lone_work.own_id)
        with pytest.raises(LoneProcessError) as raised:
            process.run(bounds, work)
        assert raised.value.bound == bound
        assert process.run(BOUNDS, lone_work.own_id) != first


def test_our_errors_come_whole_and_others_by_their_names(process: LoneProcess) -> None:
    first = process.run(BOUNDS, lone_work.own_id)
    with pytest.raises(MissingExtraError, match="pip install"):
        process.run(BOUNDS, lone_work.refused)
    assert process.run(BOUNDS, lone_work.own_id) == first
    with pytest.raises(LoneProcessError) as raised:
        process.run(BOUNDS, lone_work.failing, "a secret")
    assert (raised.value.reason, raised.value.bound) == ("ValueError", None)


def test_what_check_raises_ends_the_process_and_leaves_no_words(
    process: LoneProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    for wait_s in (0.0, 0.05, 0.1, 0.3):
        ends = time.monotonic() + wait_s

        def check(ends: float = ends) -> None:
            if time.monotonic() > ends:
                raise CancelledError("The client left.")

        with pytest.raises(CancelledError):
            process.run(BOUNDS, lone_work.endless, bytes(1 << 20), check=check)
        assert alive() == 0
    assert capfd.readouterr().err == ""
    assert not [one for one in threading.enumerate() if one.name.startswith("ragkv-test")]


def test_a_system_that_starts_no_process_is_told_from_work_that_fails(
    process: LoneProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = raising(BlockingIOError("Resource temporarily unavailable"))
    with monkeypatch.context() as full:
        full.setattr("multiprocessing.forkserver.connect_to_new_process", refused)
        with pytest.raises(NotStartedError, match="temporarily unavailable"):
            process.run(BOUNDS, lone_work.own_id)
    assert process.run(BOUNDS, lone_work.own_id)
