"""The contract of every registered selector: its own rule, its budget, and the same choice
twice.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ragkv import Engine
from ragkv.errors import ConfigError
from ragkv.fusion import Selection, Selector, make_selector
from ragkv.fusion.hkvd import HKVD
from ragkv.fusion.selectors import Attention
from ragkv.fusion.static_selectors import FirstK
from ragkv.registry import SELECTORS
from tests.fusion import helpers, selector_rules
from tests.fusion.selector_rules import RATIOS, budget

NAMES = sorted(SELECTORS)
NARROWING = [name for name in NAMES if make_selector(name).selection is Selection.NARROWING]


@pytest.fixture(scope="module")
def engine() -> Engine:
    with helpers.engine() as engine:
        yield engine


@pytest.mark.parametrize("name", NAMES)
def test_a_selector_follows_the_rule_of_its_name(name: str) -> None:
    selector = make_selector(name)
    assert selector.name == name
    selector_rules.check(selector)


class TestThroughTheEngine:
    @pytest.mark.parametrize("ratio", RATIOS)
    @pytest.mark.parametrize("name", NAMES)
    def test_every_layer_recomputes_as_many_tokens_as_the_budget(
        self, engine: Engine, name: str, ratio: float
    ) -> None:
        prefill = engine.prefill(helpers.QUESTION, helpers.CHUNKS, ratio=ratio, selector=name)
        sizes = [len(selected) for selected in prefill.selected_by_layer]
        wanted = budget(ratio, helpers.N)
        if name not in NARROWING:
            assert sizes == [wanted] * len(sizes)
        # every candidate passes layer 0, and the selector says how many pass the later layers
        else:
            passing = [helpers.N if wanted else 0]
            for layer in range(1, len(sizes)):
                keep = make_selector(name).keep(layer, len(sizes), ratio, helpers.N)
                passing.append(passing[-1] if keep is None else min(keep, passing[-1]))
            assert sizes == passing
        assert not wanted or prefill.reuse.recomputed == sizes[-1]

    @pytest.mark.parametrize("name", NAMES)
    def test_exact_and_computed_tokens_are_never_selected(self, engine: Engine, name: str) -> None:
        prefill = engine.prefill(helpers.QUESTION, helpers.CHUNKS, ratio=0.4, selector=name)
        for selected in prefill.selected_by_layer:
            assert selected.tolist() == sorted(set(selected.tolist()))
            assert all(
                helpers.FIRST <= position < helpers.FIRST + helpers.N
                for position in selected.tolist()
            )


@pytest.mark.parametrize("name", ["hkdv", "none", "all"])
def test_an_unknown_name_is_refused_with_the_known_names_and_what_ratios_do(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}'.* hkvd-gradual, .* give ratio 0 or 1\."):
        make_selector(name)


def test_a_span_that_is_recomputed_entirely_is_not_read() -> None:
    with helpers.engine() as engine:
        some = engine.prefill(
            helpers.QUESTION, helpers.CHUNKS, ratio=0.15, selector="random"
        ).reuse.bytes_by_tier
        every = engine.prefill(
            helpers.QUESTION, helpers.CHUNKS, ratio=1.0, selector="random"
        ).reuse.bytes_by_tier
        checked = engine.prefill(
            helpers.QUESTION, helpers.CHUNKS, ratio=1.0, selector="hkvd"
        ).reuse.bytes_by_tier
    token = some["memory"] // (helpers.FIRST + helpers.N)
    assert every["memory"] == token * helpers.FIRST  # the prefix and the exact chunk
    assert checked["memory"] == some["memory"]


def body_of(written: Sequence[str]) -> dict[str, Any]:
    """The body of a class that writes these methods."""
    whose = {"select": FirstK, "keep": HKVD}
    return {name: getattr(whose.get(name, Attention), name) for name in written}


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (("asked_layers",), "both of asked_layers and select_asked"),
        (("select_asked",), "both of asked_layers and select_asked"),
        (("keep", "asked_layers"), "both of asked_layers and select_asked"),
        ((), "write select, keep, or"),
    ],
)
def test_a_selector_that_is_of_no_kind_is_refused_where_it_is_written(
    written: tuple[str, ...], says: str
) -> None:
    body = body_of(written)
    with pytest.raises(TypeError, match=says):
        type("Odd", (Selector,), body)


@pytest.mark.parametrize(
    ("written", "selection"),
    [
        (("select",), Selection.STATIC),
        (("keep",), Selection.NARROWING),
        (("asked_layers", "select_asked"), Selection.ASKING),
    ],
)
def test_the_kind_of_a_selector_follows_from_what_it_writes(
    written: tuple[str, ...], selection: Selection
) -> None:
    assert type("Own", (Selector,), body_of(written)).selection is selection  # type: ignore[attr-defined]


def test_a_subclass_of_a_selector_has_a_name_of_its_own() -> None:
    class Mine(Attention):
        pass

    assert Mine().name == "Mine" and Attention().name == "attention"


def test_a_selector_that_asks_in_no_layer_recomputes_nothing_and_places_all(
    engine: Engine,
) -> None:
    class Silent(Attention):
        def asked_layers(self, layers: int) -> range:
            return range(layers, layers)

    question = helpers.QUESTION
    silent = engine.prefill(question, helpers.CHUNKS, selector=Silent(), ratio=0.2)
    reused = engine.prefill(question, helpers.CHUNKS, ratio=0.0)
    assert torch.equal(silent.logits, reused.logits)
