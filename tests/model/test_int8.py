"""Linear layers in int8: rows are independent, the exactness rules hold against the int8 model,
entries are apart.
"""

from pathlib import Path

import pytest
import torch

from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.errors import ConfigError
from ragkv.model.cpu import int8
from ragkv.model.cpu.int8 import Int8Linear, round_weights
from ragkv.model.fingerprint import weights_digest
from tests import tiny_models
from tests.faults import raising
from tests.model.test_kinds import CHUNKS, COARSE, QUESTION, off

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.onednn, "qlinear_prepack"), reason="torch has no oneDNN"
)
# relative error of a product: steps of 1 / 127, or 1 / 63, of a row's largest number
ROUNDING = 0.03


@pytest.fixture(params=[127, 63])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both numbers of steps: processors without int8 instructions have the smaller one."""
    most = min(request.param, int8.activation_steps())
    monkeypatch.setattr(int8, "activation_steps", lambda: most)


in_both_steps = pytest.mark.usefixtures("steps")


def linear(bias: bool = True, dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(96, 40, bias=bias, dtype=dtype)


def in_int8(plain: torch.nn.Linear) -> Int8Linear:
    return Int8Linear(plain)


@in_both_steps
@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_the_plain_layer_to_rounding(bias: bool, dtype: torch.dtype) -> None:
    plain = linear(bias, dtype)
    rows = torch.randn(2, 7, 96).to(dtype)
    got = in_int8(plain)(rows)
    wanted = plain(rows)
    assert (got.shape, got.dtype) == (wanted.shape, dtype)
    assert float((got - wanted).norm() / wanted.norm()) < ROUNDING


@in_both_steps
@torch.no_grad()
def test_a_row_does_not_depend_on_the_rows_that_are_computed_with_it() -> None:
    layer = in_int8(linear())
    rows = torch.randn(200, 96)
    rows[3] *= 1000  # a scale of all rows would round the others to nothing
    whole = layer(rows)
    for some in ([3], [4], [0, 4, 199], list(range(50, 120))):
        assert torch.equal(layer(rows[some]), whole[some])


@in_both_steps
@torch.no_grad()
@pytest.mark.parametrize("shape", [(96, 40), (896, 130), (130, 896), (17, 5)])
def test_few_and_many_rows_are_multiplied_by_other_kernels_to_the_same_bits(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = in_int8(torch.nn.Linear(*shape))
    rows = torch.randn(int8.FBGEMM_ROWS, shape[0])
    assert layer.for_few is not None or "fbgemm" not in torch.backends.quantized.supported_engines
    few = layer(rows)
    monkeypatch.setattr(int8, "FBGEMM_ROWS", 0)
    assert torch.equal(layer(rows), few)


@in_both_steps
@torch.no_grad()
def test_inputs_that_are_far_larger_than_the_others_leave_these_their_digits() -> None:
    plain = linear(bias=False)
    rows = torch.randn(20, 96)
    plain.weight[:, 7] *= 1e-3
    rows[:, 7] *= 300
    wanted = plain(rows)
    ranges = torch.ones(96).index_fill(0, torch.tensor([7]), 300.0)
    off = [
        float((Int8Linear(plain, known)(rows) - wanted).norm() / wanted.norm())
        for known in (None, ranges)
    ]
    assert off[1] < ROUNDING < off[0]


@in_both_steps
@torch.no_grad()
def test_rows_of_zeros_and_extreme_numbers_are_computed() -> None:
    layer = in_int8(linear(bias=False))
    assert layer(torch.zeros(2, 96)).tolist() == torch.zeros(2, 40).tolist()
    assert layer(torch.full((1, 96), 1e30)).isfinite().all()


@in_both_steps
def test_products_of_the_largest_numbers_do_not_overflow() -> None:
    plain = torch.nn.Linear(64, 16, bias=False)
    with torch.no_grad():
        plain.weight.fill_(1.0)
        assert in_int8(plain)(torch.ones(64, 64)).flatten().tolist() == pytest.approx(
            [64.0] * 1024, rel=1e-5
        )


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_a_model_of_any_family_recomputed_in_full_gives_its_own_full_prefill(family: str) -> None:
    model = tiny_models.model(family)
    round_weights(model)
    assert any(isinstance(part, Int8Linear) for part in model.modules())
    assert isinstance(model.get_output_embeddings(), Int8Linear)
    assert isinstance(model.get_input_embeddings(), torch.nn.Embedding)
    assert off(model) < 5 * COARSE


def test_copies_for_few_rows_stay_within_the_limit_and_change_no_logits() -> None:
    whole = tiny_models.model("llama")
    some = tiny_models.model("llama")
    plain = [part for part in whole.modules() if type(part) is torch.nn.Linear]
    sizes = [part.out_features * int8.BLOCK for part in plain]  # none has more inputs than a block
    limit = sum(sizes) // 2
    round_weights(whole)
    round_weights(some, limit)
    with_copies = [
        part.out_features * int8.BLOCK
        for part in some.modules()
        if isinstance(part, Int8Linear) and part.for_few is not None
    ]
    assert 0 < sum(with_copies) <= limit
    ids = torch.tensor([tiny_models.tokens(6)])
    with torch.no_grad():
        assert torch.equal(some(ids).logits, whole(ids).logits)
    assert weights_digest(some) == weights_digest(whole)


def test_a_model_without_plain_linear_layers_is_refused() -> None:
    model = tiny_models.model("llama")
    round_weights(model)
    with pytest.raises(ConfigError, match="no plain linear layers; it may be quantised already"):
        round_weights(model)


def test_without_kernels_the_setting_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(int8, "_product_of_many", raising(RuntimeError("no kernel")))
    int8.activation_steps.cache_clear()
    with pytest.raises(
        ConfigError, match=r"needs torch's oneDNN kernels .* no kernel\. Set weights = plain"
    ):
        round_weights(tiny_models.model("llama"))
    int8.activation_steps.cache_clear()


def test_digests_tell_int8_from_plain_and_one_model_from_another() -> None:
    plain, rounded, changed = (tiny_models.model("llama") for _ in range(3))
    with torch.no_grad():
        changed.model.layers[2].mlp.up_proj.weight[5, 3] += 0.5
    round_weights(rounded)
    round_weights(changed)
    assert len({weights_digest(model) for model in (plain, rounded, changed)}) == 3
    again = tiny_models.model("llama")
    round_weights(again)
    assert weights_digest(again) == weights_digest(rounded)


def test_the_setting_rounds_a_model_that_is_loaded_and_keeps_its_entries_apart(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    tiny_models.model("llama").save_pretrained(folder)
    store = StoreConfig(directory=str(tmp_path / "kv"))
    logits = []
    for weights in ("plain", "int8", "int8"):
        with Engine.from_pretrained(folder, EngineConfig(store=store, weights=weights)) as engine:
            report = engine.entries.encode(CHUNKS)
            logits.append(engine.prefill(QUESTION, CHUNKS, ratio=0.0).logits)
            assert ("linear layers are in int8" in engine.stats().dtype_why) == (weights == "int8")
            assert (report.encoded, report.present) == ((2, 0) if len(logits) < 3 else (0, 2))
    assert not torch.equal(logits[0], logits[1])
    assert torch.equal(logits[1], logits[2])


def test_an_unknown_kind_of_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="weights"):
        EngineConfig(weights="int2")
