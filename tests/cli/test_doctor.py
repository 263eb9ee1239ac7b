"""`ragkv doctor`."""

from dataclasses import replace
from pathlib import Path

import pytest

from ragkv.cli.doctor import Examination, HomeHealth, Machine, advise
from ragkv.config import EngineConfig, StoreConfig

from .conftest import Run

GIB = 2**30
MACHINE = Machine(
    cpu="a processor",
    features=("avx2",),
    cores=2,
    threads=2,
    load=0.5,
    gpus=(),
    flops={"float32": 90e9, "bfloat16": 20e9},
    memory_bytes=16 * GIB,
    available_bytes=8 * GIB,
    disk_free_bytes=GIB,
)
HEALTH = HomeHealth(Path("home"), 1, 2, None, 3, 0, 100, {"float32": 3}, True)


def advice(
    config: EngineConfig | None = None,
    machine: Machine = MACHINE,
    missing: tuple[str, ...] = (),
    health: HomeHealth = HEALTH,
) -> list[tuple[float, str]]:
    config = config or EngineConfig()
    dtype = "float32" if config.dtype == "auto" else config.dtype
    return list(advise(config, Examination(machine, dtype, "why", "float32", health, missing)))


@pytest.fixture
def known_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 is 4.5 times as fast as bfloat16: measuring takes long on a busy machine."""
    monkeypatch.setattr("ragkv.model.cpu.product_speed.product_seconds", lambda _: (1.0, 4.5))


def test_doctor_describes_machine_packages_and_home(run: Run, documents: Path) -> None:
    before = run("doctor")
    assert before.code == 0, before.err
    for word in ("processor:", "float32", "memory:", "disk:", "dtype of", "nothing was ingested", "langchain"):
        assert word in before.out
    run("ingest", documents)
    found = run("doctor", "--json").json
    assert found["home"]["documents"] == 2
    assert found["home"]["dtypes"] == {"float32": found["home"]["entries"]}
    assert found["dtype"] == "float32" and "checkpoint" in found["dtype_why"]
    gains = [one["gain"] for one in found["advice"]]
    assert gains == sorted(gains, reverse=True)
    assert "int8" in run("doctor", "--weights", "int8", "--json").json["dtype_why"]


@pytest.mark.usefixtures("known_speeds")
@pytest.mark.parametrize("of_scores", [False, True])
def test_a_damaged_entry_is_counted_and_leads_to_advice(
    run: Run, documents: Path, tmp_path: Path, of_scores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGKV_FUSION__SELECTOR", "sensitivity")  # which scores chunks
    assert run("ingest", documents).code == 0
    files = (tmp_path / "home/kv/entries").rglob("*.safetensors")
    damaged = next(file for file in files if ("." in file.stem) == of_scores)
    damaged.write_bytes(b"damaged" * 99)
    found = run("doctor", "--json").json
    assert found["home"]["unreadable"] == 1
    assert any("ragkv gc" in one["text"] for one in found["advice"])


def test_a_slow_dtype_of_the_settings_and_unused_cores_are_named_with_their_gain() -> None:
    health = replace(HEALTH, dtypes={"bfloat16": 3})
    slow = advice(EngineConfig(dtype="bfloat16"), replace(MACHINE, threads=1), health=health)
    assert [gain for gain, _ in slow] == [pytest.approx(4.5), 2.0]
    assert "dtype = auto" in slow[0][1] and "OMP_NUM_THREADS" in slow[1][1]


def test_threads_on_full_processors_are_advised_against_and_more_threads_are_not_advised() -> None:
    ((_, text),) = advice(machine=replace(MACHINE, load=7.5))
    assert "2 threads while the processors are full (load 7.5 on 2)" in text and "OMP_NUM_THREADS=1" in text
    assert advice(machine=replace(MACHINE, load=7.5, threads=1)) == []


@pytest.mark.parametrize(
    ("config", "machine", "health", "word"),
    [
        (EngineConfig(), replace(MACHINE, gpus=("a GPU",)), HEALTH, "device = cuda"),
        (EngineConfig(store=StoreConfig(memory_bytes=9 * GIB)), MACHINE, HEALTH, "swaps"),
        (EngineConfig(), MACHINE, replace(HEALTH, dtypes={"bfloat16": 3}), "not reused in float32: 3 entries"),
        (EngineConfig(), MACHINE, replace(HEALTH, has_profile=False), "ragkv profile"),
    ],
)
def test_what_is_slow_or_useless_is_named(
    config: EngineConfig, machine: Machine, health: HomeHealth, word: str
) -> None:
    ((_, text),) = advice(config, machine, health=health)
    assert word in text


def test_a_missing_package_is_named_with_its_extra() -> None:
    ((_, text),) = advice(missing=("pdf",))
    assert text == 'For PDF files: pip install "ragkv[pdf]".'
