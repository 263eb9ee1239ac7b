"""Commands, the server and Python take their settings from one file."""

from pathlib import Path

import pytest

from ragkv.api.settings import ServeConfig
from ragkv.config import EngineConfig
from tests.faults import raising

from .conftest import Run

TEXT = """
home = "in-file"
[store]
codec = "int8"
[fusion]
ratio = 0.3
[serve]
port = 8123
[serve.limits]
documents = 7
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A settings file in the current folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "ragkv.toml"
    path.write_text(TEXT)
    return path


def test_the_server_and_python_read_the_same_settings_from_one_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAGKV_HOME", raising=False)
    monkeypatch.setenv("RAGKV_SERVE__QUEUE__LIMIT", "3")
    server = ServeConfig.gather(file)
    python = EngineConfig.gather(file)
    assert server.engine == python and (python.store.codec, python.fusion.ratio) == ("int8", 0.3)
    assert (server.home, server.port, server.limits.documents, server.queue.limit) == (
        "in-file",
        8123,
        7,
        3,
    )


def test_a_setting_that_only_a_server_refuses_ends_serve_alone(run: Run, file: Path) -> None:
    file.write_text(TEXT.replace("[store]", '[store]\ndirectory = "kv"'))
    assert "Nothing was ingested" in run("ask", "who?").err
    served = run("serve", "--port", "0")
    assert served.code == 1 and "Set `home` in place of store.directory" in served.err


@pytest.mark.parametrize("command", [["search", "who?"], ["ask", "who?"], ["keys", "list"]])
def test_commands_use_the_home_of_the_settings_file(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.delenv("RAGKV_HOME")
    (file.parent / "in-file").write_text("a file where a folder should be")
    assert "in-file" in run(*command).err
    (file.parent / "other.toml").write_text('home = "in-other"\n')
    monkeypatch.setenv("RAGKV_CONFIG", "other.toml")
    (file.parent / "in-other").write_text("a file where a folder should be")
    assert "in-other" in run(*command).err
    monkeypatch.setenv("RAGKV_HOME", "from-environment")
    (file.parent / "from-environment").write_text("a file where a folder should be")
    assert "from-environment" in run(*command).err


def test_an_interrupted_command_says_so_and_exits_with_130(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragkv.api.ServeConfig.gather", raising(KeyboardInterrupt()))
    ran = run("serve")
    assert (ran.code, ran.err) == (130, "interrupted\n")


def test_a_missing_settings_file_exits_with_1(run: Run) -> None:
    ran = run("ask", "who?", "--config", "missing.toml")
    assert ran.code == 1 and "Cannot read settings from missing.toml" in ran.err
