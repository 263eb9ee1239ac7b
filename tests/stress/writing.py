"""What the child processes of the stress tests do: write entries anyone can recompute, until they are killed."""

import itertools
import os
import random
from pathlib import Path

from ragkv.config import StoreConfig
from ragkv.store import Entry, Store

from ..store.entries import IDENTITY, ids_of, make_entry

DISK_BYTES = 6 * 1024**2
LARGEST_BYTES = 1024**2  # room that may be left when the tier is full: its evictions free some more than needed
PER_ROUND = 10_000  # numbers of one round's entries


def entry_of(number: int) -> Entry:
    """The entry of this number: 16 to 150 KiB on disk."""
    return make_entry(number, layers=2 + number % 7, tokens=64 + 64 * (number % 8))


def number_of(entry: Entry) -> int:
    """The number of an entry, out of its tokens."""
    return entry.info.token_ids[0] // 1000


def config_of(directory: Path, **changes: object) -> StoreConfig:
    settings = {"memory_bytes": 0, "disk_bytes": DISK_BYTES, **changes}
    return StoreConfig(directory=str(directory), **settings)  # type: ignore[arg-type]


def write_for_ever(directory: Path, diary: Path, round_number: int) -> None:
    """Put, delete and read without end. `diary` says, a line each, what was promised: `open`, `kept 7`, `deleted 7`."""
    lines = os.open(diary, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def promise(line: str) -> None:
        os.write(lines, f"{line}\n".encode())

    choose = random.Random(round_number)
    with Store.open(config_of(directory)) as store:
        promise("open")
        for number in itertools.count(round_number * PER_ROUND):
            entry = entry_of(number)
            if choose.random() < 0.3:
                store.put(entry)  # written some time
            elif store.put_durably(entry):
                promise(f"kept {number}")
            if choose.random() < 0.2:
                promise(f"deleting {number}")
                store.delete_key(entry.info.key)
                promise(f"deleted {number}")
            lease = store.lease(IDENTITY, ids_of(number, entry.info.tokens))
            if lease is not None:
                with lease:
                    lease.read_layer(0)
