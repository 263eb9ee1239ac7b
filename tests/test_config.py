"""Settings: frozen, typed, from code, TOML or the environment; a wrong one is refused by
its name.
"""

import dataclasses
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ragkv import EngineConfig, FusionConfig, KCacheConfig, PromptConfig, StoreConfig
from ragkv.config import (
    GIB,
)
from ragkv.errors import ConfigError
from ragkv.runtime.setting_values import is_setting

MOST_SETTINGS = 66  # a new one takes the place of another

NESTED: dict[str, Any] = {
    "device": "cuda:1",
    "store": {"directory": "kv", "memory_bytes": 7, "read_only": True},
    "fusion": {"ratio": 0.5, "selector": "hkvd"},
    "prompt": {"system": "Be brief."},
    "kcache": {"top_n": 64},
}
BUILT = EngineConfig(
    device="cuda:1",
    store=StoreConfig(directory="kv", memory_bytes=7, read_only=True),
    fusion=FusionConfig(ratio=0.5, selector="hkvd"),
    prompt=PromptConfig(system="Be brief."),
    kcache=KCacheConfig(top_n=64),
)


def test_a_mapping_makes_the_same_config_as_code() -> None:
    assert EngineConfig.from_dict(NESTED) == BUILT
    assert EngineConfig.from_dict({}) == EngineConfig()


def test_by_default_the_controller_chooses_the_ratio_and_the_tiers_are_bounded() -> None:
    config = EngineConfig()
    assert (config.fusion.ratio, config.device, config.store.directory) == (None, "cpu", None)
    assert (config.store.memory_bytes, config.store.disk_bytes) == (1 * GIB, 20 * GIB)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"devise": "cpu"}, "Unknown setting devise. Did you mean device?"),
        ({"fusion": {"ratoi": 1.0}}, "Unknown setting fusion.ratoi. Did you mean fusion.ratio?"),
        ({"xyz": 1}, "Unknown setting xyz"),
        ({5: 1}, "Unknown setting 5"),
        ({"store": {"memory_bytes": "7"}}, "store.memory_bytes must be int, not '7'"),
        ({"store": {"memory_bytes": 7.0}}, "store.memory_bytes must be int"),
        ({"store": {"memory_bytes": True}}, "store.memory_bytes must be int, not True"),
        ({"store": {"memory_bytes": None}}, "store.memory_bytes must be int, not None"),
        ({"store": {"directory": 5}}, "store.directory must be str, not 5"),
        ({"store": {"read_only": 1}}, "store.read_only must be bool, not 1"),
        ({"fusion": {"ratio": True}}, "fusion.ratio must be float, not True"),
        ({"fusion": {"ratio": "0.5"}}, "fusion.ratio must be float"),
        ({"fusion": 0.5}, "fusion is a group of settings, not 0.5"),
        ({"fusion": {"ratio": 1.5}}, "ratio is 1.5"),
        ({"fusion": {"ratio": float("nan")}}, "ratio is nan"),
        ({"fusion": {"read_ahead_layers": -1}}, "read_ahead_layers is -1; it must be at least 0"),
        ({"store": {"memory_bytes": -1}}, "memory_bytes is -1; it must be at least 0"),
        ({"drafts": -1}, "drafts is -1"),
        ({"store": {"disk_bytes": -1}}, "disk_bytes is -1"),
        ({"store": {"write_buffer_bytes": -1}}, "write_buffer_bytes is -1"),
        ({"store": {"reader_threads": 0}}, "reader_threads is 0"),
        ({"session": {"shared": True}}, "session.shared needs store.redis"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused_by_name(values: dict[Any, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        EngineConfig.from_dict(values)


def test_a_whole_number_is_a_share_too() -> None:
    ratio = EngineConfig.from_dict({"fusion": {"ratio": 1}}).fusion.ratio
    assert (ratio, type(ratio)) == (1.0, float)


class TestToml:
    def test_a_toml_table_is_a_group_of_settings(self, tmp_path: Path) -> None:
        file = tmp_path / "ragkv.toml"
        file.write_text(
            'device = "cuda:1"\n[store]\ndirectory = "kv"\nmemory_bytes = 7\nread_only = true\n'
            '[fusion]\nratio = 0.5\nselector = "hkvd"\n[prompt]\nsystem = "Be brief."\n'
            "[kcache]\ntop_n = 64\n"
        )
        assert EngineConfig.gather(file, {}) == EngineConfig.gather(str(file), {}) == BUILT

    @pytest.mark.parametrize(
        "text", [b"device = ", b"\xff\xfe", b"[store]\nmemory = 1\n", b"fusion = 3\n"]
    )
    def test_a_wrong_toml_file_is_refused(self, tmp_path: Path, text: bytes) -> None:
        file = tmp_path / "ragkv.toml"
        file.write_bytes(text)
        with pytest.raises(ConfigError):
            EngineConfig.gather(file, {})

    def test_the_error_for_a_missing_file_names_it(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"no\.toml"):
            EngineConfig.gather(tmp_path / "no.toml", {})


class TestEnvironment:
    def test_two_underscores_in_a_variable_name_a_group(self) -> None:
        environment = {
            "RAGKV_DEVICE": "cuda:1",
            "RAGKV_STORE__DIRECTORY": "kv",
            "RAGKV_STORE__MEMORY_BYTES": "7",
            "RAGKV_STORE__READ_ONLY": "true",
            "RAGKV_FUSION__RATIO": "0.5",
            "RAGKV_FUSION__SELECTOR": "hkvd",
            "RAGKV_PROMPT__SYSTEM": "Be brief.",
            "RAGKV_KCACHE__TOP_N": "64",
            "HOME": "elsewhere",
        }
        assert EngineConfig.gather(None, environment) == BUILT

    def test_the_environment_of_the_process_is_read_by_default(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RAGKV_ADAPTER", "lora")
        assert EngineConfig.gather(None).adapter == "lora"
        assert EngineConfig.gather(None, {}) == EngineConfig()

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("RAGKV_CONFIG", "a value"),  # it names the settings file
            ("RAGKV_SERVICE_HOST", "10.0.0.7"),
            ("RAGKV_SERVICE_PORT_HTTP", "8000"),
            ("RAGKV_PORT", "tcp://10.0.0.7:8000"),
            ("RAGKV_PORT_8000_TCP_ADDR", "10.0.0.7"),
            ("RAGKV_REDIS_SERVICE_HOST", "10.0.0.8"),
            ("RAGKV_REDIS_PORT_6379_TCP_ADDR", "10.0.0.8"),
        ],
    )
    def test_a_variable_of_kubernetes_or_of_the_settings_file_is_ignored(
        self, name: str, text: str
    ) -> None:
        assert EngineConfig.gather(None, {name: text, "RAGKV_DEVICE": "cuda"}) == EngineConfig(
            device="cuda"
        )

    @pytest.mark.parametrize("text", ["1", "true", "YES", "on", "0", "False", "no", "off"])
    def test_a_variable_may_say_yes_or_no_in_several_ways(self, text: str) -> None:
        found = EngineConfig.gather(None, {"RAGKV_STORE__READ_ONLY": text})
        assert found.store.read_only is (text in ("1", "true", "YES", "on"))

    @pytest.mark.parametrize("text", ["", "none", "None"])
    def test_an_empty_variable_means_none_where_none_is_allowed(self, text: str) -> None:
        assert EngineConfig.gather(None, {"RAGKV_STORE__DIRECTORY": text}).store.directory is None

    @pytest.mark.parametrize(
        ("environment", "says"),
        [
            # these two look like some of Kubernetes
            ({"RAGKV_PORT": "8000"}, "Unknown environment variable RAGKV_PORT"),
            ({"RAGKV_SERVE_PORT": "8000"}, "Unknown environment variable RAGKV_SERVE_PORT"),
            (
                {"RAGKV_SESSION__SERVICE_PORT": "1"},
                "Unknown environment variable RAGKV_SESSION__SERVICE_PORT",
            ),
            ({"RAGKV_FUSION_RATIO": "0.5"}, "Did you mean RAGKV_FUSION__RATIO?"),
            ({"RAGKV_DEVISE": "cpu"}, "Did you mean RAGKV_DEVICE?"),
            ({"RAGKV_STORE__MEMORY_BYTES": "1.5"}, "store.memory_bytes must be int, not '1.5'"),
            (
                {"RAGKV_STORE__READ_ONLY": "maybe"},
                "store.read_only must be true or false, not 'maybe'",
            ),
            ({"RAGKV_FUSION__RATIO": "half"}, "fusion.ratio must be float, not 'half'"),
            ({"RAGKV_STORE": "kv"}, "store is a group of settings"),
            ({"RAGKV_STORE": "kv", "RAGKV_STORE__DIRECTORY": "kv"}, "store is a group of settings"),
            ({"RAGKV_STORE__DIRECTORY": "kv", "RAGKV_STORE": "kv"}, "store is a group of settings"),
            ({"RAGKV_DEVICE__X": "1"}, "device must be str"),
        ],
        ids=str,
    )
    def test_a_wrong_environment_variable_is_refused(
        self, environment: dict[str, str], says: str
    ) -> None:
        with pytest.raises(ConfigError, match=re.escape(says)):
            EngineConfig.gather(None, environment)


def test_an_optional_group_is_off_by_default_and_can_be_switched_off_by_name() -> None:
    assert EngineConfig().kcache is None
    assert EngineConfig.from_dict({"kcache": None}).kcache is None
    assert EngineConfig.gather(None, {"RAGKV_KCACHE": "none"}).kcache is None
    assert EngineConfig.gather(None, {"RAGKV_KCACHE__TOP_N": "none"}).kcache == KCacheConfig(
        top_n=None
    )
    with pytest.raises(ConfigError, match=r"kcache is a group of settings, not True"):
        EngineConfig.from_dict({"kcache": True})
    with pytest.raises(ConfigError, match=r"kcache.topn. Did you mean kcache.top_n"):
        EngineConfig.from_dict({"kcache": {"topn": 3}})


class TestFixedValues:
    def test_files_and_the_environment_may_not_set_them(self, tmp_path: Path) -> None:
        file = tmp_path / "ragkv.toml"
        file.write_text("[store]\nreader_threads = 2\n")
        says = re.escape("store.reader_threads is not a setting: it is always 2. Remove it.")
        with pytest.raises(ConfigError, match=says):
            EngineConfig.gather(file, {})
        with pytest.raises(ConfigError, match=says):
            EngineConfig.gather(None, {"RAGKV_STORE__READER_THREADS": "2"})

    def test_code_may_give_other_ones(self) -> None:
        assert EngineConfig.from_dict({"store": {"reader_threads": 3}}) == EngineConfig(
            store=StoreConfig(reader_threads=3)
        )

    def test_no_error_suggests_one(self) -> None:
        with pytest.raises(ConfigError, match=r"Did you mean store\.read_only\?"):
            EngineConfig.from_dict({"store": {"reader_thread": 2}})


def test_there_are_no_more_settings_than_a_reader_of_the_page_can_choose_from() -> None:
    from ragkv.api.settings import ServeConfig  # pure Python, as the settings of the engine are

    names = [*settings_of(ServeConfig), "home", "model"]
    print(f"{len(names)} settings: {', '.join(names)}")
    assert len(names) <= MOST_SETTINGS


def settings_of(cls: type[Any], path: str = "") -> Iterator[str]:
    """The names of all settings in a group but `home` and `model`; a group is none itself."""
    hints = typing.get_type_hints(cls)
    for field in filter(is_setting, dataclasses.fields(cls)):
        kinds = (hints[field.name], *typing.get_args(hints[field.name]))
        groups = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
        for group in groups:
            yield from settings_of(group, f"{path}{field.name}.")  # type: ignore[arg-type]
        if not groups and field.name not in ("home", "model"):
            yield f"{path}{field.name}"
