"""A file of ours that was damaged is moved aside with one sentence, whatever its bytes are."""

import dataclasses
import json
import logging
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from ragkv.config import EngineConfig
from ragkv.control import profile
from ragkv.errors import ConfigError, ProfileError
from ragkv.home import FILE, KEPT, KnownHome
from ragkv.runtime import read_own, server_file
from tests.control.profiles import SUBJECT
from tests.control.profiles import profile as a_profile

ODD = [None, True, 5, 10**400, -1, 1e308, "x", "\ud800", [], {}, [[]], {"a": {}}]
HOME = {
    "model": "smollm2",
    "chunk_tokens": 128,
    "embedder": None,
    "settings": {name: attrgetter(name)(EngineConfig()) for name in KEPT},
}
ADDRESS = dataclasses.asdict(server_file.ServerAddress.of_this_process("127.0.0.1", 1, "m", "r"))
PROFILES = {SUBJECT.key: dataclasses.asdict(a_profile())}


def changed(value: Any) -> Iterator[Any]:
    """A value with one part of another type, or without it."""
    yield from ODD
    if isinstance(value, dict):
        for name, part in value.items():
            yield {other: one for other, one in value.items() if other != name}
            yield from ({**value, name: odd} for odd in changed(part))


def damaged(value: Any) -> Iterator[bytes]:
    whole = json.dumps(value).encode()
    yield from (b"", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 3000, b"9" * 5000, whole[:-2])
    yield from (json.dumps(one).encode() for one in changed(value))


def test_a_home_whose_file_is_damaged_is_used_rightly_or_refused_in_one_sentence(
    tmp_path: Path,
) -> None:
    refused = 0
    for data in damaged(HOME):
        (tmp_path / FILE).write_bytes(data)
        try:
            home = KnownHome.at(tmp_path)
            home.config(EngineConfig())
            assert isinstance(home.made_with["chunk_tokens"], int)
        except ConfigError as error:
            refused += "\n" not in str(error)
    assert refused > 80


def test_the_address_of_a_server_that_is_damaged_is_no_address(tmp_path: Path) -> None:
    for data in damaged(ADDRESS):
        (tmp_path / server_file.NAME).write_bytes(data)
        if (found := server_file.load(tmp_path)) is not None:
            assert isinstance(found.url, str)


def test_profiles_that_are_damaged_are_refused_and_measured_again(tmp_path: Path) -> None:
    for data in damaged(PROFILES):
        (tmp_path / profile.FILE_NAME).write_bytes(data)
        try:
            profile.load(tmp_path, SUBJECT)
        except ProfileError as error:
            assert "ragkv profile" in str(error)
        profile.save(a_profile(), tmp_path)
        assert profile.load(tmp_path, SUBJECT) == a_profile()


def test_a_damaged_file_is_moved_aside_once_and_a_missing_one_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "own.json"
    assert read_own(file, dict) is None and not caplog.records
    file.write_text("[1", "utf-8")
    assert read_own(file, dict) is None
    assert not file.exists() and (tmp_path / "own.json.damaged").read_text("utf-8") == "[1"
    assert [one.levelno for one in caplog.records] == [logging.WARNING]
    assert read_own(file, dict) is None and len(caplog.records) == 1
