"""`ragkv stats`: what the index and the store hold, once or followed while another process writes."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.text import Text

from . import output
from .options import HOME, AsJson, Home, note_writer, require_index
from .output import console, print_json

EVERY_S = 2.0


def stats(
    home: Home = HOME,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every 2 seconds, until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show how much the index and the store hold.

    With `--watch` a terminal shows the present numbers; elsewhere a line is written when they change.
    """
    require_index(home)
    note_writer(home)
    if watch:
        _watch(home, as_json)
    elif as_json:
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


def _watch(home: Path, as_json: bool) -> None:
    """Show the numbers again and again; Ctrl-C ends it, with exit status 0."""
    shown: dict[str, Any] | None = None
    try:
        if console.is_terminal and not console.is_dumb_terminal and not as_json:
            with Live(console=console, auto_refresh=False) as live:
                while True:
                    live.update(_screen(_read(home)), refresh=True)
                    time.sleep(EVERY_S)
        while True:
            found = _read(home)
            if found != shown:
                line = json.dumps(found, ensure_ascii=False) if as_json else f"{_now()} {'; '.join(_lines(found))}"
                print(line, flush=True)
                shown = found
            time.sleep(EVERY_S)
    except KeyboardInterrupt:
        return


def _screen(found: dict[str, Any]) -> Text:
    return Text("\n".join([*_lines(found), f"at {_now()}; Ctrl-C ends."]))


def _now() -> str:
    return time.strftime("%H:%M:%S")
