"""`ragkv config` shows each setting and its source; every command takes home and model from the settings file."""

from pathlib import Path

import pytest

from ragkv.api.settings import ServeConfig
from ragkv.config import EngineConfig

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


def test_config_show_names_the_value_and_the_source_of_every_setting(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGKV_FUSION__RATIO", "0.4")
    monkeypatch.setenv("RAGKV_SERVE__HOSTS", "a.example,b.example")
    shown = {row["setting"]: (row["value"], row["source"]) for row in run("config", "show", "--json").json}
    assert shown["fusion.ratio"] == (0.4, "RAGKV_FUSION__RATIO")
    assert shown["store.codec"] == ("int8", file.name)
    assert shown["serve.limits.documents"] == (7, file.name)
    assert shown["serve.hosts"] == (["a.example", "b.example"], "RAGKV_SERVE__HOSTS")
    assert shown["serve.limits.inputs"] == (256, "default")
    assert shown["kcache"] == (None, "default")
    changed = run("config", "show", "--changed").out
    assert [line.split()[0] for line in changed.splitlines()] == [
        *("home", "model", "store.codec", "fusion.ratio", "serve.port", "serve.hosts", "serve.limits.documents")
    ]


def test_a_command_the_server_and_python_read_equal_settings_from_one_file(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAGKV_HOME")
    monkeypatch.delenv("RAGKV_MODEL")
    shown = {row["setting"]: row["value"] for row in run("config", "show", "--json").json}
    server, python = ServeConfig.gather(file), EngineConfig.gather(file)
    assert server.engine == python
    assert (shown["home"], shown["model"]) == (server.home, server.model) == ("in-file", "reader")
    assert (shown["store.codec"], shown["fusion.ratio"]) == (python.store.codec, python.fusion.ratio) == ("int8", 0.3)
    assert (shown["serve.port"], shown["serve.limits.documents"]) == (server.port, server.limits.documents)


def test_config_check_refuses_an_unknown_setting_of_the_server_by_name(run: Run, file: Path) -> None:
    assert run("config", "check").code == 0
    file.write_text(TEXT + "documnets = 8\n")
    checked = run("config", "check")
    assert checked.code == 1 and "Did you mean serve.limits.documents?" in checked.err


@pytest.mark.parametrize("command", [["stats"], ["ask", "who?"], ["keys", "list"]])
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


def test_a_missing_settings_file_exits_with_1(run: Run) -> None:
    ran = run("config", "check", "--config", "missing.toml")
    assert ran.code == 1 and "Cannot read settings from missing.toml" in ran.err
