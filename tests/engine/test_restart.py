"""After a restart, entries on disk serve the same model under the same settings, and no other."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ragkv import Engine, EngineConfig, PromptConfig, StoreConfig
from ragkv.errors import RagKVError
from tests import tiny_models

from .helpers import A, B, C, Q, close, engine_of, full_prefill, ids, stored


def config(directory: Path, tenant: str = "", **changes: Any) -> EngineConfig:
    return EngineConfig(store=StoreConfig(directory=str(directory), tenant=tenant), **changes)


def test_a_second_engine_on_the_same_directory_finds_the_entries(tmp_path: Path) -> None:
    with Engine(tiny_models.model("llama"), config=config(tmp_path)) as engine:
        engine.prefill(Q, [A, B])  # both missed, encoded in the background
        engine.flush()
        engine.entries.encode([C])
        logits = engine.prefill(Q, [A, B, C], ratio=0.3).logits
    with Engine(tiny_models.model("llama"), config=config(tmp_path)) as engine:
        prefill = engine.prefill(Q, [A, B, C], ratio=0.3)
        assert prefill.reuse.missed_chunks == 0
        assert prefill.reuse.bytes_by_tier["disk"] > 0
        assert torch.equal(prefill.logits, logits)
        assert engine.entries.encode([A, B, C]).present == 3


def other_weights() -> Any:
    model = tiny_models.model("llama")
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[0, 0] += 1e-3
    return model


def test_an_engine_on_other_weights_misses_and_deletes_nothing(tmp_path: Path) -> None:
    with Engine(tiny_models.model("llama"), config=config(tmp_path)) as engine:
        engine.entries.encode([A, B])
    with Engine(other_weights(), config=config(tmp_path)) as engine:
        assert engine.prefill(Q, [A, B]).reuse.missed_chunks == 2
        engine.flush()
        assert engine.entries.delete([A]) == 1  # its own
    with Engine(tiny_models.model("llama"), config=config(tmp_path)) as engine:
        prefill = engine.prefill(Q, [A, B], ratio=1.0)
        assert prefill.reuse.missed_chunks == 0
        close(prefill.logits, full_prefill(ids([A, B]))[0])


def test_gc_deletes_entries_of_other_models_and_no_own_ones(tmp_path: Path) -> None:
    with Engine(other_weights(), config=config(tmp_path)) as engine:
        engine.entries.encode([A, B])
    with Engine(tiny_models.model("llama"), config=config(tmp_path, tenant="other")) as engine:
        engine.entries.encode([A])
    with Engine(tiny_models.model("llama"), config=config(tmp_path)) as engine:
        engine.entries.encode([A, C])
        assert engine.entries.gc() > 0
        assert engine.entries.gc() == 0
        assert engine.entries.encode([A, C]).present == 2
        # ours, and our other tenant's
        assert len(list(tmp_path.glob("entries/*/*.kv"))) == 3


class TestTwoEnginesOnOneDirectory:
    def test_an_engine_that_could_not_be_built_holds_no_lock(self, tmp_path: Path) -> None:
        with pytest.raises(RagKVError):
            engine_of(
                store=StoreConfig(directory=str(tmp_path)), prompt=PromptConfig(system="text")
            )
        engine_of(store=StoreConfig(directory=str(tmp_path))).close()

    def test_a_read_only_engine_sees_what_the_writer_writes_and_writes_nothing(
        self, tmp_path: Path
    ) -> None:
        with engine_of(store=StoreConfig(directory=str(tmp_path))) as writer:
            writer.entries.encode([A])
            with engine_of(store=StoreConfig(directory=str(tmp_path), read_only=True)) as reader:
                assert reader.prefill(Q, [A, B]).reuse.missed_chunks == 1
                reader.flush()
                assert reader.prefill(Q, [A, B]).reuse.missed_chunks == 0
                writer.entries.encode([C])
                assert reader.prefill(Q, [C]).reuse.missed_chunks == 0
            assert stored(writer, B) is None
