"""The rules for codecs: the error bound of a decoded layer, and the layers that a codec refuses."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.config import StoreConfig
from ragkv.registry import CODECS
from ragkv.store.codecs import RAW, Codec, codec_of
from ragkv.store.codecs.int8 import Int8Codec
from ragkv.store.entry import Entry, StoredEntry
from ragkv.store.opening import open_store
from ragkv.store.record import OtherVersionError, read_head, record_of
from ragkv.store.stored_form import stored_form

from .entries import IDENTITY, as_stored, make_entry, same, served, with_codec

INT8 = Int8Codec()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# G, T, D, odd ones among them
SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 17))


@pytest.fixture(params=[codec_of(name) for name in CODECS], ids=lambda codec: codec.name)
def codec(request: pytest.FixtureRequest) -> Codec:
    found: Codec = request.param
    return found


def there_and_back(codec: Codec, layer: torch.Tensor) -> torch.Tensor:
    stored = codec.encode(layer)
    assert stored is not None
    layout = codec.layout(tuple(layer.shape), layer.dtype)  # type: ignore[arg-type]
    assert (tuple(stored.shape), stored.dtype, stored.nbytes) == (
        layout.shape,
        layout.dtype,
        codec.nbytes(tuple(layer.shape), layer.dtype),  # type: ignore[arg-type]
    )
    assert stored.is_contiguous()
    return codec.decode(stored, torch.full_like(layer, 77.0))


def half_scales(layer: torch.Tensor) -> torch.Tensor:
    """Half of what int8's scales must be, (2, G, T, D) float64, worked out without it."""
    keys, values = layer.double()
    spread = (keys.amax(1, keepdim=True) - keys.amin(1, keepdim=True)) / 255
    largest = values.abs().amax(2, keepdim=True) / 127
    return torch.stack([spread.expand_as(keys), largest.expand_as(values)]) / 2


def rounding(layer: torch.Tensor) -> torch.Tensor:
    """What rounding to the layer's dtype and working in float32 may add, (2, G, T, D) float64."""
    channel = layer[0].double().abs().amax(1, keepdim=True).expand_as(layer[0])
    token = layer[1].double().abs().amax(2, keepdim=True).expand_as(layer[1])
    size = torch.stack([channel, token])
    info = torch.finfo(layer.dtype)
    return size * (info.eps / 2 + 4 * torch.finfo(torch.float32).eps) + info.smallest_normal


@settings(max_examples=150)
@given(SHAPES, st.sampled_from(DTYPES), st.integers(0, 2**31), st.floats(-4, 4), st.floats(-3, 3))
def test_an_int8_number_comes_back_within_half_a_scale(
    sides: tuple[int, int, int], dtype: torch.dtype, seed: int, offset: float, exponent: float
) -> None:
    random = torch.Generator().manual_seed(seed)
    layer = torch.randn((2, *sides), generator=random) * 10**exponent
    layer = (layer * torch.rand(sides[-1], generator=random) + offset * 10**exponent).to(dtype)
    error = (there_and_back(INT8, layer).double() - layer.double()).abs()
    assert (error <= half_scales(layer) + rounding(layer)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_key_channel_far_from_zero_adds_no_error_to_other_channels(dtype: torch.dtype) -> None:
    layer = torch.randn(2, 1, 50, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    far = layer.clone()
    far[0, :, :, 2] += 64
    near = there_and_back(INT8, layer)
    back = there_and_back(INT8, far)
    assert torch.equal(near[0, :, :, [0, 1, 3]], back[0, :, :, [0, 1, 3]])


@pytest.mark.parametrize("value", [0.0, 3.5, -1e-3, 6e4, 1e-40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_constant_layer_comes_back_unchanged(
    codec: Codec, value: float, dtype: torch.dtype
) -> None:
    layer = torch.full((2, 2, 5, 3), value).bfloat16().to(dtype)
    back = there_and_back(codec, layer)
    assert torch.equal(back[0], layer[0])  # a channel without spread: its lowest value
    assert torch.allclose(back[1].double(), layer[1].double(), rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("sides", list(itertools.product([0, 1, 3], [0, 1, 7], [1, 5])))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_of_any_shape_can_be_stored(
    codec: Codec, sides: tuple[int, int, int], dtype: torch.dtype
) -> None:
    layer = torch.randn(2, *sides).to(dtype)
    back = there_and_back(codec, layer)
    assert back.shape == layer.shape
    assert back.dtype == dtype


def test_a_lossless_codec_returns_every_bit(codec: Codec) -> None:
    # NaN included
    layer = torch.randint(-(2**15), 2**15, (2, 2, 9, 7), dtype=torch.int16).view(torch.bfloat16)
    if codec.lossless:
        assert torch.equal(there_and_back(codec, layer).view(torch.int16), layer.view(torch.int16))
    else:
        finite = torch.randn(2, 2, 9, 7)
        assert not torch.equal(there_and_back(codec, finite), finite)


@pytest.mark.parametrize("place", [0, 1])  # among keys, among values
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rounding_codec_refuses_nan_and_infinities(
    codec: Codec, place: int, value: float, dtype: torch.dtype
) -> None:
    layer = torch.randn(2, 2, 9, 7).to(dtype)
    layer[place, 1, 4, 3] = value
    assert codec.lossless or codec.encode(layer) is None


def test_bfloat16_keeps_the_nearest_number_and_refuses_what_would_become_infinite() -> None:
    layer = torch.randn(2, 2, 9, 7) * 1e3
    back = there_and_back(codec_of("bfloat16"), layer)
    assert torch.equal(back, layer.bfloat16().float())
    half = layer.bfloat16()
    assert torch.equal(there_and_back(codec_of("bfloat16"), half), half)
    layer[1, 1, 8, 6] = torch.finfo(torch.float32).max  # rounds up, beyond the largest bfloat16
    assert codec_of("bfloat16").encode(layer) is None


def test_int8_refuses_float64_and_ranges_beyond_float32() -> None:
    layer = torch.randn(2, 1, 4, 2)
    layer[0, 0, :2, 0] = torch.tensor([3e38, -3e38])
    assert INT8.encode(layer) is None
    assert INT8.encode(torch.randn(2, 1, 4, 2, dtype=torch.float64)) is None


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_an_entry_that_its_codec_refuses_is_stored_raw_under_the_same_identity(dtype: str) -> None:
    entry = make_entry(identity=with_codec("int8", replace(IDENTITY, dtype=dtype)))
    assert stored_form(entry).codec is (RAW if dtype == "float64" else codec_of("int8"))
    entry.kv[1, 0, 0, 1, 1] = torch.nan  # in the second layer alone
    stored_entry = stored_form(entry)
    assert stored_entry.codec is RAW
    assert same(as_stored(entry), entry)
    # an entry of this identity may be rounded: no span of one is exact
    assert not entry.info.lossless


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_layers_of_an_odd_number_of_bytes_keep_their_scales_aligned(tokens: int) -> None:
    info = replace(
        make_entry(1, tokens=tokens, layers=3, identity=with_codec("int8")).info,
        kv_heads=1,
        head_dim=3,
    )
    entry = Entry(info, torch.randn(3, *info.shape).bfloat16())
    stored_entry = stored_form(entry)
    for layer in range(3):
        alone = codec_of("int8").encode(entry.kv[layer])
        assert alone is not None
        assert torch.equal(
            stored_entry.read_layer(layer), INT8.decode(alone, torch.empty_like(entry.kv[layer]))
        )


@pytest.mark.parametrize("name", CODECS)
def test_a_store_serves_its_codec_from_every_tier_and_after_a_restart(
    name: str, tmp_path: Path
) -> None:
    identity = with_codec(name)
    entry = make_entry(1, tokens=64, identity=identity)
    config = StoreConfig(directory=str(tmp_path), codec=name)
    with open_store(config) as store:
        store.put(entry)
        assert served(store, entry)  # from memory
    for _ in range(2):
        with open_store(config) as store:
            assert served(store, entry)  # from disk
            store.flush()
            memory, disk = store.stats().tiers
            assert memory.entries == disk.entries == 1
            assert memory.used_bytes == stored_form(entry).size_bytes
            assert served(store, entry)  # from memory again, promoted in stored form
            for other in set(CODECS) - {name}:
                assert store.lease(with_codec(other), entry.info.token_ids) is None


def test_a_record_in_an_unknown_codec_counts_as_another_version(tmp_path: Path) -> None:
    entry = make_entry(1)

    class Later(Int8Codec):
        name = "later"

    stored = StoredEntry(entry.info, Later(), codec_of("int8").encode(entry.kv[0]).repeat(2, 1))  # type: ignore[union-attr]
    head, layers = record_of(stored)
    (tmp_path / "e").write_bytes(b"".join([head, *layers]))
    with (
        (tmp_path / "e").open("rb") as file,
        pytest.raises(OtherVersionError, match="codec 'later'"),
    ):
        read_head(file.fileno(), entry.info.key)
