"""API keys: the file that stores them as digests, and the keys of a running server.

A key is `rk-ID-SECRET`. The id is public: it appears in logs and lists, and names the key to
revoke. The secret is 256 random bits, and the file holds only the SHA-256 digest of the whole key:
a slow hash protects what can be guessed.

The file is replaced as a whole, under a lock, with mode 0600. A running server checks the file's
time stamp on every request, so new and revoked keys need no restart. Once there is a key file, a
key is required, even if the file is empty: revoking the last key does not open the server.
"""

import dataclasses
import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from filelock import FileLock

from ragkv.config import TENANT, at_least
from ragkv.errors import ConfigError, InputError
from ragkv.runtime import DAMAGED, make_private_folder, replace_file
from ragkv.runtime.setting_values import build

SECRET_BYTES = 32
ID_BYTES = 6

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Quota:
    """What a tenant may hold; `None`: the server's setting, or no limit."""

    # of its documents, with passages and vectors, and of its KV together
    disk_bytes: int | None = None
    memory_bytes: int | None = None  # of its KV, in the memory tier
    documents: int | None = None  # of all its collections
    sessions: int | None = None  # stored conversations that a client named
    collections: int | None = None

    def __post_init__(self) -> None:
        at_least(self, **{f.name: 0 for f in dataclasses.fields(self)})


@dataclass(frozen=True, slots=True)
class RateLimit:
    """How much a key may use per minute; `None`: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers, embeddings included

    def __post_init__(self) -> None:
        at_least(self, **{f.name: 1 for f in dataclasses.fields(self)})


@dataclass(frozen=True, slots=True)
class Principal:
    """The client that sends a request. It is `ANONYMOUS` where no keys are used."""

    key_id: str
    name: str
    tenant: str
    quota: Quota = field(default_factory=Quota)
    rate: RateLimit = field(default_factory=RateLimit)


ANONYMOUS = Principal(key_id="", name="anyone", tenant="")


@dataclass(frozen=True, slots=True)
class Key:
    """A key as it is stored."""

    id: str
    name: str  # for people
    tenant: str  # whose documents, sessions and KV it sees; keys of one tenant share them
    digest: str  # SHA-256 of the whole key, hex
    created: float  # seconds since the epoch
    expires: float | None = None  # seconds since the epoch; None: never
    rate: RateLimit = field(default_factory=RateLimit)

    def is_valid(self, now: float) -> bool:
        """Whether the key is accepted at the time `now`."""
        return self.expires is None or now < self.expires


@dataclass(slots=True)
class KeyFileContent:
    """The keys of a file, and the quotas by tenant."""

    keys: list[Key] = field(default_factory=list)
    quotas: dict[str, Quota] = field(default_factory=dict)


class KeyFile:
    """The file of keys. Any number of processes may read and change it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> KeyFileContent:
        """The content; empty without a file. Raises `ConfigError` if it is damaged or others may
        write to it.
        """
        try:
            with self.path.open(encoding="utf-8") as file:
                if os.fstat(file.fileno()).st_mode & 0o022:
                    raise ConfigError(
                        "other users may write to it. Run chmod 600, and check who did"
                    )
                values = json.load(file)
            quotas = {tenant: build(Quota, quota) for tenant, quota in values["quotas"].items()}
            return KeyFileContent([build(Key, key) for key in values["keys"]], quotas)
        except FileNotFoundError:
            return KeyFileContent()
        except (OSError, *DAMAGED) as error:
            raise ConfigError(
                f"Cannot read the keys at {self.path}: {error}. Restore it, or make new keys."
            ) from error

    def add(
        self,
        name: str,
        tenant: str | None = None,
        quota: Quota | None = None,
        rate: RateLimit | None = None,
        lifetime_s: float | None = None,
    ) -> tuple[str, Key]:
        """Add a key. Returns its text, which is not stored, and the key as it is stored.

        `tenant` left out gives the key a tenant of its own; then its name must be new. The values
        set in `quota` replace the tenant's old ones.
        """
        if tenant is not None and not TENANT.fullmatch(tenant):
            raise InputError(
                f"Tenant {tenant!r} must be 1 to 64 of a-z, 0-9, _ and -, the first a letter or "
                "a digit."
            )
        if not name or len(name) > 200 or not name.isprintable():
            raise InputError(f"A key's name is 1 to 200 printable characters, not {name[:200]!r}.")
        key_id = secrets.token_hex(ID_BYTES)
        now = time.time()
        text = f"rk-{key_id}-{secrets.token_urlsafe(SECRET_BYTES)}"
        expires = None if lifetime_s is None else now + lifetime_s
        key = Key(
            key_id, name, tenant or key_id, digest_of(text), now, expires, rate or RateLimit()
        )
        with self._edit() as content:
            for old in content.keys:
                if tenant is None and old.name == name and old.is_valid(now):
                    raise InputError(
                        f"There is a key named {name!r} already, {old.id} of tenant "
                        f"{old.tenant}. Use another name for "
                        f"a new tenant, or `--tenant {old.tenant}` for a second key of this one."
                    )
            content.keys.append(key)
            if quota is not None:
                changes = {
                    name: value
                    for name, value in dataclasses.asdict(quota).items()
                    if value is not None
                }
                before = content.quotas.get(key.tenant, Quota())
                content.quotas[key.tenant] = dataclasses.replace(before, **changes)
        return text, key

    def revoke(self, key_id: str) -> Key:
        """Remove a key; raises `InputError` if there is none of that id."""
        with self._edit() as content:
            for key in content.keys:
                if key.id == key_id:
                    content.keys.remove(key)
                    return key
        raise InputError(
            f"There is no key {key_id[:40]!r}; `ragkv keys list` shows those there are."
        )

    @contextmanager
    def _edit(self) -> Iterator[KeyFileContent]:
        """The content to change; it is written at the end of the block, unless the block raises."""
        make_private_folder(self.path.parent)
        with FileLock(f"{self.path}.lock", mode=0o600):
            content = self.read()
            yield content
            replace_file(self.path, json.dumps(dataclasses.asdict(content), indent=1).encode())


@dataclass(frozen=True, slots=True)
class _Keys:
    """What one state of the file says."""

    by_digest: Mapping[str, Key]
    quotas: Mapping[str, Quota]  # by tenant
    stamp: tuple[int, ...] | None  # of that state; None: there was never a file

    @classmethod
    def of(cls, content: KeyFileContent, stamp: tuple[int, ...] | None) -> Self:
        """What a content says."""
        return cls({key.digest: key for key in content.keys}, content.quotas, stamp)


class KeyRing:
    """The keys of a running server, reread when the file changes."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` if the file exists and cannot be read."""
        self._file = KeyFile(path)
        stamp = _stamp(path)
        self._known = _Keys.of(self._file.read(), stamp)

    @property
    def exists(self) -> bool:
        """Whether there is a key file, or was one since the server started: then a key is
        required.
        """
        self._refresh()
        return self._known.stamp is not None

    def principal(self, text: str) -> Principal | None:
        """The owner of the key `text`; `None` if the key is unknown, revoked or expired."""
        self._refresh()
        known = self._known  # of one state of the file, whatever other threads read meanwhile
        # The time of this look-up tells at most something of a digest, from which no key follows.
        key = known.by_digest.get(digest_of(text))
        if key is None or not key.is_valid(time.time()):
            return None
        return Principal(
            key.id, key.name, key.tenant, known.quotas.get(key.tenant, Quota()), key.rate
        )

    def _refresh(self) -> None:
        stamp = _stamp(self._file.path)
        known = self._known
        if stamp == known.stamp:
            return
        if stamp is None:  # the file was removed: no key is valid, and a key is still required
            self._known = _Keys.of(KeyFileContent(), known.stamp)
            return
        try:
            self._known = _Keys.of(self._file.read(), stamp)
        except ConfigError as error:
            log.error("keys_unreadable: %s The keys known so far stay valid.", error)
            self._known = dataclasses.replace(known, stamp=stamp)  # log it once


def digest_of(key: str) -> str:
    """The digest that is stored instead of the key."""
    return hashlib.sha256(key.encode()).hexdigest()


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Changes whenever the file does; the inode too, because the file is replaced. `None` without a
    file.
    """
    with suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns, found.st_size
    return None
