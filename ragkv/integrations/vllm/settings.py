"""The connector's settings: `kv_connector_extra_config`, above ragkv's own settings file and environment."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from ragkv.config import EngineConfig, at_least
from ragkv.runtime.setting_values import build, gather, overlay


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """How prompts are fused for vLLM. All other names are ragkv's settings, such as `store` and `fusion`."""

    timeout_s: float = 30.0  # if no prompt makes progress for so long, vLLM computes those that wait
    prompts: int = 8  # prompts that are fused, or wait fused until vLLM admits them: bounds the memory of their KV
    least_reuse: float = 0.5  # share of the tokens up to the last chunk that has stored KV; below it vLLM computes all
    refresh_s: float = 5.0  # seconds between searches for chunks that other processes stored

    def __post_init__(self) -> None:
        at_least(self, timeout_s=0.0, prompts=1, least_reuse=0.0, refresh_s=0.01)

    @classmethod
    def read(cls, extra: Mapping[str, Any], dtype: str, device: str) -> "tuple[Self, EngineConfig]":
        """The connector's settings and the engine's, whose `dtype` and `device` are vLLM's.

        A directory is opened for reading, so that another process can write to it, unless `store.read_only` is false.
        A machine that has none reads from Redis or S3 into its memory. Raises `ConfigError`.
        """
        own = {field.name for field in fields(cls)}
        settings: Self = build(cls, {name: value for name, value in extra.items() if name in own})
        others = {name: value for name, value in extra.items() if name not in own and name != "config"}
        values = overlay(gather(extra.get("config")), others)
        config = EngineConfig.from_settings(values)
        store = config.store
        if store.directory is None:
            store = replace(store, directory=str(Path(values.get("home", ".ragkv")) / "kv"))
        if "read_only" not in values.get("store", {}):
            remote = store.redis is not None or store.s3 is not None
            alone = remote and store.directory is not None and not Path(store.directory).is_dir()
            store = replace(store, directory=None) if alone else replace(store, read_only=True)
        packed_bytes = config.packed_bytes if "packed_bytes" in values else 0  # vLLM plans the machine's memory
        return settings, replace(config, store=store, dtype=dtype, device=device, packed_bytes=packed_bytes)


__all__ = ["ConnectorSettings"]
