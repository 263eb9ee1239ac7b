"""`ragkv doctor`."""

from pathlib import Path
from typing import Any

import pytest

from ragkv.cli.doctor import advise
from ragkv.config import EngineConfig, StoreConfig

from .conftest import Run

GIB = 2**30
FLOPS = {"float32": 90e9, "bfloat16": 20e9}
MACHINE = {"cores": 2, "threads": 2, "load": 0.5, "gpus": (), "flops": FLOPS, "available_bytes": 8 * GIB}
HOME = {"home": "home", "documents": 1, "unreadable": 0, "dtypes": {"float32": 3}, "has_profile": True}


def advice(config: EngineConfig | None = None, missing: tuple[str, ...] = (), **found: Any) -> list[tuple[float, str]]:
    """The advice for a good machine and home, but for what was `found`."""
    machine, home = ({name: found.get(name, usual[name]) for name in usual} for usual in (MACHINE, HOME))
    config = config or EngineConfig()
    dtype = "float32" if config.dtype == "auto" else config.dtype
    return list(advise(config, machine, home, list(missing), dtype, "float32"))


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
    slow = advice(EngineConfig(dtype="bfloat16"), threads=1, dtypes={"bfloat16": 3})
    assert [gain for gain, _ in slow] == [pytest.approx(4.5), 2.0]
    assert "dtype = auto" in slow[0][1] and "OMP_NUM_THREADS" in slow[1][1]


def test_threads_on_full_processors_are_advised_against_and_more_threads_are_not_advised() -> None:
    ((_, text),) = advice(load=7.5)
    assert "2 threads while the processors are full (load 7.5 on 2)" in text and "OMP_NUM_THREADS=1" in text
    assert advice(load=7.5, threads=1) == []


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"gpus": ("a GPU",)}, "device = cuda"),
        ({"config": EngineConfig(store=StoreConfig(memory_bytes=9 * GIB))}, "swaps"),
        ({"dtypes": {"bfloat16": 3}}, "not reused in float32: 3 entries"),
        ({"has_profile": False}, "ragkv profile"),
        ({"missing": ("pdf",)}, 'For PDF files: pip install "ragkv[pdf]".'),
    ],
)
def test_what_is_slow_useless_or_not_installed_is_named(found: dict[str, Any], text: str) -> None:
    ((_, said),) = advice(**found)
    assert text in said
