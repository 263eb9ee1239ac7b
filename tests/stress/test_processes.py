"""Two processes on one directory: a second writer is refused, and a reader never reads
wrong bytes.
"""

import os
import signal
import time
from pathlib import Path

import pytest

from ragkv.errors import StoreLockedError
from ragkv.store.opening import open_store
from tests.scheduling.helpers import until
from tests.store.entries import digest, read_all

from .test_kills import FORKSERVER, expected
from .writing import config_of, number_of, write_for_ever


def test_a_second_process_is_refused_as_writer_and_can_read_next_to_it(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    journal = tmp_path / "journal"
    child = FORKSERVER.Process(target=write_for_ever, args=(directory, journal, 1), daemon=True)
    child.start()
    until(lambda: journal.exists() and "stored" in journal.read_text())
    try:
        with pytest.raises(StoreLockedError, match=rf"another process \(pid {child.pid} on "):
            open_store(config_of(directory))
        served = 0
        with open_store(config_of(directory, read_only=True)) as reader:
            ends = time.monotonic() + 2  # the writer puts, deletes and evicts meanwhile
            while time.monotonic() < ends or served <= 50:
                for info in reader.contents.infos():
                    lease = reader.lease(info.identity, info.token_ids)
                    if lease is not None:  # else it was deleted or evicted since
                        with lease:
                            entry = read_all(lease)
                        assert digest(entry.kv) == expected(number_of(entry))
                        served += 1
            assert reader.stats().tiers[0].damaged == 0
    finally:
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    open_store(config_of(directory)).close()  # the lock died with its holder
