"""Opens the store that the settings ask for, and its tiers.

A row of `TIERS` (`registry.py`) is all that the store knows of a tier: which setting asks for it,
and which function opens it.
"""

from contextlib import ExitStack
from pkgutil import resolve_name

from ragkv.config import StoreConfig
from ragkv.registry import TIERS

from .policies import PolicySettings, make_policy
from .store import Store
from .tiers.base import Tier, TierRequest


def kinds_of(config: StoreConfig) -> tuple[str, ...]:
    """The tiers that `config` asks for, fastest first."""
    return tuple(kind for kind, tier in TIERS.items() if getattr(config, tier.setting))


def open_store(
    config: StoreConfig, *kinds: str, page_locked: bool = False, block_tokens: int = 256
) -> Store:
    """The store of `config`. See `open_tiers`, which raises the same errors.

    A read-only store has its own memory tier, and may serve from it what the writer has deleted
    since.
    """
    return Store(
        open_tiers(config, *kinds, page_locked=page_locked, block_tokens=block_tokens),
        write_buffer_bytes=config.write_buffer_bytes,
        prefetch=config.prefetch,
    )


def open_tiers(
    config: StoreConfig, *kinds: str, page_locked: bool = False, block_tokens: int = 256
) -> list[Tier]:
    """The tiers that `config` asks for, fastest first, or only those of these kinds.

    With `page_locked`, CUDA copies entries from memory. `block_tokens` is the length of a block of
    history. Raises `StoreLockedError`, `StoreError`, `ConfigError` or `MissingExtraError`. Connects
    to no remote server yet.
    """
    settings = PolicySettings(config.xi_tokens // block_tokens, block_tokens)
    tiers: list[Tier] = []
    with ExitStack() as opened:  # if one cannot be opened, those above it are closed again
        for kind in kinds_of(config):
            if kinds and kind not in kinds:
                continue
            asked = TierRequest(config, make_policy(config.policy, settings), page_locked)
            tiers.append(resolve_name(TIERS[kind].opener)(asked))
            opened.callback(tiers[-1].close)
        opened.pop_all()
    return tiers
