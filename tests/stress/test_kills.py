"""SIGKILL at random moments while a child writes: wrong bytes are never served, and confirmed
writes are not lost.

The long form: `pytest tests/stress -m slow -s`.
"""

import collections
import functools
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from ragkv.store.opening import open_store
from tests.scheduling.helpers import until
from tests.store.entries import digest, make_entry, read_all

from .writing import (
    DISK_BYTES,
    LARGEST_BYTES,
    PER_ROUND,
    config_of,
    entry_of,
    number_of,
    write_for_ever,
)

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.stress.writing"])


@functools.cache
def expected(number: int) -> str:
    entry = entry_of(number)
    return digest(entry.kv)


def kill_while_writing(
    directory: Path, journal: Path, round_number: int, choose: random.Random
) -> None:
    """Start a writer and kill it within 0.3 s of its third confirmed write; every tenth writer
    while it opens.
    """
    child = FORKSERVER.Process(
        target=write_for_ever, args=(directory, journal, round_number), daemon=True
    )
    child.start()
    writes, delay_s = (0, 0.03) if choose.random() < 0.1 else (3, 0.3)
    until(lambda: journal.exists() and journal.read_text().count("stored") >= writes)
    time.sleep(delay_s * choose.random())
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert child.exitcode == -signal.SIGKILL, "the writer ended without the kill"
    child.close()


def check_after_kill(directory: Path, journal: Path, counts: collections.Counter[str]) -> None:
    """Reopen: served entries are right, confirmed writes are there, counts equal a recount, and the
    store works.
    """
    lines = journal.read_text().splitlines() if journal.exists() else []
    stored = {int(line.split()[1]) for line in lines if line.startswith("stored")}
    deleted = {int(line.split()[1]) for line in lines if line.startswith("deleted ")}
    deleting = {int(line.split()[1]) for line in lines if line.startswith("deleting ")}
    counts["orphans in tmp"] += sum(1 for _ in directory.glob("tmp/*"))
    with open_store(config_of(directory)) as store:
        served = set()
        for info in list(store.contents.infos()):
            lease = store.lease(info.identity, info.token_ids)
            assert lease is not None
            with lease:
                entry = read_all(lease)
            assert digest(entry.kv) == expected(number_of(entry)), "wrong bytes were served"
            served.add(number_of(entry))
        confirmed = stored - deleting
        lost = confirmed - served
        if lost:  # on a fast machine a round overflows the tier, which evicts its oldest entries
            full = DISK_BYTES - store.stats().tiers[0].used_bytes < LARGEST_BYTES
            assert full and max(lost) < min(confirmed & served), (
                "an entry that was confirmed is lost"
            )
        assert not deleted & served, "a deleted entry came back"
        (disk,) = store.stats().tiers
        assert disk.damaged == 0, "a kill left a damaged entry visible"
        assert (
            disk.used_bytes
            == sum(path.stat().st_size for path in directory.glob("entries/*/*"))
            <= DISK_BYTES
        )
        assert not list(directory.glob("tmp/*"))
        probe = make_entry(1)
        assert store.durable.put(probe)
        assert store.delete(probe.info.key)
    counts.update(
        {
            "kills": 1,
            "entries served": len(served),
            "confirmed writes found": len(stored - deleting),
        }
    )
    counts["deletions found"] += len(deleted)
    counts["kills before the store was open"] += "open" not in lines


@pytest.mark.parametrize(
    "kills", [12, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])]
)
def test_wrong_bytes_are_never_served_after_kills_while_writing(tmp_path: Path, kills: int) -> None:
    counts: collections.Counter[str] = collections.Counter()
    choose = random.Random(kills)
    for round_number in range(1, kills + 1):
        journal = tmp_path / f"journal-{round_number}"
        kill_while_writing(tmp_path / "store", journal, round_number, choose)
        if not (tmp_path / "store" / "entries").exists():
            continue  # killed before there was a store
        check_after_kill(tmp_path / "store", journal, counts)
    print(f"\n{dict(counts)}")
    assert counts["confirmed writes found"] > kills
    assert round_number < PER_ROUND
