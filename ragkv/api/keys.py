"""API keys: made once, shown once, kept as digests; who a request is from.

A key is `rk-ID-SECRET`. Its id is public: it stands in logs and lists, and names the key to revoke. Its secret is 256
random bits, of which the file has the SHA-256 digest alone. A slow hash guards words that people choose, whose space
can be searched; this space cannot, and a slow hash on every request would only help who wants to keep the server busy.

The file is replaced whole, under a lock, mode 0600. A running server looks at its time stamp on every request, so that
a new or a revoked key needs no restart. Once there is a file keys are asked for, also if it has none: revoking the last
key opens nothing.
"""

import dataclasses
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import tempfile
import threading
import time
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from ragkv.config import at_least, build
from ragkv.errors import ConfigError, InputError

SECRET_BYTES = 32
ID_BYTES = 6
TENANT = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")  # a directory's name, on any file system
_KEY = re.compile(r"rk-(?P<id>[0-9a-f]{12})-[A-Za-z0-9_-]{43}")
_NOBODY = "0" * 64  # compared with where no key has the id, so that it takes as long

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Quota:
    """What a tenant may hold; `None`: what the server's settings say, or without limit."""

    disk_bytes: int | None = None  # of its KV, in the disk tier
    memory_bytes: int | None = None  # of its KV, in the memory tier
    documents: int | None = None  # of all its collections
    sessions: int | None = None  # conversations kept

    def __post_init__(self) -> None:
        at_least(self, **{f.name: 0 for f in dataclasses.fields(self)})


@dataclass(frozen=True, slots=True)
class Rate:
    """How much a key may ask; `None`: without limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers, embeddings included

    def __post_init__(self) -> None:
        at_least(self, **{f.name: 1 for f in dataclasses.fields(self)})


@dataclass(frozen=True, slots=True)
class Principal:
    """Who a request is from. Without keys everyone is `ANONYMOUS`."""

    key_id: str
    name: str
    tenant: str
    quota: Quota = field(default_factory=Quota)
    rate: Rate = field(default_factory=Rate)


ANONYMOUS = Principal(key_id="", name="anyone", tenant="")


@dataclass(frozen=True, slots=True)
class Key:
    """A key as it is kept."""

    id: str
    name: str  # what its owner calls it
    tenant: str  # whose documents, sessions and KV it sees; keys of one tenant share them
    digest: str  # SHA-256 of the whole key, hex
    created: float  # seconds since the epoch
    expires: float | None = None  # from then on it is refused; None: never
    rate: Rate = field(default_factory=Rate)

    def is_valid(self, now: float) -> bool:
        """Whether it is accepted."""
        return self.expires is None or now < self.expires


@dataclass(frozen=True, slots=True)
class Book:
    """What the file says."""

    keys: tuple[Key, ...] = ()
    quotas: Mapping[str, Quota] = field(default_factory=dict)  # by tenant

    def principal(self, key: Key) -> Principal:
        """Who asks with `key`."""
        return Principal(key.id, key.name, key.tenant, self.quotas.get(key.tenant, Quota()), key.rate)


class KeyFile:
    """The file of keys, read and changed. Any number of processes may."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Book:
        """What it says; empty if there is none. Raises `ConfigError` if it is damaged or anyone may write to it."""
        try:
            with self.path.open(encoding="utf-8") as file:
                if os.fstat(file.fileno()).st_mode & 0o022:
                    raise ConfigError(f"Others may write to the keys at {self.path}: chmod 600 it, and look who did.")
                values = json.load(file)
            quotas = {tenant: build(Quota, quota) for tenant, quota in values["quotas"].items()}
            return Book(tuple(build(Key, key) for key in values["keys"]), quotas)
        except FileNotFoundError:
            return Book()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"Cannot read the keys at {self.path}: {error}. Restore it, or make new keys.") from error

    def add(
        self,
        name: str,
        tenant: str | None = None,
        quota: Quota | None = None,
        rate: Rate | None = None,
        lifetime_s: float | None = None,
    ) -> tuple[str, Key]:
        """A new key, which is seen this once, and how it is kept.

        `tenant` left out is the key's own. What `quota` says replaces what was said of that tenant before.
        """
        if tenant is not None and not TENANT.fullmatch(tenant):
            raise InputError(f"Tenant {tenant!r} must be 1 to 64 of a-z, 0-9, _ and -, the first a letter or a digit.")
        if not name or len(name) > 200 or not name.isprintable():
            raise InputError(f"A key's name is 1 to 200 printable characters, not {name[:200]!r}.")
        shown: list[str] = []

        def added(book: Book) -> tuple[Book, Key]:
            secret, key = _mint(name, tenant, rate or Rate(), lifetime_s, {known.id for known in book.keys})
            shown.append(secret)
            quotas = dict(book.quotas)
            if quota is not None:
                quotas[key.tenant] = _merged(quotas.get(key.tenant, Quota()), quota)
            return Book((*book.keys, key), quotas), key

        key = self._change(added)
        return shown[0], key

    def revoke(self, key_id: str) -> Key:
        """Refuse a key from now on; raises `InputError` if there is none of that id."""

        def revoked(book: Book) -> tuple[Book, Key]:
            key = _find(book, key_id)
            return Book(tuple(known for known in book.keys if known.id != key_id), book.quotas), key

        return self._change(revoked)

    def rotate(self, key_id: str, grace_s: float = 0.0) -> tuple[str, Key]:
        """A new key in place of one, with its name, tenant and rate; the old is accepted for `grace_s` more."""
        shown: list[str] = []

        def rotated(book: Book) -> tuple[Book, Key]:
            old, now = _find(book, key_id), time.time()
            secret, key = _mint(old.name, old.tenant, old.rate, None, {known.id for known in book.keys})
            shown.append(secret)
            ends = now + grace_s if old.expires is None else min(old.expires, now + grace_s)
            kept = (dataclasses.replace(known, expires=ends) if known is old else known for known in book.keys)
            return Book((*(known for known in kept if known.is_valid(now)), key), book.quotas), key

        key = self._change(rotated)
        return shown[0], key

    def _change(self, change: Callable[[Book], tuple[Book, Key]]) -> Key:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.path}.lock", mode=0o600):
            book, key = change(self.read())
            self._write(book)
        return key

    def _write(self, book: Book) -> None:
        """Replace the file: after a crash it is the old one or the new."""
        values = {
            "keys": [dataclasses.asdict(key) for key in book.keys],
            "quotas": {tenant: dataclasses.asdict(quota) for tenant, quota in book.quotas.items()},
        }
        descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")  # its mode is 0600
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(values, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


class KeyRing:
    """The keys of a running server: the file's, as it is now. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` if the file is there and cannot be read."""
        self._file = KeyFile(path)
        self._lock = threading.Lock()
        self._seen: tuple[int, ...] | None = None
        self._book = Book()
        self._by_id: dict[str, Key] = {}
        self._refresh(_stamp(path), careful=False)

    @property
    def exists(self) -> bool:
        """Whether there is, or was since the start, a file of keys: then a key is asked for."""
        self._look()
        return self._seen is not None

    def principal(self, presented: str) -> Principal | None:
        """Whose key this is; `None`: nobody's, a revoked one or one past its time."""
        self._look()
        match = _KEY.fullmatch(presented)
        key = self._by_id.get(match["id"]) if match else None
        digest = key.digest if key else _NOBODY
        same = hmac.compare_digest(digest, digest_of(presented))  # its time tells nothing of the digest
        return self._book.principal(key) if key is not None and same and key.is_valid(time.time()) else None

    def _look(self) -> None:
        stamp = _stamp(self._file.path)
        if stamp is not None and stamp != self._seen:
            self._refresh(stamp, careful=True)
        elif stamp is None and self._by_id:
            self._accept(Book(), self._seen)  # it was taken away: nobody has a key, and still one is asked for

    def _refresh(self, stamp: tuple[int, ...] | None, careful: bool) -> None:
        try:
            self._accept(self._file.read(), stamp)
        except ConfigError as error:
            if not careful:
                raise
            log.error("keys_unreadable: %s Those known so far stay in force.", error)
            self._seen = stamp  # said once

    def _accept(self, book: Book, stamp: tuple[int, ...] | None) -> None:
        with self._lock:
            self._book, self._by_id = book, {key.id: key for key in book.keys}
            self._seen = stamp


def digest_of(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def _mint(
    name: str, tenant: str | None, rate: Rate, lifetime_s: float | None, taken: typing.Container[str]
) -> tuple[str, Key]:
    while (key_id := secrets.token_hex(ID_BYTES)) in taken:
        pass
    secret, now = f"rk-{key_id}-{secrets.token_urlsafe(SECRET_BYTES)}", time.time()
    expires = None if lifetime_s is None else now + lifetime_s
    return secret, Key(key_id, name, tenant or key_id, digest_of(secret), now, expires, rate)


def _merged(old: Quota, new: Quota) -> Quota:
    said = {name: value for name, value in dataclasses.asdict(new).items() if value is not None}
    return dataclasses.replace(old, **said)


def _find(book: Book, key_id: str) -> Key:
    for key in book.keys:
        if key.id == key_id:
            return key
    raise InputError(f"There is no key {key_id[:40]!r}; `ragkv keys list` shows those there are.")


def _stamp(path: Path) -> tuple[int, ...] | None:
    """What changes when the file does: it is replaced, so its inode too."""
    try:
        found: Any = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


__all__ = ["ANONYMOUS", "Key", "KeyFile", "KeyRing", "Principal", "Quota", "Rate", "digest_of"]
