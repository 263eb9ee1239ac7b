"""Tenants: each has its own engine on the one loaded model, its own collections, and its own
directory.

A tenant is opened at its first use. When too many are open, the one that was idle longest is
closed. A use keeps a tenant open. The keys of stored entries are salted with the tenant's name,
and the entries lie in the tenant's directory alone: no tenant can find, count or evict another
tenant's entries.
"""

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

from ragkv.chat import ChatEngine
from ragkv.config import TENANT, EngineConfig
from ragkv.engine import Engine
from ragkv.errors import InputError, SessionUnavailableError
from ragkv.home import KnownHome
from ragkv.rag import Corpus, splitter_of
from ragkv.retrieval import Embedder, Splitter
from ragkv.runtime import Check, Closing, OpenPool, acquired, make_private_folder, no_check
from ragkv.runtime.processor import cores
from ragkv.scheduling import IdleTime
from ragkv.sessions import Session, SessionInfo
from ragkv.vllm.front import VllmBackend, VllmServer

from .documents.collections import Collections, collection_pool
from .documents.deletions import DeletionFollower
from .full_disk import Reserve
from .keys import Principal, Quota
from .limits import Held, check_quota
from .metrics import TenantStats
from .settings import QuotaConfig, ServeConfig

FIRST_LOOK_S = 0.1  # a request that waits for known passages asks so often whether it should end
_NAMED = "named-"  # Sessions that a client named have this prefix; others are found by their text.


class Tenant(Closing):
    """One open tenant: engine, collections, sessions and quotas."""

    def __init__(
        self, engine: Engine, chat: ChatEngine, collections: Collections, quotas: QuotaConfig
    ) -> None:
        self.engine = engine
        self.chat = chat
        self.collections = collections
        self._preparing = threading.Semaphore(max(1, cores() // 2))
        self._quotas = quotas
        kv_directory = engine.config.store.directory
        assert kv_directory is not None  # every tenant has one
        calls = collections.texts, collections.delete_traces, collections.tidy
        self._follower = DeletionFollower(collections.journal, engine, Path(kv_directory), *calls)
        self._follower.start()

    @contextmanager
    def preparing(self, check: Check) -> Iterator[None]:
        """Find, render and tokenize a prompt inside the block: few of a tenant at once, and few
        ahead of the model.
        """
        with acquired(self._preparing, check):
            self.engine.parts.scheduler.wait_for_room(check)
            yield

    def unread_passages(self, check: Check) -> tuple[str, ...]:
        """A note, if some passages are not looked for in messages. Waits until all have been read
        for the first time.
        """
        known = self.collections.known_passages
        while not known.read.wait(FIRST_LOOK_S):
            check()
        return known.notes

    def engine_session_id(self, session_id: str) -> str:
        """The engine's id of the session that the client calls `session_id`."""
        return _NAMED + session_id

    def session(self, session_id: str) -> Session:
        """The session that the client calls `session_id`, new or stored."""
        return self.engine.session(self.engine_session_id(session_id))

    def has_session(self, session_id: str) -> bool:
        """Whether the client's session of that id has turns."""
        return self.engine.sessions.has(self.engine_session_id(session_id))

    def check_quota(self, principal: Principal, what: Held, held: int, more: int) -> None:
        """Raise `ApiError` 403 if the tenant, which holds `held`, may not have `more`."""
        check_quota(principal, what, held, more, self._quotas)

    def check_session_quota(self, principal: Principal, session_id: str) -> None:
        """Raise `ApiError` 403 if the client's session of that id is a new one, and one too many.

        First turns that run at the same time do not see each other. So a tenant may exceed it by as
        many sessions as it may have requests at once.
        """
        if not self.has_session(session_id):
            self.check_quota(principal, "sessions", self.session_count(), 1)

    def session_count(self) -> int:
        """How many of the client's sessions have turns."""
        return sum(name.startswith(_NAMED) for name in self.engine.sessions.ids())

    def sessions(self, session_ids: Sequence[str]) -> Sequence[SessionInfo]:
        """The client's sessions of these ids that have turns, the last used first."""
        infos = self.engine.sessions.list(map(self.engine_session_id, session_ids))
        return [replace(info, session_id=info.session_id.removeprefix(_NAMED)) for info in infos]

    def last_sessions(self, limit: int) -> Sequence[str]:
        """The client's ids of the `limit` sessions that were used last, the last one first."""
        named = (name for name in self.engine.sessions.ids() if name.startswith(_NAMED))
        return [name.removeprefix(_NAMED) for name in islice(named, limit)]

    @property
    def encodes(self) -> bool:
        """Whether KV is computed in the background, waits for that, or is looked for."""
        return self.collections.resumes or self.engine.entries.background.busy

    def close(self) -> None:
        """Write everything and close. Chunks that wait for their KV stay misses."""
        self._follower.close()
        self.collections.close()
        self.engine.close()


class Tenants(Closing):
    """The tenants of one server."""

    def __init__(
        self,
        config: ServeConfig,
        engine: Engine,
        embedder: Embedder | None,
        vllm: VllmServer | None = None,
    ) -> None:
        """`engine` has the loaded model, and is closed with this object. `vllm` computes the
        answers.
        """
        self.embedder = embedder
        self._backend = None if vllm is None else VllmBackend.on(vllm)
        self._config = config
        self._engine = engine
        # Names of tenants whose passages have KV, or wait for it. To see that, all are read.
        self._resumed = set[str]()
        self._tenants = OpenPool[str, Tenant](config.open_tenants, self._close)
        self._collections = collection_pool(config.open_collections)
        self.reserve = Reserve(Path(config.home))
        self.reserve.keep()

    @property
    def idle_time(self) -> IdleTime:
        """When no answer runs on the model, of any tenant."""
        return self._engine.parts.idle_time

    @property
    def splitter(self) -> Splitter | None:
        """What splits the documents of all tenants in another process; `None`: it cannot be sent to
        one.
        """
        splitter = splitter_of(self._engine, KnownHome.at(self._config.home, self._config.model))
        return splitter if self._engine.model.count_tokens.can_be_pickled else None

    @contextmanager
    def use(self, principal: Principal, check: Check = no_check) -> Iterator[Tenant]:
        """The principal's tenant, open until the block ends. Blocks while the tenant is opened or
        closed, and while another is closed for it; raises what `check` raises meanwhile.
        """
        name = principal.tenant
        opened = self._tenants.use(name, lambda: self._open(name, principal.quota), check)
        with opened as tenant:
            yield tenant

    def opened(self) -> dict[str, Tenant]:
        """The open tenants by name, for reading only: any of them may be closed at any time."""
        return self._tenants.opened()

    def stats(self) -> Sequence[TenantStats]:
        """The stats of the open tenants. Opens no tenant, and is fast."""
        return [
            TenantStats(name, one.engine.stats(), _session_count(one))
            for name, one in self.opened().items()
        ]

    def free_disk(self, tenant: Tenant, check: Check, deletes: bool) -> bool:
        """Give up KV because the disk is full: the tenant's own, or that of others if it has none.
        Work that `deletes` may also use the reserve. Returns whether any space was freed.
        """
        check()
        others = (one for one in self.opened().values() if one is not tenant)
        return any(one.engine.parts.store.limits.free_disk() for one in (tenant, *others)) or (
            deletes and self.reserve.give_up()
        )

    def close(self) -> None:
        """Write everything and close all tenants, then the model."""
        self._tenants.close()
        self._collections.close()
        self._engine.close()

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

    def _open(self, name: str, quota: Quota) -> Tenant:
        directory = self._directory(name)
        kv_directory = self._kv_directory(name)
        for place in (directory, kv_directory):
            make_private_folder(place)
        config = _engine_config(self._config.engine, kv_directory, name, quota)
        with ExitStack() as opened:
            engine = self._engine.with_config(config, self._backend)
            opened.callback(engine.close)
            home = KnownHome.at(self._config.home, self._config.model)
            open_corpus = functools.partial(Corpus, engine, embedder=self.embedder, home=home)
            pool = self._collections
            chat = ChatEngine(engine)
            known = self._config.limits.known_chars
            collections = Collections(
                directory, open_corpus, engine, pool, self.reserve, chat, known
            )
            opened.callback(collections.close)
            tenant = Tenant(engine, chat, collections, self._config.quotas)
            opened.callback(tenant.close)
            if name not in self._resumed:
                collections.resume()
                self._resumed.add(name)
            opened.pop_all()
        return tenant

    def _close(self, tenant: Tenant) -> None:
        if tenant.encodes:  # the rest is found when it is opened again
            self._resumed.discard(tenant.engine.config.store.tenant)
        tenant.close()


def _engine_config(config: EngineConfig, directory: Path, name: str, quota: Quota) -> EngineConfig:
    """The config of a tenant's engine: its directory, its name, and its quota in place of the
    server's bytes.
    """
    own = {
        name: value
        for name in ("disk_bytes", "memory_bytes")
        if (value := getattr(quota, name)) is not None
    }
    return replace(
        config, store=replace(config.store, directory=str(directory), tenant=name, **own)
    )


def _session_count(tenant: Tenant) -> int | None:
    try:
        return tenant.session_count()
    # replicas share the sessions, and the Redis server does not answer
    except SessionUnavailableError:
        return None
