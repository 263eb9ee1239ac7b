"""Views of layers give the same results as the layers themselves; a soft cap is computed in
float32.
"""

from typing import Any

import pytest
import torch

from ragkv.model import Adapter, Rows, attention, decoding_attention, layer_views, layers
from ragkv.model.cpu.int8 import round_weights
from ragkv.model.decode.batching import DecodeRow, decode_rows
from ragkv.model.probe import adapt, full_pass
from tests import tiny_models

TOKENS = torch.tensor(tiny_models.tokens(29, seed=3))
# Fused projections, norms before heads are split, results that are multiplied, attention and MLP
# next to each other.
NOT_PLAIN = ("phi3", "gpt_neox", "olmo2", "stablelm", "granite", "cohere2")


def computed(adapter: Adapter) -> list[torch.Tensor]:
    """Logits of a full prefill, of a step of one prompt, and of a step of two."""
    kvs = [adapter.new_kv(len(TOKENS) + 2) for _ in range(2)]
    prefills = [adapter.logits(full_pass(adapter, TOKENS, kv)) for kv in kvs]
    for kv in kvs:
        kv.length = len(TOKENS)
    alone = decode_rows(adapter, [DecodeRow(kvs[0], token=3)])
    return [*prefills, alone, decode_rows(adapter, [DecodeRow(kv, token=5) for kv in kvs])]


class TestPlainLayers:
    """Layers of usual parts run without torch's calls between these."""

    @pytest.mark.parametrize("weights", ["plain", "int8"])
    @pytest.mark.parametrize("family", tiny_models.FAMILIES)
    def test_calling_parts_directly_changes_no_bit(self, family: str, weights: str) -> None:
        model = tiny_models.model(family)
        if weights == "int8":
            round_weights(model)
        adapter = adapt(model)
        plain = adapter._plain
        assert (plain is not None) is (family not in NOT_PLAIN)
        directly = computed(adapter)
        adapter._plain = None
        assert all(torch.equal(*pair) for pair in zip(directly, computed(adapter), strict=True))

    @pytest.mark.parametrize(
        "part", ["mlp.down_proj", "mlp", "self_attn.q_proj", "self_attn", "input_layernorm", ""]
    )
    @pytest.mark.parametrize("weights", ["plain", "int8"])
    def test_hooks_are_called_also_those_that_come_later(self, part: str, weights: str) -> None:
        model = tiny_models.model("qwen2")
        if weights == "int8":
            round_weights(model)
        adapter = adapt(model)
        before = computed(adapter)
        calls = list[int]()
        handle = (
            model.model.layers[1]
            .get_submodule(part)
            .register_forward_hook(lambda *_: calls.append(1))
        )
        assert all(torch.equal(*pair) for pair in zip(before, computed(adapter), strict=True))
        assert len(calls) == 4  # two prefills and two steps
        handle.remove()
        computed(adapter)
        assert len(calls) == 4

    def test_layers_with_other_results_or_of_several_kinds_stay_as_they_are(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = tiny_models.model("llama")
        assert adapt(model)._plain is not None
        real = layers.PlainLayer.__call__
        with monkeypatch.context() as patch:
            patch.setattr(layers.PlainLayer, "__call__", lambda *given: real(*given) * 1.001)
            assert adapt(model)._plain is None
        model.model.layers[1].mlp = type("Other", (type(model.model.layers[1].mlp),), {})(
            model.config
        )
        assert adapt(model)._plain is None


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_an_mlp_in_tiles_gives_equal_results(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapt(tiny_models.model(family))
    whole = adapter.logits(full_pass(adapter, TOKENS, adapter.new_kv(len(TOKENS))))
    monkeypatch.setattr(layers, "TILE_ROWS", 8)
    tiled = adapter.logits(full_pass(adapter, TOKENS, adapter.new_kv(len(TOKENS))))
    torch.testing.assert_close(tiled, whole, atol=1e-4, rtol=1e-4)


def test_experts_are_not_tiled() -> None:
    def tiled(family: str) -> bool:
        mlp: Any = adapt(tiny_models.model(family)).layers[-1]._modules.get("mlp")
        return isinstance(mlp, layer_views.InTiles)

    assert tiled("llama")
    assert not tiled("mixtral")
    assert not tiled("qwen3_moe")


class TestBlocks:
    """Dense rows share a block."""

    def test_blocks_cover_every_row_once_and_read_up_to_its_position(self) -> None:
        places = sorted({7 * i % 900 for i in range(140)} | set(range(950, 1100)))
        blocks = attention.cut_blocks(places, None, 64)
        assert [row for block in blocks for row in range(block.start, block.stop)] == list(
            range(len(places))
        )
        assert all(block.low == 0 and block.high == places[block.stop - 1] + 1 for block in blocks)

    def test_a_window_limits_the_first_key_of_a_block(self) -> None:
        (block,) = attention.cut_blocks([100, 101, 102], 10, 64)
        assert (block.low, block.high) == (91, 103)

    def test_scattered_rows_form_smaller_blocks_than_dense_rows(self) -> None:
        dense, scattered = (
            attention.cut_blocks(list(range(0, 400 * step, step)), None, 96) for step in (1, 8)
        )
        assert max(block.stop - block.start for block in dense) == 96
        # 34 rows x 265 positions: within 96 squared
        assert max(block.stop - block.start for block in scattered) == 34

    def test_far_behind_the_start_scattered_rows_fill_the_tiles_of_the_kernel(self) -> None:
        places = list(range(3000, 4000, 8))
        rows = {
            group: attention.cut_blocks(places, None, 96, group)[0].stop for group in (1, 2, 3, 6)
        }
        assert rows == {1: 34, 2: 96, 3: 64, 6: 34}
        short = attention.cut_blocks(places, 600, 96, 3)
        assert short[0].stop == 34  # in a window they would span half of what they read

    @pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
    def test_cached_masks_equal_new_ones(
        self, kept_bytes: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(attention, "CACHED_BYTES", kept_bytes)
        generator = torch.Generator().manual_seed(0)
        positions = torch.tensor([0, 3, 4, 9, 20, 21, 22, 40])
        q_rot = torch.randn((1, 4, 8, 16), generator=generator)
        k_rot, v = (torch.randn((1, 2, 50, 16), generator=generator) for _ in range(2))
        rows = Rows.of(positions)
        for _ in range(2):
            out = attention.attend(q_rot, k_rot, v, rows, 12, 0.25)
            for row, position in enumerate(positions.tolist()):
                keys = slice(max(0, position - 11), position + 1)
                one = attention.attend_one(
                    q_rot[:, :, row : row + 1], k_rot[:, :, keys], v[:, :, keys], None, 0.25
                )
                torch.testing.assert_close(out[:, :, row : row + 1], one)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (12, None), (40, None), (None, 2.0)])
@pytest.mark.parametrize("heads", [2, 6, 34])
def test_rows_of_a_step_attend_to_nothing_behind_themselves(
    window: int | None, softcap: float | None, heads: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    q_rot = torch.randn((1, heads, 11, 16), generator=generator)
    k_rot, v = (torch.randn((1, 2, 64, 16), generator=generator) for _ in range(2))
    out = decoding_attention.attend_decoding(
        q_rot, k_rot, v, Rows.span(22, 33, q_rot.device), window, 0.25, softcap
    )
    for row, stop in enumerate(range(23, 34)):
        own = (q_rot[:, :, row : row + 1], k_rot[:, :, :stop], v[:, :, :stop])
        torch.testing.assert_close(
            out[:, :, row : row + 1], attention.attend_one(*own, window, 0.25, softcap)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (14, 2)])
def test_rows_of_a_step_have_the_bits_that_each_has_alone(
    heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    """From 193 keys on MKL adds in another order for another number of keys."""
    generator = torch.Generator().manual_seed(0)
    k_rot, v = (
        torch.randn((1, kv_heads, 1088, 64), generator=generator).to(dtype) for _ in range(2)
    )

    def unequal(stop: int) -> bool:
        q_rot = torch.randn((1, heads, 4, 64), generator=generator).to(dtype)
        spans = [(stop - 4, stop), *((at, at + 1) for at in range(stop - 4, stop))]
        queries = (q_rot, *torch.split(q_rot, 1, dim=2))
        together, *alone = (
            decoding_attention.attend_decoding(q, k_rot, v, Rows.span(*span, q.device), None, 0.125)
            for q, span in zip(queries, spans, strict=True)
        )
        return not torch.equal(together, torch.cat(alone, dim=2))

    if any(map(unequal, range(64, 1088, 64))):
        pytest.skip("here rows change each other's sums, which the trial of a step finds")
    assert [stop for stop in range(180, 400) if unequal(stop)] == []


@pytest.mark.parametrize("positions", [(5,), (1, 2, 5, 9)])
def test_products_of_a_soft_cap_are_computed_in_float32(
    positions: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn((1, heads, rows, 8), generator=generator).bfloat16()
        for heads, rows in ((4, len(positions)), (2, 10), (2, 10))
    )
    rows = Rows.of(torch.tensor(positions))
    monkeypatch.setattr(attention, "multiplies_bfloat16", lambda: False)
    found = attention.attend(q, k, v, rows, None, 0.35, 3.0)
    wanted = attention.attend(
        q.float(), k.float(), v.float(), Rows.of(rows.positions), None, 0.35, 3.0
    )
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, wanted.bfloat16())
    monkeypatch.setattr(attention, "multiplies_bfloat16", lambda: True)
    in_bfloat16 = attention.attend(q, k, v, Rows.of(rows.positions), None, 0.35, 3.0)
    torch.testing.assert_close(in_bfloat16, found, atol=0.03, rtol=0.03)
