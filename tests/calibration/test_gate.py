"""The gate on models that predict text: it passes correct engines, refuses broken ones, and its ratio holds."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ragkv import Engine, EngineConfig, FusionConfig, StoreConfig
from ragkv.calibration.gate import gate, save
from ragkv.errors import InputError
from ragkv.fusion import fusor
from ragkv.fusion.gate_result import Tolerance
from tests import tiny_models
from tests.fusion import helpers

STORIES = Path(__file__).resolve().parents[3] / "shared" / "data" / "models" / "stories260K"
needs_stories = pytest.mark.skipif(
    not (STORIES / "config.json").exists(), reason="stories260K is not in ../shared: nothing here was trained on text"
)


def unrotated(self: "fusor._Pass", layer: int, spans: Sequence, slices: Sequence[torch.Tensor]) -> None:
    """`place`, broken on purpose: keys keep the positions at which they were encoded."""
    for span, piece in zip(spans, slices, strict=True):
        start = min(span.start, 1)
        cos, sin = self._tables.span(self._adapter.rope_kind(layer), start, start + len(span))
        k_rot = self._adapter.rotate(layer, piece[0].unsqueeze(0), cos, sin)
        self.kv.put(layer, span.start, k_rot, piece[1].unsqueeze(0))


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(STORIES).eval()


@pytest.fixture(scope="module")
def chunks(model: torch.nn.Module) -> list[list[int]]:
    """The model's own text, 60 chunks of 48 tokens: the first half for the gate, the other half held out."""
    fidelity = pytest.importorskip("benchmarks.fidelity")
    return [chunk for text in fidelity.sampled(model, 10, 6, 48, 0) for chunk in text.chunks]


@needs_stories
@pytest.mark.parametrize("selector", ["sensitivity", "hkvd-gradual"])
class TestStories:
    def test_a_correct_engine_passes_and_its_ratio_keeps_the_tolerance_on_held_out_text(
        self, model: torch.nn.Module, chunks: list[list[int]], selector: str
    ) -> None:
        tolerance = Tolerance()
        with Engine(model) as engine:
            result = gate(engine, chunks[:30], selector=selector, tolerance=tolerance)
            assert result.ratio is not None
            held_out = gate(engine, chunks[30:], selector=selector, ratios=[result.ratio])
        assert held_out.points[0].kl <= tolerance.kl
        assert held_out.points[0].agreement >= tolerance.agreement

    def test_an_engine_without_re_rotation_is_refused(
        self, model: torch.nn.Module, chunks: list[list[int]], selector: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with Engine(model) as engine:
            right = engine.prefill(chunks[0][:5], chunks[:3], reuse="none").logits
            monkeypatch.setattr(fusor._Pass, "place", unrotated)
            assert torch.equal(engine.prefill(chunks[0][:5], chunks[:3], reuse="none").logits, right)
            result = gate(engine, chunks[:30], selector=selector)
        assert result.ratio is None
        assert "refused" in str(result)


@needs_stories
def test_a_refused_engine_and_every_later_one_like_it_use_a_full_prefill(
    model: torch.nn.Module, chunks: list[list[int]], tmp_path: Path
) -> None:
    config = EngineConfig(store=StoreConfig(directory=str(tmp_path)), fusion=FusionConfig(selector="sensitivity"))
    with Engine(model, config=config) as engine:
        strict = gate(engine, chunks[:12], tolerance=Tolerance(kl=1e-9), ratios=[0.0, 0.3, 1.0])
        assert save(engine, strict) == tmp_path / "gate.json"
        assert engine.prefill(chunks[9], chunks[:3]).reuse.fused == 0
    with Engine(model, config=config) as engine:
        reuse = engine.prefill(chunks[9], chunks[:3]).reuse
    assert reuse.fused == 0 and "refused" in reuse.notes[0]


READER = Path(__file__).resolve().parents[2] / "ragkv" / "model" / "reader" / "model.safetensors"


@pytest.mark.skipif(not READER.exists(), reason="the reader's weights are not in the package yet")
def test_the_bundled_reader_passes_on_the_built_in_text_and_is_refused_without_re_rotation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Engine.from_pretrained("reader") as engine:
        assert gate(engine, ratios=[0.3, 0.4]).ratio is not None  # prose that it was not trained on
        monkeypatch.setattr(fusor._Pass, "place", unrotated)
        assert gate(engine, ratios=[0.3, 0.5]).ratio is None


def test_ratio_1_equals_a_full_prefill_and_progress_is_reported() -> None:
    reported: list[tuple[int, int]] = []
    with helpers.engine() as engine:
        result = gate(
            engine, helpers.CHUNKS, ratios=[1.0], on_progress=lambda done, total: reported.append((done, total))
        )
    assert result.points[0].kl == pytest.approx(0.0, abs=1e-5)
    assert result.points[0].agreement == 1.0
    assert reported == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_the_gate_without_any_text_says_what_it_needs() -> None:
    with Engine(tiny_models.model("llama")) as engine, pytest.raises(InputError, match="three chunks"):
        gate(engine)
