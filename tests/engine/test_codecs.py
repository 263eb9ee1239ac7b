"""Rules of an engine that rounds its entries: never reported as exact, stored apart, close to the
raw result.
"""

from pathlib import Path

import pytest

from ragkv import StoreConfig
from ragkv.registry import CODECS

from .helpers import PREFIX, A, B, C, Q, close, counts, engine_of, full_prefill, ids

INT8 = StoreConfig(codec="int8")


@pytest.fixture(params=["bfloat16", "int8"])
def rounded(request: pytest.FixtureRequest) -> StoreConfig:
    return StoreConfig(codec=request.param)


def test_a_rounded_chunk_behind_the_prefix_is_fused_not_exact(rounded: StoreConfig) -> None:
    with engine_of() as raw, engine_of(store=rounded) as other:
        for engine in (raw, other):
            engine.entries.encode([A, B])
        assert counts(raw.prefill(Q, [A, B], ratio=0.0).reuse) == (
            len(PREFIX) + len(A),
            len(B),
            0,
            len(Q),
        )
        prefill = other.prefill(Q, [A, B], ratio=0.0)
        # the prefix stays exact: it is raw
        assert counts(prefill.reuse) == (len(PREFIX), len(A) + len(B), 0, len(Q))
        recomputed = other.prefill(Q, [A, B], ratio=0.5, selector="first-k")
        assert len(PREFIX) in recomputed.selected.tolist()  # the first chunk's tokens may be chosen


def test_ratio_one_recomputes_every_rounded_token(rounded: StoreConfig) -> None:
    with engine_of(store=rounded) as engine:
        engine.entries.encode([A, B, C])
        prefill = engine.prefill(Q, [A, B, C], ratio=1.0)
    close(prefill.logits, full_prefill(ids([A, B, C]))[0])


def test_exact_reuse_computes_a_rounded_chunk(rounded: StoreConfig) -> None:
    with engine_of(store=rounded) as engine:
        engine.entries.encode([A])
        prefill = engine.prefill(Q, [A], reuse="prefix")
        assert counts(prefill.reuse) == (len(PREFIX), 0, 0, len(A) + len(Q))
    close(prefill.logits, full_prefill(ids([A]))[0])


def test_engines_of_different_codecs_share_a_directory_but_no_entry(tmp_path: Path) -> None:
    for codec, encoded in [(name, encoded) for encoded in (1, 0) for name in CODECS]:
        store = StoreConfig(directory=str(tmp_path), codec=codec)
        with engine_of(store=store) as engine:
            assert engine.entries.encode([A]).encoded == encoded, codec
    assert len(list(tmp_path.glob("entries/*/*"))) == len(CODECS)


@pytest.mark.parametrize("memory_bytes", [0, 10**6])
def test_bytes_read_are_counted_in_the_codec_they_are_stored_in(
    tmp_path: Path, memory_bytes: int
) -> None:
    store = StoreConfig(directory=str(tmp_path), codec="int8", memory_bytes=memory_bytes)
    with engine_of(store=store) as engine:
        engine.entries.encode([A])
        reuse = engine.prefill(Q, [B, A], ratio=0.0).reuse
        tier = engine.stats().store.tiers[0]
        with engine.parts.store.lease(engine.entries.encoder.identity, tuple(A)) as lease:  # type: ignore[union-attr]
            assert lease.stored_bytes < lease.info.size_bytes  # float32 here: about a quarter
            prefix_bytes = reuse.bytes_by_tier.get("memory", 0) - (
                lease.stored_bytes if memory_bytes else 0
            )
            assert prefix_bytes == len(PREFIX) * lease.info.size_bytes // len(A)
            assert reuse.bytes_by_tier[tier.kind] >= tier.read_bytes == lease.stored_bytes
