"""A home: what it keeps is the default of every route, and anything that was given counts."""

import copy
import dataclasses
import errno
import json
import pickle
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from ragkv import EngineConfig, FusionConfig, PromptConfig, StoreConfig
from ragkv.errors import ConfigError
from ragkv.home import FILE, KEPT, KnownHome
from ragkv.runtime.setting_values import Default, overlay
from tests.faults import os_error, raising

# Other values than the defaults, as a home may keep them.
OTHERS = {
    "dtype": "float32",
    "weights": "int8",
    "adapter": "lora",
    "adapter_id": "mine",
    "prompt.system": "Be brief.",
    "prompt.separator": "\n",
    "store.codec": "raw",
    "fusion.stored_kv": "alone",
}
DEFAULTS = {name: str(attrgetter(name)(EngineConfig())) for name in KEPT}


@pytest.fixture(autouse=True)
def _no_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAGKV_MODEL", raising=False)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    values = {"model": "m", "chunk_tokens": 64, "embedder": None, "settings": OTHERS}
    (tmp_path / FILE).write_text(json.dumps(values))
    return tmp_path


def nested(name: str, value: str) -> dict[str, Any]:
    group, _, leaf = name.rpartition(".")
    return {group: {leaf: value}} if group else {leaf: value}


def in_code(name: str, value: str, _: Path) -> EngineConfig:
    return EngineConfig.from_dict(nested(name, value))


def in_the_environment(name: str, value: str, _: Path) -> EngineConfig:
    return EngineConfig.gather(None, {f"RAGKV_{name.replace('.', '__').upper()}": value})


def in_a_file(name: str, value: str, folder: Path) -> EngineConfig:
    file = folder / "ragkv.toml"
    file.write_text(f"{name} = {json.dumps(value)}\n")
    return EngineConfig.gather(file, {})


def test_every_setting_that_a_home_keeps_is_tried_here() -> None:
    assert set(OTHERS) == set(KEPT)
    assert all(OTHERS[name] != DEFAULTS[name] for name in KEPT)


@pytest.mark.parametrize("name", KEPT)
def test_what_nobody_gave_is_what_the_home_keeps(home: Path, name: str) -> None:
    assert attrgetter(name)(KnownHome.at(home).config(EngineConfig())) == OTHERS[name]


WAYS = [
    (name, give)
    for name in KEPT
    for give in (in_code, in_the_environment, in_a_file)
    if name != "adapter_id" or give is in_code  # only code can merge an adapter itself
]


@pytest.mark.parametrize(("name", "give"), WAYS)
def test_a_value_that_was_given_counts_also_if_it_is_the_default(
    home: Path, name: str, give: Callable[[str, str, Path], EngineConfig]
) -> None:
    config = KnownHome.at(home).config(give(name, DEFAULTS[name], home))
    kept = {other: attrgetter(other)(config) for other in KEPT}
    assert kept == {**OTHERS, name: DEFAULTS[name]}


def test_values_of_python_code_count_also_if_they_are_the_defaults(home: Path) -> None:
    given = EngineConfig(
        dtype="auto",
        weights="plain",
        adapter="",
        adapter_id="",
        prompt=PromptConfig(system="", separator="\n\n"),
        store=StoreConfig(codec=""),
        fusion=FusionConfig(stored_kv="expected"),
    )
    config = KnownHome.at(home).settings_over(given)
    assert config == given == EngineConfig()


def test_an_option_of_a_command_counts_also_if_it_is_the_default(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ragkv.cli.options import EngineOptions

    monkeypatch.chdir(home)
    found = EngineOptions(home, dtype="auto", weights="plain", adapter="").config()
    assert (found.dtype, found.weights, found.adapter) == ("auto", "plain", "")
    assert EngineOptions(home).config().dtype == "float32"


def test_a_setting_of_a_server_counts_also_if_it_is_the_default(home: Path) -> None:
    from ragkv.api.settings import ServeConfig

    flags = {"home": str(home), "dtype": "auto", "weights": None}
    engine = ServeConfig.gather(None, {}, flags).of_home().engine
    assert (engine.dtype, engine.weights) == ("auto", "int8")


def test_an_empty_system_text_takes_the_place_of_a_new_homes_own(tmp_path: Path) -> None:
    new = KnownHome.at(tmp_path, "smollm2")
    assert new.config(EngineConfig()).prompt.system
    assert new.config(EngineConfig(prompt=PromptConfig(system=""))).prompt.system == ""


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda config: pickle.loads(pickle.dumps(config)),
        lambda config: dataclasses.replace(config, device="cuda"),
    ],
)
def test_a_copy_of_a_config_knows_what_was_given(home: Path, copied: Any) -> None:
    config = copied(EngineConfig(weights="plain"))
    known = KnownHome.at(home).settings_over(config)
    assert (known.weights, known.dtype) == ("plain", "float32")


def test_a_home_of_earlier_versions_has_null_for_what_was_not_given(home: Path) -> None:
    values = json.loads((home / FILE).read_text())
    (home / FILE).write_text(json.dumps(overlay(values, {"settings": {"store.codec": None}})))
    assert KnownHome.at(home).config(EngineConfig()).store.codec == ""


def test_a_default_equals_the_same_text() -> None:
    assert Default("auto") == "auto" and hash(Default("auto")) == hash("auto")
    assert json.dumps(Default("auto")) == '"auto"'


def test_a_home_refuses_what_is_surely_another_model(tmp_path: Path) -> None:
    home, old, new = tmp_path / "home", tmp_path / "a" / "llama", tmp_path / "b" / "llama"
    for folder, content in ((old, "{}"), (new, "{}")):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(content)

    def opened(own: str | Path, given: str | Path) -> str:
        KnownHome(home, str(own), {}).keep(EngineConfig(), 64, None)
        return KnownHome.at(home, str(given)).model

    for own, given in [
        ("org/llama", "org/llama"),
        ("org/llama", new),  # downloaded
        (old, new),  # a copy
        ("/gone/llama", new),  # moved
        (tmp_path / "gone" / "m.gguf", tmp_path / "m.gguf"),
    ]:
        assert opened(own, given) == str(given)
    (new / "config.json").write_text('{"hidden_size": 8}')
    for own, given in [("org/llama", "other/llama"), ("smollm2", "org/smollm2"), (old, new)]:
        with pytest.raises(ConfigError, match="was made with the model"):
            opened(own, given)


def test_a_home_whose_file_was_damaged_is_refused_until_it_is_mended_or_begun_anew(
    home: Path,
) -> None:
    sound = (home / FILE).read_bytes()
    (home / FILE).write_bytes(sound[:-3])
    for _ in range(3):  # a supervisor starts it again and again
        with pytest.raises(ConfigError, match="ingest again"):
            KnownHome.at(home)
    aside = home / f"{FILE}.damaged"
    assert aside.read_bytes() == sound[:-3]
    (home / FILE).write_bytes(sound)
    assert KnownHome.at(home).kept["settings"] == OTHERS
    (home / FILE).unlink()
    aside.unlink()
    assert KnownHome.at(home, "m").kept == {}


def test_a_damaged_home_that_cannot_be_written_is_said_to_lie_where_it_is(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / FILE).write_bytes(b"{")
    monkeypatch.setattr(Path, "replace", raising(os_error(errno.EROFS)))
    with pytest.raises(ConfigError, match=f"lies at {home / FILE}\\."):
        KnownHome.at(home)
