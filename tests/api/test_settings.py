"""The server's settings: file, environment, flags; wrong settings are refused by name; secrets are
not printed.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from ragkv.api import create_app
from ragkv.api.settings import ServeConfig
from ragkv.config import is_loopback
from ragkv.errors import ConfigError
from ragkv.runtime.setting_values import build


def test_flags_override_the_environment_which_overrides_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        '[serve]\nport = 1\nhost = "127.0.0.2"\nopen_tenants = 3\n[serve.limits]\ndocuments = '
        "5\nmax_tokens = 6\n"
    )
    environment = {
        "RAGKV_SERVE__PORT": "2",
        "RAGKV_SERVE__LIMITS__DOCUMENTS": "7",
        "RAGKV_SERVE__OPEN_TENANTS": "4",
    }
    flags = {"model": None, "serve": {"open_tenants": 5, "limits": {"max_tokens": None}}}
    config = ServeConfig.gather(file, environment, flags)
    assert (config.host, config.port, config.open_tenants) == ("127.0.0.2", 2, 5)
    assert (config.limits.documents, config.limits.max_tokens, config.model) == (7, 6, "")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ("fusion_ratio = 1.0", "Did you mean fusion.ratio?"),
        ("[limits]\nmax_tokens = 1", "settings are in the group serve, serve.limits"),
        ("[serve.engine.fusion]\nratio = 1.0", "must be outside of the group serve"),
        ('[serve]\nmodel = "m"', "serve.model: it must be outside of the group serve"),
        (
            "[serve.limits]\nmax_token = 1",
            "Unknown setting serve.limits.max_token. Did you mean serve.limits.max_tokens?",
        ),
        ("[fusion]\nratoi = 1.0", "Unknown setting fusion.ratoi. Did you mean fusion.ratio?"),
        ("serve = 1", "serve is a group of settings, not 1"),
        ("home = 1", "home must be str, not 1"),
    ],
)
def test_a_setting_in_the_wrong_place_is_refused_with_the_right_one(
    tmp_path: Path, values: str, says: str
) -> None:
    file = tmp_path / "ragkv.toml"
    file.write_text(values)
    with pytest.raises(ConfigError, match=re.escape(says)):
        ServeConfig.gather(file, {})


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"prot": 1}, "Unknown setting prot. Did you mean port?"),
        ({"engine": {"store": {"codek": "raw"}}}, "Did you mean engine.store.codec?"),
        ({"port": "8000"}, "port must be int, not '8000'"),
        ({"port": 65536}, "port is 65536"),
        ({"host": ""}, "host is empty"),
        ({"hosts": "a.example"}, "hosts must be a list, not 'a.example'"),
        ({"hosts": [5]}, r"hosts\[0\] must be str, not 5"),
        ({"cors_origins": ["*"]}, "name the origins"),
        ({"proxies": ["nginx"]}, "proxies has 'nginx'; it takes addresses"),
        ({"limits": {"body_bytes": 0}}, "body_bytes is 0; it must be at least 1"),
        ({"queue": {"deadline_s": 0.0}}, "deadline_s is 0.0"),
        ({"vllm": {"url": "http://user:secret@localhost"}}, r"vllm\.url"),
        ({"answer_engine": "other"}, "answer_engine"),
        ({"log": {"level": "loud"}}, "log.level is 'loud'; it must be one of: debug"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused_by_name(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build(ServeConfig, values)


def test_a_list_in_the_environment_may_be_written_as_in_a_file() -> None:
    for text in ("127.0.0.1, 10.0.0.0/8", '["127.0.0.1", "10.0.0.0/8"]'):
        assert ServeConfig.gather(None, {"RAGKV_SERVE__PROXIES": text}).proxies == (
            "127.0.0.1",
            "10.0.0.0/8",
        )
    with pytest.raises(
        ConfigError, match=r"serve.hosts must be words .* or a TOML array, not '\[a\]'"
    ):
        ServeConfig.gather(None, {"RAGKV_SERVE__HOSTS": "[a]"})


@pytest.mark.parametrize("name", ["directory", "tenant"])
def test_a_server_refuses_a_store_setting_that_its_tenants_need(name: str) -> None:
    config = build(ServeConfig, {"engine": {"store": {name: "x"}}})
    with pytest.raises(ConfigError, match=f"cannot use store.{name}.*Set `home`"):
        create_app(config)


def test_the_metrics_token_is_not_shown() -> None:
    config = build(ServeConfig, {"auth": {"metrics_token": "hush-hush"}})
    assert config.auth.metrics_token == "hush-hush"
    assert "hush" not in repr(config) + str(config)


def test_loopback_is_recognised_by_name_and_by_address() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "[::1]", "LOCALHOST.", "app.localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "192.168.0.1", "localhost.evil.example", "")))
