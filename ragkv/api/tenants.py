"""Tenants: each has an engine of its own over the one loaded model, and collections of its own, in its own directory.

Opened when first used, closed when idle for longest and too many are open; whoever uses one holds a lease meanwhile.
What one tenant stores is salted with its name and lies in its directory alone: none finds, counts or evicts another's.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ragkv.config import EngineConfig, StoreConfig
from ragkv.dialogue import DialogueEngine
from ragkv.engine import Engine, EngineStats
from ragkv.errors import InputError, RagKVError, SessionUnavailableError
from ragkv.retrieval import Embedder
from ragkv.runtime import Closing
from ragkv.sessions import Session, SessionInfo

from .collections import Collections
from .keys import TENANT, Principal, Quota
from .limits import Quotas
from .settings import ServeConfig

log = logging.getLogger(__name__)

_NAMED = "named-"  # conversations a tenant named, apart from those found by what their messages say


class Tenant(Closing):
    """What one tenant has, opened."""

    def __init__(self, engine: Engine, collections: Collections) -> None:
        self.engine, self.collections = engine, collections
        self.dialogue = DialogueEngine(engine)
        self.quotas = Quotas()

    def session_name(self, session_id: str) -> str:
        """What the engine calls the conversation that the tenant calls `session_id`."""
        return _NAMED + session_id

    def session(self, session_id: str) -> Session:
        """The conversation that the tenant calls so, new or as it stands."""
        return self.engine.session(self.session_name(session_id))

    def fork(self, session: Session, session_id: str) -> Session:
        """A new conversation of that name with the same past. Raises `InputError` if there is one."""
        return session.fork(self.session_name(session_id))

    def session_ids(self) -> tuple[str, ...]:
        """The tenant's names of its conversations that have turns."""
        return tuple(name.removeprefix(_NAMED) for name in self.engine.session_ids() if name.startswith(_NAMED))

    def sessions(self) -> Sequence[SessionInfo]:
        """The tenant's conversations, under its own names, the last used first."""
        infos = [info for info in self.engine.sessions() if info.session_id.startswith(_NAMED)]
        return [replace(info, session_id=info.session_id.removeprefix(_NAMED)) for info in infos]

    def forget_unnamed(self) -> None:
        """Delete the conversations nobody named: a text that was deleted may be in them."""
        self.dialogue.forget_requests()

    def close(self) -> None:
        """Flush and close. Twice is harmless."""
        self.collections.close()
        self.engine.flush()
        self.engine.close()


class _Slot:
    """A tenant's place in the books."""

    def __init__(self) -> None:
        self.users = 0  # leases, and who is closing it; guarded by the books' lock
        self.lock = threading.Lock()  # held while it is opened or closed
        self.tenant: Tenant | None = None
        self.closing = False  # it is to be closed, unless somebody comes first


class Tenants(Closing):
    """The tenants of one server. Thread-safe."""

    def __init__(self, config: ServeConfig, model: Engine, embedder: Embedder | None) -> None:
        """`model` is an engine on the loaded model; tenants' engines are opened beside it."""
        self._config, self._model, self._embedder = config, model, embedder
        self._lock = threading.Lock()  # of the books; never held while something is opened or closed
        self._slots: OrderedDict[str, _Slot] = OrderedDict()  # the longest unused first
        self._closed = False

    @contextmanager
    def lease(self, principal: Principal) -> Iterator[Tenant]:
        """The principal's tenant, open until the lease ends. Blocks while it is opened or closed."""
        slot = self._enter(principal.tenant)
        try:
            with slot.lock:
                if slot.tenant is None:
                    slot.tenant = self._opened(principal.tenant, principal.quota)
                tenant = slot.tenant
            yield tenant
        finally:
            self._leave(principal.tenant, slot)

    def opened(self) -> dict[str, Tenant]:
        """The tenants that are open now, by name, for looking at alone: any may be closed at any time."""
        with self._lock:
            return {name: slot.tenant for name, slot in self._slots.items() if slot.tenant is not None}

    def stats(self) -> Sequence[tuple[str, EngineStats, int]]:
        """What the open ones hold: name, engine, conversations. Opens none, and is quick."""
        opened = self.opened()
        return [(name, one.engine.stats(), _conversations(one)) for name, one in opened.items()]

    def directories(self) -> Sequence[Path]:
        """Where the open ones keep their KV."""
        return [self.kv_directory(name) for name in self.opened()]

    def kv_directory(self, name: str) -> Path:
        """Where a tenant's KV lies; raises `InputError` for a name that is none."""
        place = self.directory(name)
        if self._config.kv_home is None:
            return place / "kv"
        return Path(self._config.kv_home) / place.relative_to(self._config.home) / "kv"

    def directory(self, name: str) -> Path:
        """Where a tenant's files lie; raises `InputError` for a name that is none."""
        home = Path(self._config.home)
        if not name:
            return home
        if not TENANT.fullmatch(name):
            raise InputError(f"{name[:80]!r} is no tenant's name.")
        return home / "tenants" / name

    def close(self) -> None:
        """Close them all, flushed. Twice is harmless."""
        with self._lock:
            self._closed = True
            slots = list(self._slots.values())
        for slot in slots:
            with slot.lock:
                if slot.tenant is not None:
                    _close(slot.tenant)
                    slot.tenant = None

    def _enter(self, name: str) -> _Slot:
        with self._lock:
            if self._closed:
                raise RagKVError("The server is closed.")
            slot = self._slots.setdefault(name, _Slot())
            slot.users += 1
            self._slots.move_to_end(name)
            return slot

    def _leave(self, name: str, slot: _Slot) -> None:
        with self._lock:
            slot.users -= 1
            if not slot.users and slot.tenant is None:  # it could not be opened
                self._slots.pop(name, None)
        while (idle := self._longest_idle()) is not None:
            self._close_idle(*idle)

    def _longest_idle(self) -> tuple[str, _Slot] | None:
        """A tenant to be closed because too many are open; counted as used, so that nobody else closes it."""
        with self._lock:
            opened = [one for one in self._slots.items() if one[1].tenant is not None and not one[1].closing]
            idle = next((one for one in opened if not one[1].users), None)
            if self._closed or idle is None or len(opened) <= self._config.open_tenants:
                return None
            idle[1].users += 1
            idle[1].closing = True
            return idle

    def _close_idle(self, name: str, slot: _Slot) -> None:
        with slot.lock:  # who comes meanwhile waits here, and opens it anew
            with self._lock:
                tenant = slot.tenant if slot.users == 1 else None
            if tenant is not None:
                _close(tenant)
            with self._lock:
                slot.tenant = None if tenant is not None else slot.tenant
                slot.users, slot.closing = slot.users - 1, False
                if not slot.users and slot.tenant is None:
                    self._slots.pop(name, None)

    def _opened(self, name: str, quota: Quota) -> Tenant:
        directory = self.directory(name)
        for place in (directory, self.kv_directory(name)):
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
        engine = self._model.with_config(_engine_config(self._config.engine, self.kv_directory(name), name, quota))
        try:
            return Tenant(engine, Collections(directory, engine, self._embedder))
        except BaseException:
            engine.close()
            raise


def _engine_config(config: EngineConfig, directory: Path, name: str, quota: Quota) -> EngineConfig:
    store = replace(config.store, directory=str(directory), tenant=name)
    if quota.disk_bytes is not None:
        store = replace(store, disk_bytes=quota.disk_bytes)
    if quota.memory_bytes is not None:
        store = _with_memory(store, quota.memory_bytes)
    return replace(config, store=store)


def _with_memory(store: StoreConfig, memory_bytes: int) -> StoreConfig:
    reserve = store.memory_reserve_bytes
    return replace(
        store,
        memory_bytes=memory_bytes,
        memory_reserve_bytes=None if reserve is None else min(reserve, memory_bytes),
    )


def _conversations(tenant: Tenant) -> int:
    try:
        return len(tenant.session_ids())
    except SessionUnavailableError:  # where replicas share them, and the server does not answer
        return 0


def _close(tenant: Tenant) -> None:
    try:
        tenant.close()
    except Exception:
        log.exception("tenant_close_failed")


__all__ = ["Tenant", "Tenants"]
