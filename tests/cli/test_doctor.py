"""`ragkv doctor`."""

import dataclasses
from pathlib import Path

import pytest

from ragkv.cli import examination
from ragkv.cli.examination import Advice, HomeHealth, Machine, Package
from ragkv.config import EngineConfig, StoreConfig

from .conftest import Run

GIB = 2**30
MACHINE = Machine(
    cpu="a processor",
    features=("avx2",),
    cores=2,
    threads=2,
    gpus=(),
    float32_flops=90e9,
    bfloat16_flops=20e9,
    memory_bytes=16 * GIB,
    available_bytes=8 * GIB,
    disk_free_bytes=GIB,
    disk_write_bytes_per_s=1e9,
    disk_read_bytes_per_s=2e9,
)
HEALTH = HomeHealth(Path("home"), 1, 2, None, 3, 0, 100, {"float32": 3}, True, ())


def advice(
    config: EngineConfig | None = None,
    machine: Machine = MACHINE,
    packages: tuple[Package, ...] = (),
    health: HomeHealth = HEALTH,
) -> list[Advice]:
    return list(examination._advice(config or EngineConfig(), "float32", machine, packages, health))


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
    assert found["machine"]["disk_read_bytes_per_s"] > 0
    gains = [one["gain"] for one in found["advice"]]
    assert gains == sorted(gains, reverse=True)


def test_a_damaged_entry_is_counted_and_leads_to_advice(run: Run, documents: Path, tmp_path: Path) -> None:
    run("ingest", documents)
    entry = next((tmp_path / "home/kv/entries").rglob("*.safetensors"))
    entry.write_bytes(b"damaged" * 99)
    found = run("doctor", "--json").json
    assert found["home"]["unreadable"] == 1
    assert any("ragkv gc" in one["text"] for one in found["advice"])


def test_a_machine_with_nothing_to_change_gets_no_advice() -> None:
    assert advice() == []


def test_a_slow_dtype_of_the_settings_and_unused_cores_are_named_with_their_gain() -> None:
    slow = advice(EngineConfig(dtype="bfloat16"), dataclasses.replace(MACHINE, threads=1))
    assert [one.gain for one in slow] == [pytest.approx(4.5), 2.0]
    assert "dtype = auto" in slow[0].text and "OMP_NUM_THREADS" in slow[1].text


@pytest.mark.parametrize(
    ("config", "machine", "health", "word"),
    [
        (EngineConfig(), dataclasses.replace(MACHINE, gpus=("a GPU",)), HEALTH, "device = cuda"),
        (EngineConfig(store=StoreConfig(memory_bytes=9 * GIB)), MACHINE, HEALTH, "swaps"),
        (EngineConfig(), dataclasses.replace(MACHINE, disk_read_bytes_per_s=50e6), HEALTH, "50 MB/s"),
        (EngineConfig(), MACHINE, dataclasses.replace(HEALTH, dtypes={"bfloat16": 3}), "cannot be reused in float32"),
        (EngineConfig(), MACHINE, dataclasses.replace(HEALTH, profiles=False), "ragkv profile"),
    ],
)
def test_what_is_slow_or_useless_is_named(
    config: EngineConfig, machine: Machine, health: HomeHealth, word: str
) -> None:
    (found,) = advice(config, machine, health=health)
    assert word in found.text


def test_a_missing_package_is_named_with_its_extra() -> None:
    (found,) = advice(packages=(Package("pdf", "PDF files", ("pypdf",), {}),))
    assert found.text == 'For PDF files: pip install "ragkv[pdf]".'


def test_a_home_that_cannot_be_written_still_gets_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(examination.tempfile, "TemporaryFile", refuse)
    assert examination._disk_rates(tmp_path) == (None, None)
