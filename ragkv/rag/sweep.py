"""Deletes the KV in a home that no stored passage needs.

An interrupted deletion leaves such KV, and so does an application that sent texts of its own. A
home may have the index of the commands, the collections of a server, and tenants, each with a
folder that may have both.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ragkv.engine import Engine
from ragkv.retrieval.index_folder import look_into


def sweep(engine: Engine, home: Path) -> int:
    """Delete such KV of every tenant of a home; returns how many entries that were.

    `engine` is the home's own. No server may run there: raises `StoreLockedError`. Raises
    `StoreError` for an index that cannot be read, before anything of its tenant is deleted.
    """
    dropped = _sweep_one(engine, home)
    for tenant in sorted((home / "tenants").glob("*")):
        if (tenant / "kv").is_dir() and not tenant.is_symlink():
            store = replace(engine.config.store, directory=str(tenant / "kv"), tenant=tenant.name)
            with engine.with_config(replace(engine.config, store=store)) as own:
                dropped += _sweep_one(own, tenant)
    return dropped


def _sweep_one(engine: Engine, folder: Path) -> int:
    return engine.entries.retain([engine.chunk(text) for text in dict.fromkeys(_texts(folder))])


def _texts(folder: Path) -> Iterator[str]:
    """The texts of all passages in one tenant's folder."""
    for directory in (folder / "index", *(folder / "collections").glob("[!.]*")):
        with look_into(directory) as index:
            if index is not None:
                yield from (passage.text for passage in index.contents.passages())
