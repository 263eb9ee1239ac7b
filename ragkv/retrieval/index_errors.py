"""What SQLite's errors become, and what to do about them."""

import sqlite3
from pathlib import Path

from ragkv.errors import StoreError, StoreReadOnlyError


def told(error: sqlite3.Error, directory: Path | None) -> StoreError:
    """The error that a caller gets, of the index in `directory`."""
    why = str(error)
    if "readonly" in why:
        return StoreReadOnlyError(f"The index at {directory} cannot be written: {why}.")
    if "disk is full" in why:
        hint = "Free some space: the index is as it was before."
    elif "not a database" in why or "malformed" in why:
        hint = "The file is damaged: delete the directory and ingest again."
    else:
        hint = (
            "Check that the directory can be read and written, and that no other process locks it."
        )
    return StoreError(f"The index at {directory} failed: {why}. {hint}")
