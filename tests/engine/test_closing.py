"""What an engine has opened is closed: when building it fails, when a part fails to close, and when
the process ends.
"""

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ragkv import Engine, EngineConfig, SessionConfig, StoreConfig
from ragkv.errors import StoreLockedError
from ragkv.registry import TIERS, TierRow
from ragkv.store.opening import open_store
from tests import tiny_models
from tests.engine.helpers import A, engine_of
from tests.faults import raising


def test_an_engine_that_cannot_be_built_leaves_its_directory_open_to_others(
    tmp_path: Path,
) -> None:
    own, taken = str(tmp_path / "own"), str(tmp_path / "taken")
    model = tiny_models.model("llama")
    config = EngineConfig(store=StoreConfig(directory=own), session=SessionConfig(directory=taken))
    with open_store(StoreConfig(directory=taken)), pytest.raises(StoreLockedError, match="taken"):
        Engine(model, config=config)
    Engine(model, config=config).close()


def test_an_engine_whose_answers_cannot_be_made_closes_its_store_and_not_a_callers(
    tmp_path: Path,
) -> None:
    config = EngineConfig(store=StoreConfig(directory=str(tmp_path)))
    model = tiny_models.model("llama")
    refused = raising(RuntimeError("no backend"))
    with pytest.raises(RuntimeError, match="no backend"):
        Engine(model, config=config, backend=refused)
    with open_store(config.store) as store:
        with pytest.raises(RuntimeError, match="no backend"):
            Engine(model, config=config, backend=refused, store=store)
        with pytest.raises(StoreLockedError):
            open_store(config.store)


def test_a_tier_that_cannot_be_opened_leaves_no_other_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = StoreConfig(directory=str(tmp_path))
    monkeypatch.setitem(TIERS, "s3", TierRow("directory", f"{__name__}:refusing"))
    with pytest.raises(RuntimeError, match="no server"):
        open_store(config)
    monkeypatch.undo()
    open_store(config).close()


refusing = raising(RuntimeError("no server"))


def test_a_part_that_fails_to_close_keeps_no_other_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = StoreConfig(directory=str(tmp_path))
    engine = engine_of(store=config)
    monkeypatch.setattr(engine.sessions, "close", raising(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        engine.close()
    open_store(config).close()


def test_an_engine_that_is_closed_on_its_own_encoder_thread_gives_its_directory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = StoreConfig(directory=str(tmp_path))
    engine = engine_of(store=config)
    encoder_thread = list[str]()

    def closing(*_: object) -> None:
        encoder_thread.append(threading.current_thread().name)
        engine.close()

    monkeypatch.setattr(engine.entries.encoder, "chunks", closing)
    background = engine.entries.background
    background.add(tuple(A))
    background.flush()
    background.close()  # from here on the encoder's thread has ended
    for thread in threading.enumerate():
        if thread.name == "ragkv-closer":
            thread.join(60)
    assert encoder_thread == ["ragkv-encoder"]
    open_store(config).close()


def test_a_dropped_engine_says_so_and_is_closed_on_a_thread_that_holds_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = StoreConfig(directory=str(tmp_path))
    engine = engine_of(store=config)
    closed_by = list[str]()
    sessions = engine.sessions
    close = sessions.close

    def closing() -> None:
        closed_by.append(threading.current_thread().name)
        close()

    monkeypatch.setattr(sessions, "close", closing)
    del engine
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "ragkv-closer":
            thread.join(60)
    assert closed_by == ["ragkv-closer"]
    assert "dropped without being closed" in caplog.text
    open_store(config).close()


AT_EXIT = """
import sys, weakref
class Owner: pass
first = Owner()
weakref.finalize(first, int)  # so that finalizers run at the end of the process
from ragkv.config import StoreConfig
from ragkv.store.opening import open_store
from tests.store.entries import make_entry
store = open_store(StoreConfig(directory=sys.argv[1]))
owner = Owner()
weakref.finalize(owner, lambda: (store.put(make_entry(1)), store.close()))
"""


def test_at_the_end_of_the_process_a_stores_owner_still_saves_in_it(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", AT_EXIT, str(tmp_path)], check=True, timeout=120)
    assert len(list(tmp_path.glob("entries/*/*.kv"))) == 1
