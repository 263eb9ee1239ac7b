"""The file that says where a home's server listens: only a living server of this machine is found
by it.
"""

import dataclasses
import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ragkv.runtime import server_file
from ragkv.runtime.server_file import ServerAddress, announced, load


def address(**changed: Any) -> ServerAddress:
    return dataclasses.replace(
        ServerAddress.of_this_process("127.0.0.1", 8000, "reader", "swift-otter"), **changed
    )


def test_the_address_is_found_while_the_server_runs_and_is_its_owners_alone(tmp_path: Path) -> None:
    home = tmp_path / "new" / "home"
    with announced(home, address()):
        assert load(home) == address()
        assert stat.S_IMODE((home / server_file.NAME).stat().st_mode) == 0o600
    assert load(home) is None and not (home / server_file.NAME).exists()


def test_a_server_that_ends_keeps_the_address_of_the_one_that_followed_it(tmp_path: Path) -> None:
    with announced(tmp_path, address()):
        (tmp_path / server_file.NAME).write_text(
            json.dumps(dataclasses.asdict(address(replica="calm-heron")))
        )
    assert load(tmp_path) == address(replica="calm-heron")


def test_the_address_of_a_dead_process_is_not_found(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with announced(tmp_path, address(pid=ended.pid)):
        assert load(tmp_path) is None


@pytest.mark.parametrize(
    "changed", [{"machine": "elsewhere"}, {"host": "192.0.2.1"}, {"pid": -1}, {"port": "80"}]
)
def test_an_address_that_is_not_of_this_machine_is_not_found(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    with announced(tmp_path, address(**changed)):
        assert load(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"host": "127.0.0.1"}', '{"more": 1}'])
def test_a_damaged_file_is_no_address(tmp_path: Path, text: str) -> None:
    (tmp_path / server_file.NAME).write_text(text)
    assert load(tmp_path) is None


def test_the_url_of_an_ipv6_address_has_brackets() -> None:
    assert (address().url, address(host="::1").url) == (
        "http://127.0.0.1:8000",
        "http://[::1]:8000",
    )
