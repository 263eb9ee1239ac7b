"""Readings of the replica that stays, every few seconds: memory, threads, descriptors, files; and of /livez."""

import csv
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import redis

from ragkv.config import MIB
from tests.api.attacks.helpers import Responses, livez_status

from .world import World

LIVEZ_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Reading:
    """One moment."""

    second: float
    rss_mib: float
    descriptors: int
    threads: int
    children: int
    kv_files: int  # in the KV directory of the replica that stays
    kv_mib: float
    home_files: int  # in the home that the replicas share, without KV
    home_mib: float
    redis_mib: float
    redis_keys: int


NAMES = tuple(field.name for field in fields(Reading) if field.name != "second")


class Readings:
    """Takes readings on a thread of its own while the block runs, and writes each one to a CSV file."""

    def __init__(self, world: World, path: Path, every_s: float) -> None:
        self._world, self._path, self._every_s = world, path, every_s
        self.taken: list[Reading] = []
        self.livez = Responses()
        self._stop = threading.Event()
        self._began = time.monotonic()
        self._threads = [threading.Thread(target=self._read), threading.Thread(target=self._probe)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def quarters(self, name: str) -> list[float]:
        """The median of each quarter of the time; nothing if there are too few readings."""
        values = [getattr(reading, name) for reading in self.taken]
        size = len(values) // 4
        return [statistics.median(values[n * size : (n + 1) * size]) for n in range(4)] if size else []

    def progress(self) -> str:
        if not self.taken:
            return ""
        last = self.taken[-1]
        return (
            f"RSS {last.rss_mib:.0f} MiB, {last.descriptors} descriptors, {last.threads} threads, "
            f"{last.kv_files} + {last.home_files} files, Redis {last.redis_mib:.0f} MiB"
        )

    def _read(self) -> None:
        with self._path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["second", *NAMES])
            writer.writeheader()
            while not self._stop.is_set():
                reading = self._reading()
                self.taken.append(reading)
                writer.writerow(asdict(reading))
                file.flush()
                self._stop.wait(self._every_s)

    def _reading(self) -> Reading:
        staying, home = self._world.staying, self._world.home
        kv_files, kv_bytes = size_of(home / "kv-stays")
        home_files, home_bytes = size_of(home, skip=lambda name: name.startswith("kv-"))
        with redis.Redis(unix_socket_path=self._world.redis.server.socket) as client:
            redis_bytes, keys = client.info("memory")["used_memory"], client.dbsize()
        return Reading(
            round(time.monotonic() - self._began, 1),
            round(staying.rss_bytes() / MIB, 1),
            staying.descriptors(),
            staying.threads(),
            len(staying.children()),
            kv_files,
            round(kv_bytes / MIB, 1),
            home_files,
            round(home_bytes / MIB, 1),
            round(redis_bytes / MIB, 1),
            keys,
        )

    def _probe(self) -> None:
        port = self._world.staying.process.port
        while not self._stop.is_set():
            began = time.monotonic()
            self.livez.add(livez_status(port), time.monotonic() - began)
            self._stop.wait(LIVEZ_EVERY_S)


def size_of(folder: Path, skip: Callable[[str], bool] = lambda _: False) -> tuple[int, int]:
    """The number of files below a folder, and their bytes. `skip` says which of its own entries are left out."""
    files = size = 0
    for parent, folders, names in os.walk(folder):
        if Path(parent) == folder:
            folders[:] = [name for name in folders if not skip(name)]
        for name in names:
            try:
                size += (Path(parent) / name).stat().st_size
            except OSError:  # deleted meanwhile
                continue
            files += 1
    return files, size
