"""The child processes of the stress tests: they write entries that a test can recompute, until they
are killed.
"""

import itertools
import os
import random
from pathlib import Path

from ragkv.config import StoreConfig
from ragkv.store.entry import Entry
from ragkv.store.opening import open_store
from tests.store.entries import IDENTITY, ids_of, make_entry

DISK_BYTES = 6 * 1024**2
# space that may be free in a full tier, because an eviction frees more than needed
LARGEST_BYTES = 1024**2
PER_ROUND = 10_000  # entries of one round


def entry_of(number: int) -> Entry:
    """The entry of this number: 16 to 150 KiB on disk."""
    return make_entry(number, layers=2 + number % 7, tokens=64 + 64 * (number % 8))


def number_of(entry: Entry) -> int:
    """The number of an entry, from its tokens."""
    return entry.info.token_ids[0] // 1000


def config_of(directory: Path, **changes: object) -> StoreConfig:
    settings = {"memory_bytes": 0, "disk_bytes": DISK_BYTES, **changes}
    return StoreConfig(directory=str(directory), **settings)  # type: ignore[arg-type]


def write_for_ever(directory: Path, journal: Path, round_number: int) -> None:
    """Put, delete and read without end. `journal` lists the confirmed steps: `open`, `stored 7`,
    `deleted 7`.
    """
    lines = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def confirm(line: str) -> None:
        os.write(lines, f"{line}\n".encode())

    choose = random.Random(round_number)
    with open_store(config_of(directory)) as store:
        confirm("open")
        for number in itertools.count(round_number * PER_ROUND):
            entry = entry_of(number)
            if choose.random() < 0.3:
                store.put(entry)  # written in the background
            elif store.durable.put(entry):
                confirm(f"stored {number}")
            if choose.random() < 0.2:
                confirm(f"deleting {number}")
                store.delete(entry.info.key)
                confirm(f"deleted {number}")
            lease = store.lease(IDENTITY, ids_of(number, entry.info.tokens))
            if lease is not None:
                with lease:
                    lease.read_layer(0)
