"""The contract every selector keeps, and what each one chooses."""

import math

import pytest
import torch

from ragkv import Engine
from ragkv.errors import ConfigError
from ragkv.fusion import SELECTORS, AskingSelector, StaticSelector, make_selector, usable
from ragkv.fusion.selectors import budget
from ragkv.fusion.selectors.sensitivity import INHERITED_SHARE, inherited_attention
from tests.fusion import helpers

RATIOS = [0.0, 0.01, 0.1, 0.15, 0.5, 1.0]
BUDGETED = sorted(set(SELECTORS) - {"none", "all"})
CHECKING = ("hkvd", "hkvd-gradual")


@pytest.fixture(scope="module")
def engine() -> Engine:
    with helpers.engine() as engine:
        yield engine


class TestContract:
    """Through the engine, so that it holds for selectors of every kind."""

    @pytest.mark.parametrize("ratio", RATIOS)
    @pytest.mark.parametrize("name", BUDGETED)
    def test_the_budget_is_kept_exactly(self, engine: Engine, name: str, ratio: float) -> None:
        prefill = engine.prefill(helpers.QUESTION, helpers.CHUNKS, ratio=ratio, selector=name)
        sizes = [len(selected) for selected in prefill.selected_by_layer]
        wanted = math.ceil(round(ratio * helpers.N, 6))
        if name not in CHECKING:
            assert sizes == [wanted] * len(sizes)
        elif name == "hkvd":
            assert sizes == [helpers.N if wanted else 0] + [wanted] * (len(sizes) - 1)
        elif 0 < ratio < 1:
            assert sum(sizes[1:]) / (len(sizes) - 1) == pytest.approx(ratio * helpers.N, abs=1.5)
        assert not wanted or prefill.reuse.recomputed == sizes[-1]

    @pytest.mark.parametrize("name", sorted(SELECTORS))
    def test_what_is_exact_or_computed_anyway_is_never_selected(self, engine: Engine, name: str) -> None:
        prefill = engine.prefill(helpers.QUESTION, helpers.CHUNKS, ratio=0.4, selector=name)
        for selected in prefill.selected_by_layer:
            assert selected.tolist() == sorted(set(selected.tolist()))
            assert all(helpers.FIRST <= position < helpers.FIRST + helpers.N for position in selected.tolist())

    @pytest.mark.parametrize("name", sorted(SELECTORS))
    def test_the_same_question_selects_the_same_tokens_twice(self, engine: Engine, name: str) -> None:
        first, second = (engine.prefill(helpers.QUESTION, helpers.CHUNKS, ratio=0.3, selector=name) for _ in range(2))
        assert torch.equal(first.logits, second.logits)
        for one, other in zip(first.selected_by_layer, second.selected_by_layer, strict=True):
            assert torch.equal(one, other)

    @pytest.mark.parametrize("name", sorted(SELECTORS))
    def test_nothing_fused_leaves_nothing_to_select(self, engine: Engine, name: str) -> None:
        prefill = engine.prefill(helpers.QUESTION, helpers.CHUNKS[:1], ratio=0.5, selector=name)
        assert [len(selected) for selected in prefill.selected_by_layer] == [0] * 4

    @pytest.mark.parametrize("count", [0, 1, 7, 40])
    @pytest.mark.parametrize("ratio", RATIOS)
    @pytest.mark.parametrize("name", sorted(set(BUDGETED) - set(CHECKING)))
    def test_indices_are_ascending_and_within(self, name: str, ratio: float, count: int) -> None:
        selector, candidates = make_selector(name), helpers.candidates(count, spans=3)
        if isinstance(selector, StaticSelector):
            chosen = selector.select(candidates, ratio, seed=0)
        else:
            assert isinstance(selector, AskingSelector)
            chosen = selector.select(candidates, torch.rand(count), ratio)
        assert chosen.tolist() == sorted(set(chosen.tolist()))
        assert len(chosen) == budget(ratio, count)
        assert all(0 <= index < count for index in chosen.tolist())

    def test_entries_are_the_same_bytes_after_any_selector(self, engine: Engine) -> None:
        before = self._bytes(engine)
        for name in SELECTORS:
            engine.prefill(helpers.QUESTION, helpers.CHUNKS, ratio=0.4, selector=name)
        assert self._bytes(engine) == before

    @staticmethod
    def _bytes(engine: Engine) -> list[bytes]:
        found = []
        for chunk in helpers.CHUNKS:
            with engine.parts.store.lease(engine.parts.encoder.identity, tuple(chunk)) as lease:
                found += [lease.read_layer(layer).numpy().tobytes() for layer in range(4)]
                found.append(lease.sensitivity.numpy().tobytes())
        return found


class TestNames:
    def test_an_unknown_one_is_refused_naming_the_known(self) -> None:
        with pytest.raises(ConfigError, match="hkvd-gradual"):
            make_selector("hkdv")

    def test_a_selector_that_was_made_is_taken_as_it_is(self) -> None:
        made = SELECTORS["hkvd"]()
        assert make_selector(made) is made


class TestWithoutScores:
    @pytest.mark.parametrize("name", ["sensitivity", "sensitivity-query"])
    def test_hkvd_gradual_stands_in_and_says_so(self, name: str) -> None:
        stands_in, note = usable(make_selector(name), helpers.candidates(9, scored=False), 0.3)
        assert stands_in.name == "hkvd-gradual"
        assert note is not None and name in note

    def test_with_nothing_to_select_nobody_stands_in(self) -> None:
        chosen, note = usable(make_selector("sensitivity"), helpers.candidates(9, scored=False), 0.0)
        assert (chosen.name, note) == ("sensitivity", None)


class TestHandedDown:
    def test_a_token_inherits_from_later_ones_of_its_span_alone(self) -> None:
        got = inherited_attention(torch.tensor([0.0, 0.1, 1.0, 0.0, 0.5]), torch.tensor([0, 0, 0, 1, 1]))
        assert got.tolist() == pytest.approx([INHERITED_SHARE**2, INHERITED_SHARE, 1.0, 0.5 * INHERITED_SHARE, 0.5])


class TestFirstK:
    def test_takes_equally_many_of_each_chunk(self) -> None:
        chosen = make_selector("first-k").select(helpers.candidates(30, spans=3), 0.2, seed=0)
        assert helpers.candidates(30, spans=3).offset[chosen].tolist() == [0, 1] * 3


def test_whole_spans_that_are_recomputed_are_not_read() -> None:
    with helpers.engine() as engine:
        some = engine.prefill(helpers.QUESTION, helpers.CHUNKS, ratio=0.15, selector="random").reuse.bytes_by_tier
        every = engine.prefill(helpers.QUESTION, helpers.CHUNKS, ratio=1.0, selector="random").reuse.bytes_by_tier
        checked = engine.prefill(helpers.QUESTION, helpers.CHUNKS, ratio=1.0, selector="hkvd").reuse.bytes_by_tier
    token = some["memory"] // (helpers.FIRST + helpers.N)
    assert every["memory"] == token * helpers.FIRST  # the prefix and the exact chunk
    assert checked["memory"] == some["memory"]
