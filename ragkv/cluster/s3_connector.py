"""Entries in a bucket of an S3-compatible store (obstore).

Such a store has no limit of bytes and does not record use. A lifecycle rule of the bucket, which
goes by age, limits it.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, cast

from ragkv.config import S3Config
from ragkv.errors import MissingExtraError, RemoteError
from ragkv.store.entry import EntryKey
from ragkv.store.record import CHECKSUM_CHARS, Bytes
from ragkv.store.tiers.stats import TierKind

from .connector import HEAD_BYTES, Connector

try:
    import obstore
    from obstore.store import S3Store
except ImportError as error:
    raise MissingExtraError("obstore", "s3", "An S3 tier") from error

_PAGE = 1000  # An answer lists so many objects.


class S3Connector(Connector):
    """One tenant's entries in one bucket."""

    kind = TierKind.S3

    def __init__(self, config: S3Config, tenant: str) -> None:
        """Connects to nothing yet. `tenant` is the tenant's part of the paths."""
        self._root = f"{config.prefix}/{tenant}/"
        location = {"endpoint": config.endpoint}
        # else the environment's
        location = {name: value for name, value in location.items() if value is not None}
        timeout = timedelta(seconds=config.timeout_s)
        self._store = S3Store(
            config.bucket,
            config=cast(Any, location),
            client_options={
                "timeout": timeout,
                "connect_timeout": timeout,
                "allow_http": (config.endpoint or "").startswith("http://"),
            },
            retry_config={"max_retries": 0, "retry_timeout": timedelta(0)},
        )
        self._pool = ThreadPoolExecutor(config.connections, thread_name_prefix="ragkv-s3")

    def find(self, keys: Sequence[EntryKey]) -> list[Bytes | None]:
        start = partial(self.get, layer_group=0, stop=HEAD_BYTES)
        return [start(keys[0])] if len(keys) == 1 else list(self._pool.map(start, keys))

    def get(
        self, key: EntryKey, layer_group: int, start: int = 0, stop: int | None = None
    ) -> Bytes | None:
        wanted: Any = {"offset": start} if stop is None else (start, stop)
        with self._call():
            try:
                found = obstore.get(
                    self._store, self._path(key, layer_group), options={"range": wanted}
                )
                return memoryview(found.bytes())
            except FileNotFoundError:
                return None

    def put(self, key: EntryKey, values: Sequence[Bytes]) -> bool:
        for layer_group in range(len(values) - 1, -1, -1):  # the head last
            with self._call():
                value = bytes(values[layer_group])
                obstore.put(self._store, self._path(key, layer_group), value, use_multipart=False)
        return True

    def delete(self, key: EntryKey, content_digest: bytes | None = None) -> bool:
        # S3 cannot compare and delete in one step: a rewrite right now is lost
        if content_digest is not None:
            found = self.get(key, 0, 0, CHECKSUM_CHARS)
            if found is not None and bytes(found) != content_digest:
                return False
        there = self.exists(key)
        with self._call():  # the head first, so that no lookup finds a part
            obstore.delete(self._store, [self._path(key, 0)])
            rest = [
                item["path"]
                for page in obstore.list(self._store, self._folder(key))
                for item in page
            ]
            if rest:
                obstore.delete(self._store, rest)
        return there

    def all_keys(self) -> Iterator[EntryKey]:
        with self._call():
            for page in obstore.list(self._store, self._root, chunk_size=_PAGE):
                for item in page:
                    *_, text, layer_group = item["path"].split("/")
                    key = EntryKey.from_text(text)
                    # else a part, or another program's object
                    if key is not None and layer_group == f"{0:04d}":
                        yield key

    def close(self) -> None:
        self._pool.shutdown()

    @contextmanager
    def _call(self) -> Iterator[None]:
        """One exchange: every error in it is a `RemoteError`. obstore's timeout includes the
        answer's body.
        """
        try:
            yield
        except RemoteError:
            raise
        # obstore raises one class for most errors; only the text tells a timeout
        except Exception as error:
            text = str(error)
            timed_out = "timed out" in text or "timeout" in text.lower()
            first_line = text.partition("\n")[0]
            raise RemoteError(f"s3: {type(error).__name__}: {first_line}", timed_out) from error

    def _folder(self, key: EntryKey) -> str:
        return f"{self._root}{key.digest[:2]}/{key.to_text()}/"

    def _path(self, key: EntryKey, layer_group: int) -> str:
        return f"{self._folder(key)}{layer_group:04d}"
