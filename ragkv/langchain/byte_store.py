"""`RagKVByteStore`: bytes by key in the disk tier's own layout: one checksummed file a value, whole or not there.

A value is written aside, synced, renamed into place and its directory synced, by the disk tier's `EntryDirectory`.
The file repeats its key and the checksum of its bytes; both are proven when it is read. What fails is logged and is a
miss. It lies in `bytes/` inside the directory given, so an engine's store directory may be shared. One process
writes.
"""

import hashlib
import logging
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash
from langchain_core.stores import ByteStore
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ragkv.store.directory import EntryDirectory

log = logging.getLogger(__name__)


class RagKVByteStore(ByteStore):
    """A durable key-value store; close it, or let it go, to let another process write."""

    def __init__(self, directory: str | Path) -> None:
        """Open or make it. Raises `StoreLockedError` if another process writes there."""
        self._directory = EntryDirectory(Path(directory) / "bytes")
        self._directory.open_for_writing()
        self._shut = weakref.finalize(self, self._directory.release)

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values; `None` for a key that is not there or whose value is damaged."""
        return [self._read(key) for key in keys]

    def mset(self, key_value_pairs: Sequence[tuple[str, bytes]]) -> None:
        """Store the pairs; each is durable when this returns."""
        for key, value in key_value_pairs:
            head = {"key": key, "xxh3": xxhash.xxh3_128_hexdigest(value)}
            record = save({"value": np.frombuffer(value, np.uint8)}, metadata=head)
            self._directory.write(_name(key), [record])

    def mdelete(self, keys: Sequence[str]) -> None:
        """Delete the keys; those that are not there are passed over."""
        for key in keys:
            self._directory.remove(_name(key), durably=True)

    def yield_keys(self, *, prefix: str | None = None) -> Iterator[str]:
        """The keys, in no particular order; each is read off its file."""
        for name, _ in self._directory.scan():
            try:
                with safe_open(self._directory.path(name), framework="np") as file:
                    key = str(file.metadata()["key"])
            except (OSError, SafetensorError, KeyError, TypeError) as error:
                log.warning("A stored value cannot be read (%s); it counts as not there.", error)
                continue
            if prefix is None or key.startswith(prefix):
                yield key

    def close(self) -> None:
        """Let another process write. Twice is harmless."""
        self._shut()

    def _read(self, key: str) -> bytes | None:
        try:
            with safe_open(self._directory.path(_name(key)), framework="np") as file:
                head = file.metadata()
                value: bytes = file.get_tensor("value").tobytes()
            if head["key"] != key or head["xxh3"] != xxhash.xxh3_128_hexdigest(value):
                raise ValueError("its bytes do not have the checksum they were stored with")
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            log.warning("The value of %r is damaged: %s. It counts as not there.", key, error)
            return None
        return value


def _name(key: str) -> str:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()
