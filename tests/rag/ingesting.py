"""The child process of the kill tests: it ingests a folder until it is killed, and notes what it
confirms.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ragkv.rag.files
from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.rag import Corpus, FileOptions, FileProgress

CHUNK_TOKENS = 16


def config_of(home: Path, read_only: bool = False) -> EngineConfig:
    return EngineConfig(
        store=StoreConfig(directory=str(home / "kv"), memory_bytes=0, read_only=read_only)
    )


def ingest_once(home: Path, model: Path, folder: Path, journal: Path) -> None:
    """Ingest `folder`. `journal` lists JSON lines: `parsing` a file, `done` with a file, `encoded`
    chunks.
    """
    lines = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(**record: Any) -> None:
        os.write(lines, (json.dumps(record) + "\n").encode())

    _note_parsing(note)

    def on_file(progress: FileProgress) -> None:
        if progress.outcome is not None:
            note(done=progress.outcome.path, status=progress.outcome.status)

    def on_encode(done: int, total: int) -> None:
        note(encoded=done, total=total)

    torch.set_num_threads(1)
    with (
        Engine.from_pretrained(model, config_of(home)) as engine,
        Corpus(engine, home / "index", chunk_tokens=CHUNK_TOKENS) as corpus,
    ):
        corpus.ingest_files([folder], FileOptions(on_file=on_file), on_encode=on_encode)


def _note_parsing(note: Callable[..., None]) -> None:
    real = ragkv.rag.files.load_bytes

    def noting(file: Path, *arguments: Any) -> Any:
        note(parsing=str(file))
        return real(file, *arguments)

    ragkv.rag.files.load_bytes = noting
