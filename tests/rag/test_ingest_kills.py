"""SIGKILL at random moments of an ingestion: what was confirmed stays, and at most one file is read
twice.

The long form, ten kills: `pytest tests/rag/test_ingest_kills.py -m slow`.
"""

import collections
import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ragkv import Engine
from ragkv.rag import Corpus
from tests.cli.conftest import model_folder  # noqa: F401 - a fixture

from .ingesting import CHUNK_TOKENS, config_of, ingest_once

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.rag.ingesting"])
FILES = 20
WORDS = "the mill of marl makes paper and rope was founded by ada quill in 1820"


def fill(folder: Path) -> None:
    choose = random.Random(1)
    folder.mkdir()
    for number in range(FILES):
        words = [choose.choice(WORDS.split()) for _ in range(20 + 10 * (number % 3))]
        (folder / f"{number:02}.txt").write_text(" ".join(words))
        os.utime(folder / f"{number:02}.txt", (1e9, 1e9))


def read(journal: Path) -> list[dict[str, Any]]:
    text = journal.read_text() if journal.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def start(home: Path, model: Path, folder: Path, journal: Path) -> Any:
    child = FORKSERVER.Process(target=ingest_once, args=(home, model, folder, journal), daemon=True)
    child.start()
    return child


def kill_after(child: Any, journal: Path, lines: int) -> None:
    """Kill the child as soon as its journal has that many lines."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and len(read(journal)) < lines:
        time.sleep(0.0005)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert child.exitcode == -signal.SIGKILL, "the ingestion ended without the kill"


def check_confirmed(home: Path, model: Path, lines: list[dict[str, Any]]) -> None:
    """Every confirmed file is in the index as it was read, and every confirmed chunk is stored."""
    done = [line["done"] for line in lines if "done" in line]
    encoded = max((line["encoded"] for line in lines if "encoded" in line), default=0)
    with (
        Engine.from_pretrained(model, config_of(home, read_only=True)) as engine,
        Corpus(engine, home / "index", chunk_tokens=CHUNK_TOKENS) as corpus,
    ):
        for path in done:
            document = corpus.index.contents.document(path)
            assert document is not None, f"{path} was confirmed and is lost"
            assert document.text == Path(path).read_text()
        (disk,) = (tier for tier in engine.stats().store.tiers if tier.kind == "disk")
        assert (disk.entries >= encoded, disk.damaged) == (True, 0)


@pytest.mark.parametrize(
    "kills", [1, pytest.param(10, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])]
)
def test_an_ingestion_goes_on_after_kills_and_reads_at_most_one_file_again_for_each(
    model_folder: Path,  # noqa: F811
    tmp_path: Path,
    kills: int,
) -> None:
    folder = tmp_path / "docs"
    home = tmp_path / "home"
    choose = random.Random(kills)
    fill(folder)
    parsed: collections.Counter[str] = collections.Counter()
    for number in range(kills):
        journal = tmp_path / f"journal-{number}"
        # A run writes a line or two for each file, then one for each chunk that earlier runs left.
        most = 3 * FILES if number == 0 else FILES
        kill_after(start(home, model_folder, folder, journal), journal, choose.randint(1, most))
        lines = read(journal)
        check_confirmed(home, model_folder, lines)
        parsed.update(line["parsing"] for line in lines if "parsing" in line)
    journal = tmp_path / "journal-last"
    child = start(home, model_folder, folder, journal)
    child.join(240)
    assert child.exitcode == 0
    lines = read(journal)
    parsed.update(line["parsing"] for line in lines if "parsing" in line)
    check_confirmed(home, model_folder, lines)
    repeated = sum(parsed.values()) - FILES
    print(f"\n{kills} kills, {FILES} files, {repeated} read again, {lines[-1]['total']} chunks")
    assert len(parsed) == FILES
    assert repeated <= kills
    assert max(parsed.values()) <= 1 + kills
