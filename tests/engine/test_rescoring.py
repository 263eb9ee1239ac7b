"""Stored chunks are scored by a new network from their KV: nothing is lost or encoded, and requests go on."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ragkv import Engine, EngineConfig, FusionConfig, StoreConfig
from ragkv.errors import CancelledError, InputError, StoreReadOnlyError
from ragkv.fusion.learned import ScoreModel, shape_of
from ragkv.scheduling.encoding import Encoder
from tests import tiny_models

from .helpers import A, B, C, Q, engine_of, stored

CHUNKS = [A, B, C]


def network(engine: Engine, seed: int = 0) -> ScoreModel:
    torch.manual_seed(seed)
    made = ScoreModel(*shape_of(engine.model.adapter))
    torch.nn.init.normal_(made.name.weight)
    made.set_teacher(engine.model.adapter.model)
    return ScoreModel.from_bytes(made.to_bytes())


def kv_files(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.glob(f"entries/*/{'?' * 64}.safetensors")}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(Encoder, "batch_tokens", 8)  # a batch a chunk
    store, fusion = StoreConfig(directory=str(tmp_path)), FusionConfig(selector="sensitivity")
    with engine_of(store=store, fusion=fusion) as engine:
        engine.warm(CHUNKS)
        yield engine


def test_no_entry_is_lost_or_encoded_and_later_requests_use_the_new_scores(engine: Engine, tmp_path: Path) -> None:
    before, encoder = kv_files(tmp_path), engine.entries.encoder
    report = engine.entries.rescore(network(engine), CHUNKS)
    assert (report.scored, report.present, report.unreadable, report.left) == (3, 0, 0, 0)
    assert kv_files(tmp_path) == before and len(before) == 3
    warmed = engine.warm(CHUNKS)
    assert (warmed.encoded, warmed.present, warmed.scored) == (0, 3, 0)
    assert encoder.scorer is not None and encoder.scorer.network_digest
    prefill = engine.prefill(Q, CHUNKS, ratio=0.3)
    assert (prefill.reuse.selector, prefill.reuse.missed_chunks) == ("sensitivity", 0)


def test_a_later_engine_on_the_directory_uses_the_network(engine: Engine, tmp_path: Path) -> None:
    engine.entries.rescore(network(engine), CHUNKS)
    used = engine.entries.encoder.scores_identity
    found = [engine.store.scores(used, tuple(chunk)) for chunk in CHUNKS]
    engine.close()
    with engine_of(store=StoreConfig(directory=str(tmp_path))) as again:
        assert again.entries.encoder.scores_identity == used
        for chunk, scores in zip(CHUNKS, found, strict=True):
            assert scores is not None and torch.equal(again.store.scores(used, tuple(chunk)), scores)  # type: ignore[arg-type]


def test_requests_are_served_meanwhile_with_the_old_scores(engine: Engine) -> None:
    before = engine.prefill(Q, CHUNKS, ratio=0.3)
    seen = []

    def on_progress(done: int, total: int) -> None:
        prefill = engine.prefill(Q, CHUNKS, ratio=0.3)
        seen.append((done, total))
        assert (prefill.reuse.selector, prefill.reuse.notes) == ("sensitivity", before.reuse.notes)
        assert torch.equal(prefill.selected, before.selected) and torch.equal(prefill.logits, before.logits)

    engine.entries.rescore(network(engine), CHUNKS, on_progress)
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_interrupted_work_keeps_the_old_scores_and_goes_on_where_it_ended(engine: Engine, tmp_path: Path) -> None:
    old, calls = engine.entries.encoder.scorer, iter(range(9))

    def check() -> None:
        if next(calls) == 2:
            raise CancelledError("enough")

    report = engine.entries.rescore(network(engine), CHUNKS, check=check)
    assert (report.scored, report.left) == (2, 1)
    assert engine.entries.encoder.scorer is old
    assert not list(tmp_path.glob("ragkv-scores*"))
    report = engine.entries.rescore(network(engine), CHUNKS)
    assert (report.scored, report.present) == (1, 2)


def test_chunks_that_are_not_named_are_scored_too(engine: Engine) -> None:
    assert engine.entries.rescore(network(engine), [A]).scored == 3


def test_scores_are_those_that_ingest_would_make(engine: Engine, tmp_path: Path) -> None:
    engine.entries.rescore(network(engine), CHUNKS)
    used = engine.entries.encoder.scores_identity
    rescored = [engine.store.scores(used, tuple(chunk)) for chunk in CHUNKS]
    engine.delete(CHUNKS)
    assert not list(tmp_path.glob("entries/*/*"))  # the old and the new scores are gone with their entries
    engine.close()
    with engine_of(store=StoreConfig(directory=str(tmp_path))) as again:
        assert again.warm(CHUNKS).encoded == 3
        for chunk, before in zip(CHUNKS, rescored, strict=True):
            made = again.store.scores(used, tuple(chunk))
            assert before is not None and made is not None
            torch.testing.assert_close(made, before, rtol=1e-2, atol=1e-2)


def test_a_damaged_entry_is_counted_and_the_others_are_scored(engine: Engine, tmp_path: Path) -> None:
    key = engine.entries.encoder.identity.key(tuple(B))
    (path,) = tmp_path.glob(f"entries/*/{key.to_text()}.safetensors")
    engine.close()
    data = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    at, _ = json.loads(data[8:header])["layer.0002"]["data_offsets"]
    data[header + at] ^= 1
    path.write_bytes(data)
    with engine_of(store=StoreConfig(directory=str(tmp_path), memory_bytes=0)) as again:
        report = again.entries.rescore(network(again), CHUNKS)
        assert (report.scored, report.unreadable) == (2, 1)
        assert stored(again, B) is None


def test_gc_drops_scores_that_are_not_in_use_and_keeps_the_others(engine: Engine) -> None:
    engine.entries.rescore(network(engine), CHUNKS)
    used = engine.entries.encoder.scores_identity
    assert engine.entries.gc() > 0
    assert all(engine.store.scores(used, tuple(chunk)) is not None for chunk in CHUNKS)
    assert all(stored(engine, chunk) is not None for chunk in CHUNKS)
    assert engine.entries.gc() == 0


def test_a_store_that_is_open_for_reading_only_is_refused(engine: Engine, tmp_path: Path) -> None:
    engine.close()
    reading = StoreConfig(directory=str(tmp_path), read_only=True)
    with engine_of(store=reading) as reader, pytest.raises(StoreReadOnlyError, match="scored anew"):
        reader.entries.rescore(network(reader))


def test_a_network_of_other_weights_is_refused(engine: Engine) -> None:
    with Engine(tiny_models.model("qwen2")) as other, pytest.raises(InputError, match="cannot be used"):
        other.entries.rescore(network(engine))


def test_with_learned_scores_switched_off_it_is_refused() -> None:
    fusion = FusionConfig(learned_scores=False)
    with engine_of(fusion=fusion) as engine, pytest.raises(InputError, match="switched off"):
        engine.entries.rescore(network(engine))


def test_a_memory_store_needs_no_directory() -> None:
    with Engine(tiny_models.model("llama"), config=EngineConfig()) as engine:
        engine.warm(CHUNKS)
        assert engine.entries.rescore(network(engine)).scored == 3
        assert engine.warm(CHUNKS).scored == 0
