"""`RagKVByteStore`: bytes by key in the layout of the disk tier. Each value is one checksummed file.

The disk tier's `EntryDirectory` writes a temporary file, syncs it, renames it and syncs the directory, so a file is
complete or absent. The file holds its key and a checksum of its bytes, and both are checked when it is read. A failure
is logged and counts as a miss. The files are in `bytes/` inside the given directory, so an engine may use the same
directory. Only one process may write.
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
    """A durable key-value store. Another process can write once this one is closed or garbage-collected."""

    def __init__(self, directory: str | Path) -> None:
        """Open or create the store. Raises `StoreLockedError` if another process writes there."""
        self._directory = EntryDirectory(Path(directory) / "bytes")
        self._directory.open_for_writing()
        self._release = weakref.finalize(self, self._directory.release)

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values, with `None` for a key that is absent or whose value is damaged."""
        return [self._read(key) for key in keys]

    def mset(self, key_value_pairs: Sequence[tuple[str, bytes]]) -> None:
        """Store the pairs. All are durable when this returns."""
        for key, value in key_value_pairs:
            head = {"key": key, "xxh3": xxhash.xxh3_128_hexdigest(value)}
            record = save({"value": np.frombuffer(value, np.uint8)}, metadata=head)
            self._directory.write(_name(key), [record])

    def mdelete(self, keys: Sequence[str]) -> None:
        """Delete the keys. Absent keys are ignored."""
        for key in keys:
            self._directory.remove(_name(key), durably=True)

    def yield_keys(self, *, prefix: str | None = None) -> Iterator[str]:
        """The keys in no particular order, each read from its file."""
        for name, _ in self._directory.scan():
            try:
                with safe_open(self._directory.path(name), framework="np") as file:
                    key = str(file.metadata()["key"])
            except (OSError, SafetensorError, KeyError, TypeError) as error:
                log.warning("A stored value cannot be read (%s). It counts as a miss.", error)
                continue
            if prefix is None or key.startswith(prefix):
                yield key

    def close(self) -> None:
        """Let another process write. May be called twice."""
        self._release()

    def _read(self, key: str) -> bytes | None:
        try:
            with safe_open(self._directory.path(_name(key)), framework="np") as file:
                head = file.metadata()
                value: bytes = file.get_tensor("value").tobytes()
            if head["key"] != key or head["xxh3"] != xxhash.xxh3_128_hexdigest(value):
                raise ValueError("its checksum is wrong")
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            log.warning("The value of %r is damaged: %s. It counts as a miss.", key, error)
            return None
        return value


def _name(key: str) -> str:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()
