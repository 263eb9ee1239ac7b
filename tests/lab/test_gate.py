"""The gate on models that predict text: it passes correct engines, refuses broken ones, and its
ratio holds.
"""

from pathlib import Path

import pytest

from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.control.gate_result import Tolerance
from ragkv.errors import InputError, PromptTooLongError
from ragkv.fusion.pipeline import HostPlacing
from ragkv.lab.gate import NEXT_TOKENS, Probe, gate, save
from ragkv.types import Chunk
from tests import tiny_models
from tests.fixed import fixed
from tests.fusion import helpers
from tests.reader import READER

from .gate_corpus import PASSAGES, windows


def unrotated(self: HostPlacing, layer: int) -> None:
    """`place`, broken on purpose: keys keep the positions at which they were encoded."""
    self._reader.take(layer)
    self._parts = [
        piece[:, :, span.offset :][:, :, : len(span)]
        for span, piece in zip(self._spans, self._reader.slices, strict=True)
    ]
    for span, part in zip(self._spans, self._parts, strict=True):
        start = min(span.start, 1)
        cos, sin = self._tables.span(self._adapter.rope_kind(layer), start, start + len(span))
        k_rot = self._adapter.rotate(layer, part[0].unsqueeze(0), cos, sin)
        self._kv.put(layer, span.start, k_rot, part[1].unsqueeze(0))


def test_a_refused_engine_and_every_later_one_like_it_use_a_full_prefill(tmp_path: Path) -> None:
    config = EngineConfig(
        store=StoreConfig(directory=str(tmp_path)), fusion=fixed(selector="first-k")
    )
    with Engine(tiny_models.model("llama"), config=config) as engine:
        strict = gate(
            engine,
            windows(helpers.CHUNKS),
            tolerance=Tolerance(kl=1e-9),
            ratios=[0.3],
            selectors=["first-k"],
        )
        assert save(engine, strict) == tmp_path / "gate.json"
        assert engine.prefill(helpers.QUESTION, helpers.CHUNKS).reuse.fused == 0
    with Engine(tiny_models.model("llama"), config=config) as engine:
        reuse = engine.prefill(helpers.QUESTION, helpers.CHUNKS).reuse
    assert reuse.fused == 0 and "full recompute: no setting" in reuse.notes[0]


def test_a_trained_model_passes_on_prose_and_is_refused_without_re_rotation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    near = Tolerance(agreement=0.9, kl=0.04)
    with Engine.from_pretrained(READER) as engine:
        # it was not trained on it
        prose = windows([engine.chunk(text).token_ids for text in PASSAGES])
        right = gate(engine, prose, selectors=["hkvd"], ratios=[0.3], tolerance=near)
        assert right.points[0].keeps_mean(near)
        monkeypatch.setattr(HostPlacing, "place", unrotated)
        broken = gate(engine, prose, selectors=["hkvd"], ratios=[0.3], tolerance=near)
    assert not broken.points[0].keeps_mean(near) and broken.answer is None
    assert "full recompute: no setting stays within 10 %" in str(broken)


def test_ratio_1_equals_a_full_prefill_and_progress_is_reported() -> None:
    reported: list[tuple[int, int]] = []
    with helpers.engine() as engine:
        result = gate(
            engine,
            windows(helpers.CHUNKS),
            selectors=["first-k"],
            ratios=[1.0],
            on_progress=lambda done, total: reported.append((done, total)),
        )
    (point,) = result.points
    assert point.kl == pytest.approx(0.0, abs=1e-5)
    assert point.agreement == 1.0 > point.agreement_bound, "two prompts prove little"
    assert point.prompts == 2, "the other two confirm"
    assert reported[:2] == [(1, 4), (2, 4)]


def test_the_configs_selector_is_tried_besides_the_usual_ones_and_a_named_one_alone() -> None:
    with helpers.engine(selector="first-k") as engine:
        tried = {
            point.selector for point in gate(engine, windows(helpers.CHUNKS), ratios=[0.2]).points
        }
        assert tried == {"first-k", "attention", "hkvd", "hkvd-gradual"}
        (named,) = gate(engine, windows(helpers.CHUNKS), ratios=[0.2], selectors=["random"]).points
        assert named.selector == "random"


def test_ratio_0_is_tried_once_as_all_selectors_choose_alike_there() -> None:
    with helpers.engine() as engine:
        result = gate(
            engine, windows(helpers.CHUNKS), ratios=[0.2, 0.0], selectors=["random", "first-k"]
        )
    assert [(point.selector, point.ratio) for point in result.points] == [
        ("random", 0.0),
        ("random", 0.2),
        ("first-k", 0.2),
    ]


def test_measuring_ends_with_the_prompts_that_the_time_allows() -> None:
    with helpers.engine() as engine:
        chunks = [tiny_models.tokens(20, seed) for seed in range(40)]
        result = gate(engine, windows(chunks), selectors=["first-k"], limit_s=0.0)
    assert result.points[0].prompts == 6, "the least that choose"


def test_the_gate_without_prompts_says_what_it_needs() -> None:
    with (
        Engine(tiny_models.model("llama")) as engine,
        pytest.raises(InputError, match="three passages"),
    ):
        gate(engine, [])


def probe(tokens: int, seed: int, following: bool = True) -> Probe:
    """A prompt of one chunk of so many tokens and a question of 4; without a following text the
    answer counts.
    """
    text = tuple(tiny_models.tokens(4 + NEXT_TOKENS, seed))
    chunks = (Chunk(tuple(tiny_models.tokens(tokens, seed))),)
    return Probe(chunks, text[:4], text[4:] if following else ())


class TestPromptsOfAnyLength:
    """The tiny model's context has 512 tokens, of which the prefix is one."""

    longest = 512 - 1 - 4 - NEXT_TOKENS

    @pytest.mark.parametrize("following", [True, False], ids=["text goes on", "the answer counts"])
    def test_prompts_longer_than_the_context_are_left_out_and_counted(
        self, following: bool
    ) -> None:
        probes = [probe(self.longest, seed, following=following) for seed in range(6)]
        probes += [
            probe(self.longest + 1, 6, following=following),
            probe(900, 7, following=following),
        ]
        with Engine(tiny_models.model("llama")) as engine:
            result = gate(engine, probes, selectors=["first-k"])
        assert result.left_out == 2 and result.points[0].prompts == 3

    def test_too_few_prompts_that_fit_are_refused_with_what_to_do(self) -> None:
        probes = [probe(20 if seed < 5 else 900, seed) for seed in range(12)]
        with (
            Engine(tiny_models.model("llama")) as engine,
            pytest.raises(
                PromptTooLongError, match=r"7 of the gate's 12 prompts .* 512 .* fewer \(-k\)"
            ),
        ):
            gate(engine, probes, selectors=["first-k"])
