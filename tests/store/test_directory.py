"""A store directory has one writer; who else wants to write is told which process that is,
quickly.
"""

import multiprocessing
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from ragkv.errors import StoreLockedError
from ragkv.store.writer_lock import acquire, check_unlocked


def hold(root: Path, pipe: Any) -> None:
    sys.argv = ["/usr/bin/ragkv", "serve", "--secret", "hidden"]
    lock = acquire(root)
    pipe.send("held")
    pipe.recv()
    lock.release()


def test_the_holder_is_named_by_pid_command_and_start_and_without_its_other_arguments(
    tmp_path: Path,
) -> None:
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=hold, args=(tmp_path, there))
    child.start()
    assert here.poll(120)
    with pytest.raises(StoreLockedError) as caught:
        check_unlocked(tmp_path)
    assert re.search(
        rf"\(pid {child.pid} on .+, ragkv serve, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\)",
        str(caught.value),
    )
    assert "hidden" not in (tmp_path / "writer.txt").read_text()
    here.send("end")
    child.join()
    check_unlocked(tmp_path)


def test_a_holder_that_did_not_describe_itself_is_another_process(tmp_path: Path) -> None:
    lock = acquire(tmp_path)
    (tmp_path / "writer.txt").write_bytes(b"\xff")
    with pytest.raises(StoreLockedError, match="is written by another process"):
        check_unlocked(tmp_path)
    lock.release()


def test_a_look_leaves_no_lock_and_no_directory_behind(tmp_path: Path) -> None:
    check_unlocked(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    acquire(tmp_path).release()
    check_unlocked(tmp_path)
    acquire(tmp_path).release()
