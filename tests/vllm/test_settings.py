"""The connector's settings: its own, and ragkv's with vLLM's dtype and device."""

from pathlib import Path

import pytest

from ragkv import EngineConfig
from ragkv.errors import ConfigError
from ragkv.vllm.settings import ConnectorSettings

REDIS = {"redis": {"url": "redis://127.0.0.1:6379/0"}}


def test_the_directory_of_the_home_is_opened_for_reading(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    settings, config = ConnectorSettings.read(
        {"home": str(tmp_path), "timeout_s": 3.0}, "float32", "cpu"
    )
    assert settings == ConnectorSettings(timeout_s=3.0, home=str(tmp_path))
    assert (config.store.directory, config.store.read_only) == (str(tmp_path / "kv"), True)
    assert (config.dtype, config.device) == ("float32", "cpu")
    assert config.packed_bytes == EngineConfig().packed_bytes


def test_a_machine_without_a_home_reads_from_redis_into_its_memory(tmp_path: Path) -> None:
    home = str(tmp_path / "none")
    _, config = ConnectorSettings.read({"home": home, "store": REDIS}, "float32", "cpu")
    assert config.store.directory is None
    _, config = ConnectorSettings.read(
        {"home": home, "store": {**REDIS, "read_only": False}}, "float32", "cpu"
    )
    assert config.store.directory == str(Path(home) / "kv")
    _, config = ConnectorSettings.read({"home": home}, "float32", "cpu")
    assert config.store.directory is not None, "without Redis a wrong path must be an error"


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="timeout"):
        ConnectorSettings.read({"timeout": 3.0}, "float32", "cpu")
