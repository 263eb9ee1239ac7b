"""Readers of published traces, one file for each format; `read_trace` recognises the format."""

from pathlib import Path

from ragkv.errors import InputError

from ..trace import Trace, read_rows
from .agents import read_agents
from .mooncake import read_mooncake
from .ragpulse import RagRequest, read_rag_requests, read_ragpulse


def read_trace(path: Path, block_tokens: int = 16) -> Trace:
    """The trace at `path`: rows.csv, a Mooncake .jsonl, a kv-cache-tester .jsonl(.gz), or RAGPulse's folder.

    Raises `InputError` saying what is wrong with it.
    """
    if not path.exists():
        raise InputError(f"There is no trace at {path}.")
    if path.is_dir():
        return read_ragpulse(path, block_tokens)
    if path.suffix == ".csv":
        return read_rows(path, block_tokens)
    if path.name.endswith((".jsonl.gz", "kv-cache-tester.jsonl")):
        return read_agents(path, block_tokens)
    if path.suffix == ".jsonl":
        return read_mooncake(path, block_tokens)
    raise InputError(
        f"{path} is no known trace: take a .csv, Mooncake's .jsonl, kv-cache-tester's .jsonl.gz or RAGPulse's folder."
    )


__all__ = ["RagRequest", "read_agents", "read_mooncake", "read_rag_requests", "read_ragpulse", "read_trace"]
