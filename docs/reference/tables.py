"""The tables of docs/reference/settings.md and metrics.md, made from the code: `python -m
docs.reference.tables`.
"""

import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ragkv.api.metrics import Metrics, TenantStats
from ragkv.api.settings import SHARED, ServeConfig
from ragkv.config import GIB, MIB, EngineConfig
from ragkv.engine_stats import EngineStats
from ragkv.runtime.setting_values import is_setting
from ragkv.scheduling import QueueStats
from ragkv.store.tiers import RemoteStats, StoreStats, TierKind, TierStats

DOCS = Path(__file__).parents[1]
_MARKED = "<!-- {name} -->\n{table}<!-- end of {name} -->"


def engine_table() -> str:
    """Every setting that the library, the commands and the server share."""
    return _table([*_settings(ServeConfig, "", SHARED), *_settings(EngineConfig)])


def server_table() -> str:
    """Every setting of the server alone."""
    own = [
        field.name
        for field in dataclasses.fields(ServeConfig)
        if field.name not in (*SHARED, "engine")
    ]
    return _table(_settings(ServeConfig, "serve.", own))


def metrics_table() -> str:
    """Every metric of the server, without those of the process: its name, type, labels and help."""
    rows = []
    tier = TierStats(TierKind.MEMORY, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    server = RemoteStats(True, 0.0, 0, 0, 0)
    stats = EngineStats(
        "llama",
        1,
        1,
        "float32",
        "",
        StoreStats((tier,), 0, 0),
        QueueStats(0, 0, 0, 0, 0, 0),
        server,
    )
    vllm: Any = SimpleNamespace(failure=lambda: None)
    metrics = Metrics(lambda: [TenantStats("", stats, 0)], vllm=vllm)
    metrics.requests.labels("/", "GET", "200").observe(0.0)
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
    assert found, f"the document has no place for the table of {name}"
    return found[1]


TABLES = {
    "settings": (DOCS / "reference" / "settings.md", engine_table),
    "server settings": (DOCS / "reference" / "settings.md", server_table),
    "metrics": (DOCS / "reference" / "metrics.md", metrics_table),
}


def _table(rows: Iterable[tuple[str, str, str]]) -> str:
    lines = [f"| `{name}` | {default} | {says} |\n" for name, default, says in rows]
    return "| setting | default | what |\n|---|---|---|\n" + "".join(lines)


def _settings(
    cls: type[Any], path: str = "", names: Collection[str] = ()
) -> Iterator[tuple[str, str, str]]:
    """The settings of a dataclass, or those of `names`: name, default, and the comment in
    the code.
    """
    comments = _comments(cls)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if (names and field.name not in names) or not is_setting(field):
            continue
        kinds = (hints[field.name], *typing.get_args(hints[field.name]))
        group = next((kind for kind in kinds if is_group(kind)), None)
        name = f"{path}{field.name}"
        if group is None or group is not hints[field.name]:
            says = comments.get(field.name)
            assert says, f"{name} has no comment that says what it is"
            yield name, _shown(field.name, field.default), says.replace("|", "or")
        if group is not None:
            yield from _settings(group, f"{name}.")


def _comments(cls: type[Any]) -> dict[str, str]:
    """The comment of each field of a class: the lines above it, then what stands behind it."""
    found = {}
    above: list[str] = []
    for line in inspect.getsource(cls).splitlines():
        if comment := re.fullmatch(r"    # (.*)", line):
            above.append(comment[1])
        elif field := re.match(r"    (\w+): .*?(?:  # (.*))?$", line):
            found[field[1]] = " ".join([*above, field[2] or ""]).strip()
            above = []
        else:
            above = []
    return found


def is_group(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


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
        return "empty" if not value else f"`{value}`" if value.isprintable() else json.dumps(value)
    return (
        str(value) if name == "port" else f"{value:g}" if isinstance(value, float) else f"{value:,}"
    )


def main() -> None:
    for name, (path, make) in TABLES.items():
        text = path.read_text("utf-8")
        old = _MARKED.format(name=name, table=table_of(name, text))
        path.write_text(text.replace(old, _MARKED.format(name=name, table=make())), "utf-8")


if __name__ == "__main__":
    main()
