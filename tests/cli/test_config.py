"""`ragkv config` shows each setting and its source; every command takes home and model from the settings file."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ragkv.api.settings import ServeConfig
from ragkv.cli.config import settings_of
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
# Prints the settings that Ray sends to each replica, which makes its service of them. Ray warns when it is imported.
REPLICA = """
import json, sys
from ray import cloudpickle
from ragkv.cli.config import settings_of
from ragkv.integrations.ray import application
replicas = application({"config": sys.argv[1]})._bound_deployment.init_args[1]._bound_deployment
assert replicas.func_or_class.__name__ == "Replica"
(config,) = cloudpickle.loads(cloudpickle.dumps(replicas.init_args))
print(json.dumps(dict(settings_of(config))))
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


def test_a_command_the_server_a_replica_and_python_show_the_same_settings_of_one_file(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'ragkv[ray]'")
    monkeypatch.delenv("RAGKV_HOME")
    monkeypatch.delenv("RAGKV_MODEL")
    text = TEXT.replace("[fusion]", "[fusion]\nfloor_tokens = 5")  # the tests' own default is not the replica's
    file.write_text(text + '[session]\nshared = true\n[store.redis]\nurl = "unix:///redis.sock"\n')
    monkeypatch.setenv("RAGKV_SERVE__CLUSTER__REPLICAS", "3")
    rows = {row["setting"]: row["value"] for row in run("config", "show", "--json").json}
    assert rows["store.redis.url"] == "unix:///redis.sock" and rows["serve.cluster.replicas"] == 3
    server = ServeConfig.gather(file)
    for config in (server, dataclasses.replace(server, engine=EngineConfig.gather(file))):
        assert {name: json.loads(json.dumps(value)) for name, value in settings_of(config)} == rows
    replica = subprocess.run([sys.executable, "-c", REPLICA, str(file)], capture_output=True, text=True, check=True)
    assert json.loads(replica.stdout) == rows


def test_a_setting_that_only_a_server_refuses_is_shown_and_checked_with_a_note(run: Run, file: Path) -> None:
    file.write_text(TEXT.replace("[store]", '[store]\ndirectory = "kv"'))
    shown = {row["setting"]: row["value"] for row in run("config", "show", "--json").json}
    assert shown["store.directory"] == "kv"
    checked = run("config", "check")
    assert checked.code == 0 and "`ragkv serve` does not start with them. A server cannot use store.dir" in checked.err
    served = run("serve", "--port", "0")
    assert served.code == 1 and "Set `home` in place of store.directory" in served.err


def test_a_secret_is_not_shown(run: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.setenv("RAGKV_SERVE__AUTH__METRICS_TOKEN", "hush-hush")
    for options in ((), ("--json",), ("--changed",)):
        ran = run("config", "show", *options)
        assert "serve.auth.metrics_token" in ran.out and "hush" not in ran.out


def test_config_check_refuses_an_unknown_setting_of_the_server_by_name(run: Run, file: Path) -> None:
    assert run("config", "check").code == 0
    file.write_text(TEXT + "documnets = 8\n")
    checked = run("config", "check")
    assert checked.code == 1 and "Did you mean serve.limits.documents?" in checked.err
    file.write_text("[server]\nport = 1\n")
    assert "Unknown setting server. Did you mean serve?" in run("config", "check").err


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


def test_an_interrupted_command_says_so_and_exits_with_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ragkv.api.ServeConfig.gather", interrupt)
    ran = run("config", "check")
    assert (ran.code, ran.err) == (130, "interrupted\n")


def test_a_missing_settings_file_exits_with_1(run: Run) -> None:
    ran = run("config", "check", "--config", "missing.toml")
    assert ran.code == 1 and "Cannot read settings from missing.toml" in ran.err
