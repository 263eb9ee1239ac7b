"""Decides whose stored KV a prompt is fused from: that of the unnamed tenant, or that of a tenant
with a valid proof.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ragkv.config import TENANT
from ragkv.engine import Engine
from ragkv.errors import InputError
from ragkv.runtime import Closing, OpenPool

from .chunk_index import ChunkIndex
from .settings import ConnectorSettings

# How many entries of a store are listed, so also how many are found.
MOST_ENTRIES = 1_000_000


class Home(Closing):
    """An engine on vLLM's model, with the entries and conversations of one tenant, and its chunks
    by their ids.
    """

    def __init__(self, engine: Engine, refresh_s: float) -> None:
        self.engine = engine
        identity = engine.entries.identity
        store = engine.parts.store
        self.index = ChunkIndex(
            lambda: (
                info.token_ids
                for info in store.contents.sample(MOST_ENTRIES)
                if info.identity == identity
            ),
            refresh_s,
        )

    def close(self) -> None:
        """Close the engine and its store."""
        self.engine.close()


class Homes(Closing):
    """The homes of all tenants, opened when they are asked for as `ragkv serve` has them."""

    def __init__(self, engine: Engine, settings: ConnectorSettings) -> None:
        """`engine` is the unnamed tenant's; it is closed with this object."""
        self.unnamed = Home(engine, settings.refresh_s)
        self._settings = settings
        self._tenants = OpenPool[str, Home](settings.tenants, Home.close)

    @contextmanager
    def use(self, tenant: str) -> Iterator[Home]:
        """The home of a tenant, "" for the one without a name. Raises what opening a store raises,
        and `InputError`.
        """
        if not tenant:
            yield self.unnamed
            return
        with self._tenants.use(tenant, lambda: self._open(tenant)) as home:
            yield home

    def close(self) -> None:
        """Close every home."""
        self._tenants.close()
        self.unnamed.close()

    def _open(self, tenant: str) -> Home:
        if not TENANT.fullmatch(tenant):
            raise InputError(f"{tenant[:80]!r} is not a tenant's name.")
        engine = self.unnamed.engine
        folder = Path(self._settings.home, "tenants", tenant)
        config = engine.config
        directory = None if config.store.directory is None else str(folder / "kv")
        session = config.session
        if session.directory is not None:
            session = replace(session, directory=str(folder / "vllm"))
        store = replace(config.store, directory=directory, tenant=tenant)
        return Home(
            engine.with_config(replace(config, store=store, session=session)),
            self._settings.refresh_s,
        )
