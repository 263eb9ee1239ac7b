"""What the dtype "auto" stands for."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.errors import ConfigError, UnsupportedModelError
from ragkv.model import dtype_choice
from ragkv.model.cpu import packing, product_speed
from ragkv.model.cpu.product_speed import multiplies_bfloat16, product_seconds
from ragkv.model.dtype_choice import choose_dtype
from tests import tiny_models

MIB = 1 << 20


def saved(folder: Path, dtype: torch.dtype) -> Path:
    tiny_models.model("llama").to(dtype).save_pretrained(folder)
    return folder


def pretend(monkeypatch: pytest.MonkeyPatch, float32_s: float, other_s: float) -> None:
    """Let a product take these times."""
    monkeypatch.setattr(dtype_choice, "product_seconds", lambda _: (float32_s, other_s))
    monkeypatch.setattr(dtype_choice, "copies_reach_float32", lambda: False)


def test_auto_is_float32_where_the_processor_is_faster_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, 1.0, 7.0)
    for dtype in (torch.bfloat16, torch.float16):
        choice = choose_dtype(saved(tmp_path, dtype), "cpu", "auto", 0)
        assert (choice.name, choice.measured) == ("float32", True)
        assert "7.0 times as fast" in choice.why


@pytest.mark.parametrize("float32_s", [1.0, 0.92, 3.0])
def test_auto_is_the_checkpoints_dtype_where_float32_gains_less_than_a_tenth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, float32_s: float
) -> None:
    pretend(monkeypatch, float32_s, 1.0)
    choice = choose_dtype(saved(tmp_path, torch.bfloat16), "cpu", "auto", 0)
    assert (choice.name, choice.measured) == ("bfloat16", False)


def test_auto_never_rounds_the_weights_of_a_float32_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, 9.0, 1.0)
    choice = choose_dtype(saved(tmp_path, torch.float32), "cpu", "auto", 0)
    assert choice.name == "float32"
    assert "round" in choice.why


def test_float32_that_does_not_fit_the_memory_next_to_the_store_is_not_chosen_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, 1.0, 7.0)
    monkeypatch.setattr(
        dtype_choice, "available_bytes", lambda: dtype_choice.SPARE_BYTES + 10 * MIB
    )
    folder = saved(tmp_path, torch.bfloat16)
    assert choose_dtype(folder, "cpu", "auto", 8 * MIB).name == "float32"
    choice = choose_dtype(folder, "cpu", "auto", 10 * MIB)
    assert (choice.name, choice.measured) == ("bfloat16", True)
    assert "GiB are free" in choice.why and "memory_bytes" in choice.why


class TestFloat16Copies:
    @pytest.fixture(autouse=True)
    def _processor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend(monkeypatch, 1.0, 7.0)
        monkeypatch.setattr(dtype_choice, "copies_reach_float32", lambda: True)

    def copies(self) -> int:
        model = tiny_models.model("llama")
        return 2 * sum(
            part.weight.numel() for part in model.modules() if isinstance(part, torch.nn.Linear)
        )

    def test_with_copies_of_all_weights_the_checkpoints_dtype_is_as_fast(
        self, tmp_path: Path
    ) -> None:
        folder = saved(tmp_path, torch.bfloat16)
        copies = self.copies()
        choice = choose_dtype(folder, "cpu", "auto", 0, copies)
        assert (choice.name, choice.measured) == ("bfloat16", False)
        assert "with copies" in choice.why
        assert choose_dtype(folder, "cpu", "auto", 0, copies - 1).name == "float32"

    def test_int8_weights_need_no_copies(self, tmp_path: Path) -> None:
        choice = choose_dtype(saved(tmp_path, torch.bfloat16), "cpu", "auto", 0, 0, "int8")
        assert choice.name == "bfloat16" and "int8" in choice.why

    @pytest.mark.parametrize("family, shared", [("mixtral", True), ("llama", False)])
    def test_with_experts_in_one_tensor_or_heads_that_share_no_keys_float32_is_faster(
        self, tmp_path: Path, family: str, shared: bool
    ) -> None:
        config = tiny_models.model(family).config
        config.dtype = torch.bfloat16
        if not shared:
            config.num_key_value_heads = config.num_attention_heads
        config.save_pretrained(tmp_path)
        assert choose_dtype(tmp_path, "cpu", "auto", 0, 10**12).name == "float32"

    def test_the_weights_of_a_float16_checkpoint_are_not_copied(self, tmp_path: Path) -> None:
        assert (
            choose_dtype(saved(tmp_path, torch.float16), "cpu", "auto", 0, 10**12).name == "float32"
        )


def test_a_dtype_of_the_settings_is_used_whatever_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, 1.0, 7.0)
    assert choose_dtype(saved(tmp_path, torch.bfloat16), "cpu", "bfloat16", 0).name == "bfloat16"
    with pytest.raises(ConfigError):
        choose_dtype(tmp_path, "cpu", "int7", 0)


@pytest.mark.parametrize(
    ("dtype", "bfloat16_s", "copied"),
    [
        (torch.bfloat16, 1.6, False),
        (torch.bfloat16, 7.0, True),
        (torch.float32, 7.0, False),
    ],
)
def test_a_process_for_one_answer_copies_weights_where_plain_products_are_slow(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    bfloat16_s: float,
    copied: bool,
) -> None:
    folder = saved(tmp_path, torch.bfloat16)
    monkeypatch.setattr(packing, "useful_copies", lambda _: packing.Copies(float16_rows=math.inf))
    config = EngineConfig(dtype=str(dtype).removeprefix("torch."))
    with Engine.from_pretrained(folder, config) as lasting:
        assert lasting.model.adapter.packed_bytes > 0
    pretend(monkeypatch, 1.0, bfloat16_s)
    with Engine.from_pretrained(folder, config, brief=True) as engine:
        assert (engine.model.adapter.packed_bytes > 0) == copied
        assert engine.model.adapter.dtype is dtype


def test_a_loaded_model_on_an_untested_device_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="'meta'"):
        Engine(tiny_models.model("llama").to("meta"))


def test_the_choice_is_in_the_engines_stats_and_in_the_models_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, 1.0, 7.0)
    with Engine.from_pretrained(saved(tmp_path, torch.bfloat16)) as engine:
        stats = engine.stats()
        assert (stats.dtype, engine.model.adapter.dtype) == ("float32", torch.float32)
        assert "7.0 times" in stats.dtype_why
    with Engine(tiny_models.model("llama")) as engine:
        assert engine.stats().dtype_why == "float32, in which the model was given"


def test_a_store_made_in_another_dtype_says_why_nothing_is_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "model", torch.bfloat16)
    chunk = list(range(5, 25))
    config = EngineConfig(store=StoreConfig(directory=str(tmp_path / "kv"), memory_bytes=MIB))
    pretend(monkeypatch, 1.0, 1.0)
    with Engine.from_pretrained(folder, config) as engine:
        engine.entries.encode([chunk])
        assert engine.entries.why_not_reused is None
    pretend(monkeypatch, 1.0, 7.0)
    with Engine.from_pretrained(folder, config) as engine:
        reports = [engine.answer([3, 4], [chunk], max_new_tokens=1).reuse for _ in range(2)]
        engine.flush()
    said = [note for note in reports[0].notes if "bfloat16" in note]
    assert len(said) == 1 and "float32" in said[0] and "7.0 times" in said[0]
    assert reports[0].fused == reports[0].recomputed == 0
    assert not any("bfloat16" in note for note in reports[1].notes)
    # the store has entries of this dtype now
    with Engine.from_pretrained(folder, config) as engine:
        assert engine.entries.why_not_reused is None


@pytest.mark.parametrize("bfloat16_s, fast", [(1.0, True), (1.1, False)])
def test_bfloat16_as_fast_as_float32_counts_as_fast(
    bfloat16_s: float, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_speed, "has_bfloat16_kernels", lambda: True)
    monkeypatch.setattr(product_speed, "product_seconds", lambda _: (1.0, bfloat16_s))
    assert multiplies_bfloat16.__wrapped__() is fast


class TestKeptSpeeds:
    @pytest.fixture(autouse=True)
    def _own_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = tmp_path / "speeds"
        self.patch = monkeypatch
        monkeypatch.setattr(product_speed, "cache_folder", lambda _: self.folder)

    def found(self, seconds: float) -> float:
        """What a process uses that would measure `seconds`."""
        self.patch.setattr(
            product_speed, "measured_seconds", lambda timed, _: (seconds,) * len(timed)
        )
        return product_seconds.__wrapped__((torch.float32, torch.bfloat16))[0]

    def test_a_later_process_uses_what_the_first_one_measured(self) -> None:
        assert self.found(1.0) == self.found(5.0) == 1.0
        self.patch.setattr(product_speed, "LAYER", (64, 97))
        assert self.found(5.0) == 5.0

    @pytest.mark.parametrize(
        "changed",
        [("cpu_model", lambda: "another"), ("has_bfloat16_kernels", lambda: None)],
        ids=["cpu", "kernels"],
    )
    def test_on_another_machine_it_is_measured_again(self, changed: tuple[str, Any]) -> None:
        self.found(1.0)
        self.patch.setattr(product_speed, *changed)
        assert self.found(5.0) == 5.0

    @pytest.mark.parametrize("text", ["", "[]", '{"seconds": [1, -2, 1, 1], "subject": {}}'])
    def test_a_damaged_file_is_measured_again(self, text: str) -> None:
        self.found(1.0)
        (file,) = self.folder.iterdir()
        file.write_text(text)
        assert self.found(5.0) == 5.0

    def test_a_folder_that_cannot_be_written_is_no_error(self) -> None:
        self.folder.write_text("a file")
        assert (self.found(1.0), self.found(5.0)) == (1.0, 5.0)
