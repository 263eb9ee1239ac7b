"""The connector's settings, and the configuration of vLLM that they need. Any other is refused at
start, with one sentence.

The settings are in `kv_connector_extra_config`, above ragkv's own settings file and environment.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from ragkv.config import EngineConfig, at_least
from ragkv.errors import ConfigError, UnsupportedModelError
from ragkv.home import KnownHome
from ragkv.model import Adapter
from ragkv.runtime.setting_values import build, gather, overlay
from ragkv.store.opening import kinds_of
from ragkv.store.tiers import TierKind

# Those whose tokens the tests compare.
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
ROPE_TYPES = ("default", "llama3")
# The defaults of conversations: their KV is used as it is, and deleted when idle
# for a week.
KEPT_HISTORY = {"inexact_history": "keep", "ttl_s": 7 * 24 * 3600.0}


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """How prompts are fused for vLLM. All other names are ragkv's settings, such as `store` and
    `fusion`.
    """

    # if no prompt makes progress for this time, vLLM computes the prompts that wait
    timeout_s: float = 30.0
    # prompts that are fused, or wait fused until vLLM admits them: bounds the memory of their KV
    prompts: int = 8
    # share of the tokens up to the last chunk that has stored KV; below it vLLM computes all
    least_reuse: float = 0.5
    refresh_s: float = 5.0  # seconds between searches for chunks that other processes stored
    # named tenants open at once, each with memory of its own; the longest idle is closed
    tenants: int = 8
    home: str = ".ragkv"  # folder of entries and conversations, as `ragkv serve` has them

    def __post_init__(self) -> None:
        at_least(self, timeout_s=0.0, prompts=1, least_reuse=0.0, refresh_s=0.01, tenants=1)

    @classmethod
    def read(
        cls, extra: Mapping[str, Any], dtype: str, device: str, model: str = ""
    ) -> "tuple[Self, EngineConfig]":
        """The connector's settings and the engine's, whose `dtype` and `device` are vLLM's, as its
        `model` is.

        What the home keeps is the default. A directory is opened for reading, so that another
        process can write to it, unless `store.read_only` is false. A machine that has none reads
        from Redis or S3 into its memory. Raises `ConfigError`, also for a model that is not the
        home's.
        """
        own = {field.name for field in fields(cls)}
        others = {
            name: value
            for name, value in extra.items()
            if name not in own - {"home"} and name != "config"
        }
        values = overlay(gather(extra.get("config")), others)
        named = {name: value for name, value in extra.items() if name in own}
        settings: Self = build(cls, {**named, "home": values.get("home", ".ragkv")})
        config = KnownHome.at(settings.home, model).config(EngineConfig.from_settings(values))
        store = config.store
        session = config.session
        if "read_only" not in values.get("store", {}):
            remote = set(kinds_of(store)) - {TierKind.MEMORY, TierKind.DISK}
            alone = (
                bool(remote) and store.directory is not None and not Path(store.directory).is_dir()
            )
            store = replace(store, directory=None) if alone else replace(store, read_only=True)
        # On a GPU vLLM plans all memory; on a CPU it plans that of its KV cache alone.
        is_given = "packed_bytes" in values or device == "cpu"
        packed_bytes = config.packed_bytes if is_given else 0
        if store.read_only and session.directory is None:  # another process writes to the store
            session = replace(session, directory=str(Path(settings.home) / "vllm"))
        # a turn finds its history as vLLM's prefix cache would have it
        given = values.get("session", {})
        session = replace(
            session, **{name: given.get(name, value) for name, value in KEPT_HISTORY.items()}
        )
        # vLLM computes with the device at any time
        controller = replace(config.controller, measure=False)
        config = replace(
            config, store=store, session=session, controller=controller, packed_bytes=packed_bytes
        )
        return settings, replace(config, dtype=dtype, device=device)


def check_config(vllm_config: Any) -> None:
    """Raise `ConfigError` or `UnsupportedModelError` if vLLM is configured in a way that is not
    supported.
    """
    parallel = vllm_config.parallel_config
    cache = vllm_config.cache_config
    for kind in ("tensor", "pipeline", "data", "decode_context", "prefill_context"):
        if (size := getattr(parallel, f"{kind}_parallel_size", 1)) > 1:
            raise ConfigError(
                f"{kind}_parallel_size is {size}; RagKVConnector fuses on one device: set it to 1."
            )
    if cache.cache_dtype not in (
        "auto",
        str(vllm_config.model_config.dtype).removeprefix("torch."),
    ):
        raise ConfigError(
            f"kv_cache_dtype is {cache.cache_dtype!r}; RagKVConnector needs the model's own: set "
            "'auto'."
        )
    if vllm_config.speculative_config is not None:
        raise ConfigError(
            "Speculative decoding is on; a draft model would have no KV of fused prompts: turn "
            "it off."
        )
    if vllm_config.model_config.enable_sleep_mode:
        raise ConfigError(
            "Sleep mode is on; other weights could come back than those of the stored KV: turn "
            "it off."
        )
    _check_model(vllm_config.model_config)


def _check_model(model_config: Any) -> None:
    if model_config.quantization is not None:
        raise UnsupportedModelError(
            f"The weights are quantised ({model_config.quantization}), so ragkv would compute "
            "other KV than vLLM does: "
            "serve the unquantised checkpoint."
        )
    config = model_config.hf_config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    for what, given, known in (
        ("the family", config.model_type, FAMILIES),
        ("RoPE of the type", rope, ROPE_TYPES),
    ):
        if given not in known:
            raise UnsupportedModelError(
                f"RagKVConnector was not tested with {what} {given!r}; it supports "
                f"{', '.join(known)}."
            )


def check_layer(layer: int, attention: Any, adapter: Adapter) -> None:
    """Raise `UnsupportedModelError` if vLLM's attention of `layer` has other shapes or another
    window than ragkv's.
    """
    found = (attention.num_kv_heads, attention.head_size, attention.sliding_window)
    wanted = (adapter.kv_heads, adapter.head_dim, adapter.window(layer))
    if found != wanted:
        raise UnsupportedModelError(
            f"Layer {layer} has (KV heads, head size, sliding window) {found} in vLLM and "
            f"{wanted} in ragkv; "
            "RagKVConnector cannot serve this model."
        )
