"""The Redis server that `ragkv serve --ray` starts for the replicas of one machine."""

import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from ragkv.api import ServeConfig
from ragkv.errors import ConfigError
from ragkv.integrations.ray.local_redis import PROGRAMS, LocalRedis, with_redis
from ragkv.store.remote import redis_answers
from tests.store.remote.helpers import wait_until

pytestmark = pytest.mark.enable_socket


def skip_without_a_program() -> None:
    import shutil

    if not any(map(shutil.which, PROGRAMS)):
        pytest.skip("there is neither redis-server nor valkey-server here")


@pytest.fixture
def started(tmp_path: Path) -> Iterator[LocalRedis]:
    skip_without_a_program()
    with LocalRedis(tmp_path) as server:
        yield server


def client(server: LocalRedis) -> Any:
    return redis.Redis(unix_socket_path=server.config.url.removeprefix("unix://"))


def test_it_listens_on_a_socket_that_only_its_user_can_reach_and_on_no_port(started: LocalRedis) -> None:
    socket = Path(started.config.url.removeprefix("unix://"))
    assert stat.S_IMODE(socket.stat().st_mode) == stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    with client(started) as connection:
        assert connection.config_get("port") == {"port": "0"} or connection.config_get("port") == {b"port": b"0"}
        assert int(connection.info("memory")["maxmemory"]) > 0


def test_it_starts_again_if_it_ends(started: LocalRedis) -> None:
    with client(started) as connection:
        connection.shutdown(nosave=True)
    wait_until(lambda: not redis_answers(started.config))

    def answers_again() -> bool:
        started.restart_if_ended()
        return redis_answers(started.config)

    wait_until(answers_again)


def test_what_it_holds_is_there_after_a_restart(started: LocalRedis, tmp_path: Path) -> None:
    with client(started) as connection:
        connection.set("conversation", "turns")
    started.close()
    with LocalRedis(tmp_path) as again, client(again) as connection:
        assert connection.get("conversation") == b"turns"


@pytest.mark.usefixtures("started")
def test_a_long_path_of_the_data_directory_has_its_socket_elsewhere(tmp_path: Path) -> None:
    with LocalRedis(tmp_path / ("long" * 30)) as other:
        assert redis_answers(other.config)
        assert len(other.config.url) < len(str(tmp_path)) + 120


def test_a_server_that_outlived_its_killed_parent_is_replaced(tmp_path: Path) -> None:
    skip_without_a_program()
    code = "import os, sys; from pathlib import Path; from ragkv.integrations.ray.local_redis import LocalRedis"
    code += "; LocalRedis(Path(sys.argv[1])); os._exit(1)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    pid_file = tmp_path / "redis" / "redis.pid"
    left = pid_file.read_text()
    with LocalRedis(tmp_path) as server:
        assert redis_answers(server.config) and pid_file.read_text() != left


def test_a_second_process_uses_the_server_of_the_first_and_does_not_end_it(started: LocalRedis, tmp_path: Path) -> None:
    with LocalRedis(tmp_path) as second:
        assert second.config == started.config
    assert redis_answers(started.config)


def test_without_a_program_the_error_says_what_to_install_or_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"Install redis-server or valkey-server.*set store\.redis\.url"):
        LocalRedis(tmp_path)


def test_the_settings_name_it_for_every_replica(started: LocalRedis) -> None:
    assert with_redis(ServeConfig(), started.config).engine.store.redis == started.config
