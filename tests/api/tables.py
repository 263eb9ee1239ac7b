"""The tables of docs/deploy.md, made from the code. `python -m tests.api.tables` rewrites them."""

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ragkv.api.metrics import Metrics
from ragkv.api.settings import ServeConfig
from ragkv.config import GIB, MIB, EngineConfig
from ragkv.engine import EngineStats
from ragkv.scheduling import QueueStats
from ragkv.store import RemoteStats, StoreStats, TierKind, TierStats

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy.md"
_MARKED = "<!-- {name} -->\n{table}<!-- end of {name} -->"


def settings_table() -> str:
    """Every setting of the server: its name, its default, and its comment in the code."""
    rows = [f"| `{name}` | {default} | {says} |\n" for name, default, says in _settings(ServeConfig, "")]
    return "| setting | default | what |\n|---|---|---|\n" + "".join(rows)


def metrics_table() -> str:
    """Every metric of the server, without those of the process: its name, type, labels and help."""
    rows = []
    tier = TierStats(TierKind.MEMORY, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    server = RemoteStats("closed", True, 0.0, 0, 0, 0, 0, 0, 0.0, 0)
    stats = EngineStats("llama", 1, 1, StoreStats((tier,), 0, 0), QueueStats(0, 0, 0, 0, 0, 0), server)
    metrics = Metrics(lambda: [("", stats, 0)])
    metrics.record_request("/", "GET", 200, 0.0)
    for family in metrics.registry.collect():
        if not family.name.startswith(("process_", "python_")):
            labels = sorted({name for sample in family.samples for name in sample.labels} - {"le"})
            name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
            words = ", ".join(f"`{label}`" for label in labels)
            rows.append(f"| `{name}` | {family.type} | {words} | {family.documentation} |\n")
    return "| metric | type | labels | what |\n|---|---|---|---|\n" + "".join(rows)


def table_of(name: str, text: str) -> str:
    """A table of the document."""
    found = re.search(f"<!-- {name} -->\n(.*?)<!-- end of {name} -->", text, re.DOTALL)
    assert found, f"docs/deploy.md has no place for the table of {name}"
    return found[1]


TABLES = {"settings": settings_table, "metrics": metrics_table}


def _settings(cls: type[Any], path: str) -> Iterator[tuple[str, str, str]]:
    lines = inspect.getsource(cls)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        says = re.search(rf"^    {field.name}: .*?  # (.*)$", lines, re.MULTILINE)
        if hints[field.name] is EngineConfig:
            assert says
            yield f"{path}{field.name}.*", "", f"{says[1]}: `engine.store.codec`, `engine.fusion.ratio` ..."
        elif dataclasses.is_dataclass(hints[field.name]):
            yield from _settings(typing.cast(type[Any], hints[field.name]), f"{path}{field.name}.")
        else:
            assert says, f"{path}{field.name} has no line that says what it is"
            yield f"{path}{field.name}", _shown(field.name, field.default), says[1].replace("|", "or")


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if name.endswith("_bytes") and value % MIB == 0:
        return f"{value // GIB} GiB" if value % GIB == 0 else f"{value // MIB} MiB"
    if isinstance(value, tuple):
        return " ".join(f"`{item}`" for item in value) or "empty"
    if isinstance(value, str):
        return f"`{value}`"
    return str(value) if name == "port" else f"{value:g}" if isinstance(value, float) else f"{value:,}"


def main() -> None:
    text = DEPLOY.read_text("utf-8")
    for name, make in TABLES.items():
        old = _MARKED.format(name=name, table=table_of(name, text))
        text = text.replace(old, _MARKED.format(name=name, table=make()))
    DEPLOY.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
