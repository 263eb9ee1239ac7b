"""`ragkv stats`: what the index and the store hold, also while another process writes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import output
from .options import HOME, AsJson, Home, note_writer, require_index
from .output import console, print_json


def stats(
    home: Home = HOME,
    as_json: AsJson = False,
) -> None:
    """Show how much the index and the store hold."""
    require_index(home)
    note_writer(home)
    if as_json:
        print_json(_read(home))
    else:
        for line in _lines(_read(home)):
            console.print(line)


def _read(home: Path) -> dict[str, Any]:
    """The numbers of index and store, as `--json` prints them."""
    from ragkv.config import StoreConfig
    from ragkv.retrieval import Index
    from ragkv.store import Store

    with output.quiet("ragkv.retrieval"), Index(home / "index", read_only=True) as index:
        held = index.stats()  # needs no embedder, so a warning about a missing one is suppressed
    settings = StoreConfig(directory=str(home / "kv"), memory_bytes=0, read_only=True)
    with Store.open(settings) as store:
        tiers = store.stats().tiers
        tokens: dict[str, int] = {}  # by dtype
        for info in store.infos():
            tokens[info.identity.dtype] = tokens.get(info.identity.dtype, 0) + info.tokens
    counts = {"tokens": sum(tokens.values()), "tokens_by_dtype": tokens}
    found: dict[str, Any] = output.plain({"index": held, "tiers": tiers, **counts})
    return found


def _lines(found: dict[str, Any]) -> Iterator[str]:
    index = found["index"]
    embedder = index["embedder"] or "none (BM25)"
    yield f"{index['documents']} documents, {index['passages']} passages, embedder: {embedder}"
    dtypes = ", ".join(["", *sorted(found["tokens_by_dtype"])])
    for tier in found["tiers"]:
        held = f"{tier['entries']} entries, {found['tokens']} tokens, {output.size(tier['used_bytes'])}"
        yield f"{tier['kind']}: {held}{dtypes}"
