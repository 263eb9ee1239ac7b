"""The forms of known passages that stood in prompts: what was stored for them is deleted with the passages.

A form is the text of a prompt where a known passage was found, as a chunk of its own. Which passages a form came from
is not kept: forms cost little to encode again, so the deletion of any passage deletes them all.
"""

import contextlib
import json
import logging
import os
import threading
from collections import OrderedDict
from pathlib import Path

from ragkv.engine import Engine
from ragkv.runtime import replace_file

log = logging.getLogger(__name__)

FILE = "forms.jsonl"
MAX_FORMS = 10_000  # forms that are remembered; the KV of the oldest is deleted with them


class Forms:
    """The token ids of all forms, in a file next to the store, so that a restart forgets none. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        directory = engine.config.store.directory
        self._engine = engine
        self._path = None if directory is None or engine.config.store.read_only else Path(directory) / FILE
        self._lock = threading.Lock()
        self._forms: OrderedDict[tuple[int, ...], None] = OrderedDict(dict.fromkeys(self._read()))

    def add(self, token_ids: tuple[int, ...]) -> None:
        """Remember a form before it is used."""
        dropped: list[tuple[int, ...]] = []
        with self._lock:
            if token_ids in self._forms:
                self._forms.move_to_end(token_ids)
                return
            self._forms[token_ids] = None
            if len(self._forms) > MAX_FORMS:  # several at once, because the whole file is written again
                dropped = [self._forms.popitem(last=False)[0] for _ in range(MAX_FORMS // 10)]
                self._write()
            elif self._path is not None:
                self._append(token_ids)
        if dropped:
            self._engine.delete(dropped)

    def delete(self) -> int:
        """Delete the KV of all forms from every tier. Returns how many had KV stored."""
        with self._lock:
            dropped, self._forms = list(self._forms), OrderedDict()
            deleted = self._engine.delete(dropped) if dropped else 0
            if dropped:
                self._write()
        return deleted

    def _append(self, token_ids: tuple[int, ...]) -> None:
        assert self._path is not None
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, json.dumps(token_ids).encode() + b"\n")
            finally:
                os.close(descriptor)
        except OSError as error:
            log.warning(
                "A form is not noted in %s (%s): after a restart its KV outlives its passage.", self._path, error
            )

    def _write(self) -> None:
        if self._path is not None:
            lines = "".join(json.dumps(ids) + "\n" for ids in self._forms)
            replace_file(self._path, lines.encode())

    def _read(self) -> list[tuple[int, ...]]:
        if self._path is None or not self._path.is_file():
            return []
        found = []
        for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError):  # a kill may have cut the last line
                found.append(tuple(int(token) for token in json.loads(line)))
        return [ids for ids in found if ids]


__all__ = ["Forms"]
