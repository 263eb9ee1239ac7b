"""`ragkv doctor`."""

from pathlib import Path
from typing import Any

import pytest

from ragkv.cli.doctor import advise
from ragkv.config import EngineConfig, StoreConfig
from ragkv.model import dtype_choice
from ragkv.model.loading import DtypeChoice

from .conftest import Run

GIB = 2**30
MACHINE = {"cores": 2, "threads": 2, "load": 0.5, "gpus": (), "free_memory_bytes": 8 * GIB}
HOME = {
    "folder": "home",
    "documents": 1,
    "unreadable": 0,
    "dtypes": {"float32": 3},
    "has_profile": True,
}


def advice(
    config: EngineConfig | None = None, missing: tuple[str, ...] = (), **found: Any
) -> list[str]:
    """The advice for a good machine and home, but for what was `found`."""
    machine, home = (
        {name: found.get(name, usual[name]) for name in usual} for usual in (MACHINE, HOME)
    )
    return list(advise(config or EngineConfig(), "float32", machine, home, list(missing)))


def test_doctor_describes_machine_packages_and_home(
    run: Run, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run("doctor")
    assert before.code == 0, before.err
    for word in (
        "cpu: ",
        "free memory: ",
        "free disk: ",
        "dtype: float32",
        "documents: none",
        "missing extras: ",
    ):
        assert word in before.out
    run("ingest", documents)
    found = run("doctor", "--json").json
    assert found["home"]["documents"] == 2
    assert found["home"]["dtypes"] == {"float32": found["home"]["entries"]}
    assert "checkpoint" in found["dtype"]
    assert "int8" in run("doctor", "--weights", "int8", "--json").json["dtype"]
    faster = DtypeChoice(
        "bfloat16", "bfloat16, in which this processor is 4.5 times as fast", measured=True
    )
    monkeypatch.setattr(dtype_choice, "choose_dtype", lambda *_: faster)
    assert not any("dtype = auto" in text for text in run("doctor", "--json").json["advice"])
    other = DtypeChoice("float32", "float32, as the settings say")
    monkeypatch.setattr(
        dtype_choice, "choose_dtype", lambda *given: faster if given[2] == "auto" else other
    )
    slow = run("doctor", "--dtype", "float32", "--json").json["advice"]
    assert "dtype = auto the model computes in bfloat16" in slow[0]


def test_a_damaged_entry_is_counted_and_leads_to_advice(
    run: Run, documents: Path, tmp_path: Path
) -> None:
    assert run("ingest", documents).code == 0
    damaged = next((tmp_path / "home/kv/entries").rglob("*.kv"))
    damaged.write_bytes(b"damaged" * 99)
    found = run("doctor", "--json").json
    assert found["home"]["unreadable"] == 1
    assert any("ragkv gc" in text for text in found["advice"])


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"gpus": ("a GPU",)}, "device = cuda"),
        ({"threads": 1}, "torch uses 1 of 2 cores: raise OMP_NUM_THREADS"),
        ({"load": 7.5}, "The processors are full (load 7.5 on 2)"),
        ({"config": EngineConfig(store=StoreConfig(memory_bytes=9 * GIB))}, "swaps"),
        ({"dtypes": {"bfloat16": 3}}, "not reused in float32: 3 entries"),
        ({"has_profile": False}, "ragkv profile"),
        ({"missing": ("pdf", "redis", "dense")}, 'pip install "ragkv[dense,pdf]".'),
    ],
)
def test_what_is_slow_useless_or_not_installed_is_named(found: dict[str, Any], said: str) -> None:
    (text,) = advice(**found)
    assert said in text


def test_more_threads_are_not_advised_on_full_processors() -> None:
    assert advice(load=7.5, threads=1) == []
