"""Tenants: each has its own engine on the one loaded model, its own collections, and its own directory.

A tenant is opened at its first use. When too many are open, the one that was idle longest is closed. A lease keeps a
tenant open. The keys of stored entries are salted with the tenant's name, and the entries lie in the tenant's directory
alone: no tenant can find, count or evict another tenant's entries.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ragkv.config import EngineConfig
from ragkv.dialogue import DialogueEngine
from ragkv.engine import Engine
from ragkv.errors import InputError, RagKVError, SessionUnavailableError
from ragkv.retrieval import Embedder
from ragkv.runtime import Closing, make_private_folder
from ragkv.scheduling import Activity
from ragkv.sessions import Session, SessionInfo

from .collections import Collections
from .keys import TENANT, Principal, Quota
from .limits import QuotaGuard
from .metrics import TenantStats
from .settings import ServeConfig

log = logging.getLogger(__name__)

_NAMED = "named-"  # prefix of sessions that a client named; the others are found by their messages' text


class Tenant(Closing):
    """One open tenant: engine, collections, sessions and quotas."""

    def __init__(self, engine: Engine, collections: Collections) -> None:
        self.engine, self.collections = engine, collections
        self.dialogue = DialogueEngine(engine)
        self.quotas = QuotaGuard()

    def engine_session_id(self, session_id: str) -> str:
        """The engine's id of the session that the client calls `session_id`."""
        return _NAMED + session_id

    def session(self, session_id: str) -> Session:
        """The session that the client calls `session_id`, new or stored."""
        return self.engine.session(self.engine_session_id(session_id))

    def session_ids(self) -> tuple[str, ...]:
        """The client's ids of its sessions that have turns."""
        return tuple(name.removeprefix(_NAMED) for name in self.engine.session_ids() if name.startswith(_NAMED))

    def sessions(self) -> Sequence[SessionInfo]:
        """The sessions that clients named, under their names, the last used first."""
        infos = [info for info in self.engine.sessions() if info.session_id.startswith(_NAMED)]
        return [replace(info, session_id=info.session_id.removeprefix(_NAMED)) for info in infos]

    def close(self, encode_missed: bool = True) -> None:
        """Write everything and close. Without `encode_missed`, missed chunks that wait are not encoded."""
        self.collections.close()
        if encode_missed:
            self.engine.flush()
        self.engine.close()


class _Slot:
    """One tenant's entry in the table of tenants."""

    def __init__(self) -> None:
        self.users = 0  # leases, plus a thread that is closing the tenant; guarded by the table's lock
        self.lock = threading.Lock()  # held while the tenant is opened or closed
        self.tenant: Tenant | None = None
        self.closing = False  # a thread is about to close the tenant, unless a request leases it first


class Tenants(Closing):
    """The tenants of one server. Thread-safe."""

    def __init__(self, config: ServeConfig, model: Engine, embedder: Embedder | None) -> None:
        """`model` is an engine on the loaded model; it is closed with this object."""
        self.embedder = embedder
        self._config, self._model = config, model
        self._lock = threading.Lock()  # of the table; never held while a tenant is opened or closed
        self._slots: OrderedDict[str, _Slot] = OrderedDict()  # least recently used first
        self._closed = False

    @property
    def activity(self) -> Activity:
        """Which answers run on the model, of any tenant."""
        return self._model.parts.activity

    @contextmanager
    def lease(self, principal: Principal) -> Iterator[Tenant]:
        """The principal's tenant, open until the lease ends. Blocks while the tenant is opened or closed."""
        slot = self._acquire(principal.tenant)
        try:
            with slot.lock:
                if slot.tenant is None:
                    slot.tenant = self._open(principal.tenant, principal.quota)
                tenant = slot.tenant
            yield tenant
        finally:
            self._release(principal.tenant, slot)

    def opened(self) -> dict[str, Tenant]:
        """The open tenants by name, for reading only: any of them may be closed at any time."""
        with self._lock:
            return {name: slot.tenant for name, slot in self._slots.items() if slot.tenant is not None}

    def stats(self) -> Sequence[TenantStats]:
        """The stats of the open tenants. Opens no tenant, and is fast."""
        return [(name, tenant.engine.stats(), _session_count(tenant)) for name, tenant in self.opened().items()]

    def kv_directories(self) -> Sequence[Path]:
        """The KV directories of the open tenants."""
        return [self._kv_directory(name) for name in self.opened()]

    def close(self) -> None:
        """Write everything and close all tenants, then the model. Soon: waiting missed chunks are not encoded."""
        with self._lock:
            self._closed = True
            slots = list(self._slots.values())
        for slot in slots:
            with slot.lock:
                if slot.tenant is not None:
                    _close(slot.tenant, encode_missed=False)
                    slot.tenant = None
        self._model.close()

    def _directory(self, name: str) -> Path:
        """A tenant's directory; raises `InputError` if `name` cannot be a tenant's name."""
        home = Path(self._config.home)
        if not name:
            return home
        if not TENANT.fullmatch(name):
            raise InputError(f"{name[:80]!r} is not a tenant's name.")
        return home / "tenants" / name

    def _kv_directory(self, name: str) -> Path:
        directory = self._directory(name)
        if self._config.kv_home is not None:
            directory = Path(self._config.kv_home) / directory.relative_to(self._config.home)
        return directory / "kv"

    def _acquire(self, name: str) -> _Slot:
        with self._lock:
            if self._closed:
                raise RagKVError("The server is closed.")
            slot = self._slots.setdefault(name, _Slot())
            slot.users += 1
            self._slots.move_to_end(name)
            return slot

    def _release(self, name: str, slot: _Slot) -> None:
        with self._lock:
            slot.users -= 1
            if not slot.users and slot.tenant is None:  # the tenant could not be opened
                self._slots.pop(name, None)
        while (idle := self._longest_idle()) is not None:
            self._close_idle(*idle)

    def _longest_idle(self) -> tuple[str, _Slot] | None:
        """A tenant to close because too many are open. It is marked as used, so that no other thread closes it."""
        with self._lock:
            opened = [(n, slot) for n, slot in self._slots.items() if slot.tenant is not None and not slot.closing]
            if self._closed or len(opened) <= self._config.open_tenants:
                return None
            for name, slot in opened:
                if not slot.users:
                    slot.users, slot.closing = 1, True
                    return name, slot
            return None

    def _close_idle(self, name: str, slot: _Slot) -> None:
        with slot.lock:  # a request for this tenant waits here, and then opens it again
            with self._lock:
                tenant = slot.tenant if slot.users == 1 else None
            if tenant is not None:
                _close(tenant)
            with self._lock:
                slot.tenant = None if tenant is not None else slot.tenant
                slot.users, slot.closing = slot.users - 1, False
                if not slot.users and slot.tenant is None:
                    self._slots.pop(name, None)

    def _open(self, name: str, quota: Quota) -> Tenant:
        directory, kv_directory = self._directory(name), self._kv_directory(name)
        for place in (directory, kv_directory):
            make_private_folder(place)
        engine = self._model.with_config(_engine_config(self._config.engine, kv_directory, name, quota))
        try:
            return Tenant(engine, Collections(directory, engine, self.embedder))
        except BaseException:
            engine.close()
            raise


def _engine_config(config: EngineConfig, directory: Path, name: str, quota: Quota) -> EngineConfig:
    """The config of a tenant's engine: its directory, its name, and its quota in place of the server's bytes."""
    store = replace(config.store, directory=str(directory), tenant=name)
    if quota.disk_bytes is not None:
        store = replace(store, disk_bytes=quota.disk_bytes)
    if (memory_bytes := quota.memory_bytes) is not None:
        reserve = store.memory_reserve_bytes
        reserve = None if reserve is None else min(reserve, memory_bytes)
        store = replace(store, memory_bytes=memory_bytes, memory_reserve_bytes=reserve)
    return replace(config, store=store)


def _session_count(tenant: Tenant) -> int | None:
    try:
        return len(tenant.session_ids())
    except SessionUnavailableError:  # replicas share the sessions, and the Redis server does not answer
        return None


def _close(tenant: Tenant, encode_missed: bool = True) -> None:
    try:
        tenant.close(encode_missed)
    except Exception:
        log.exception("tenant_close_failed")
