"""Moves the scores of a directory of an earlier version out of its entries, once, when it is opened for writing.

Earlier versions kept scores inside an entry and the network that made them in its identity, so that a new network made
all stored KV useless. Nothing is computed: KV and scores are copied from file to file, and every step may be repeated
after a kill. A directory without the file `scores-apart` has not been looked at.
"""

import logging
from dataclasses import replace

from ragkv.errors import EntryDamagedError
from ragkv.runtime import replace_file

from ..directory import EntryDirectory
from ..entry import Entry, EntryInfo, is_scores_key
from ..record import Record, read_info
from .disk_lease import open_lease

log = logging.getLogger(__name__)

MARKER = "scores-apart"


def needs_upgrade(directory: EntryDirectory) -> bool:
    """Whether entries may lie here that an earlier version wrote."""
    return not (directory.root / MARKER).exists()


def upgrade(directory: EntryDirectory) -> None:
    """Remove what no version reads any more, and move the scores of all entries next to them.

    Raises `OSError`; then the next opening goes on.
    """
    _remove_chained(directory)
    if not needs_upgrade(directory):
        return
    keys = [key for key, _ in directory.scan() if not is_scores_key(key)]
    if keys:
        log.warning("Upgrading %d entries in %s: scores are stored next to them now.", len(keys), directory.root)
    moved = sum(_upgraded(directory, key) for key in keys)
    if keys:
        log.warning("Upgraded: the scores of %d entries were moved, and no KV is encoded again.", moved)
    replace_file(directory.root / MARKER, b"")


def _remove_chained(directory: EntryDirectory) -> None:
    """Remove the KV of chunks behind other chunks: it saw texts whose deletion would not find it any more."""
    files = list(directory.root.glob("entries/*/*~*.safetensors"))
    if files:
        log.warning("Removing %d entries of chunks behind other chunks from %s.", len(files), directory.root)
    for file in files:
        file.unlink(missing_ok=True)


def _upgraded(directory: EntryDirectory, key: str) -> bool:
    """Whether the entry of `key` had scores in it; they lie next to it now."""
    path = directory.path(key)
    try:
        info = read_info(path, key)
    except (EntryDamagedError, OSError):  # opening the directory deals with it
        return False
    lease = open_lease(
        path, info.identity, info.token_ids, direct=False, on_read=lambda _: None, on_damage=lambda _: None
    )
    if lease is None:
        return False
    with lease:
        scores, kv_info = lease.sensitivity, _without_scorer(info)
        if scores is not None:
            network = info.identity.scorer or "variance"
            own = Entry.of_scores(kv_info, f"a-{network}", scores)
            if network != "variance" or not directory.path(own.info.key).exists():
                directory.write(own.info.key, Record.of(own).pieces())
        if kv_info.key != key and not directory.path(kv_info.key).exists():
            try:
                entry = replace(lease.read_encoded(), info=kv_info, sensitivity=None)
            except EntryDamagedError:
                return False
            directory.write(kv_info.key, Record.of(entry).pieces())
    if kv_info.key != key:
        directory.remove(key)
    return scores is not None


def _without_scorer(info: EntryInfo) -> EntryInfo:
    identity = info.identity.of_kv
    return replace(info, key=identity.key(info.token_ids), identity=identity)
