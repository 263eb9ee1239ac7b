"""How the error of a full disk is told from others."""

import errno
import sqlite3

import pytest

from ragkv.api.full_disk import is_disk_full


def caused_by(error: BaseException) -> RuntimeError:
    outer = RuntimeError("the work failed")
    outer.__cause__ = error
    return outer


def full_index() -> sqlite3.Error:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "no space"), True),
        (caused_by(OSError(errno.EDQUOT, "no share")), True),
        (caused_by(caused_by(full_index())), True),
        (caused_by(OSError(errno.EACCES, "not allowed")), False),
        (None, False),
    ],
)
def test_a_full_disk_is_found_behind_other_errors(error: BaseException | None, full: bool) -> None:
    assert is_disk_full(error) is full


def test_errors_that_are_the_causes_of_each_other_end() -> None:
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__context__ = other
    other.__context__ = one
    assert not is_disk_full(one)
    itself = ConnectionError("itself")
    itself.__cause__ = itself
    assert not is_disk_full(itself)
