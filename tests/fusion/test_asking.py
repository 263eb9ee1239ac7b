"""An asking selector: the question asks over the lower layers, and recompute begins while the upper
ones load.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from ragkv import Engine
from ragkv.control.controller import Controller
from ragkv.control.method import Method
from ragkv.fusion import LayerReader, Plan, Recompute, Span, SpanKind, SpanState, make_selector
from ragkv.fusion.fuse import TokenChoice
from ragkv.fusion.pipeline import UNMEASURED
from ragkv.fusion.selectors import Attention, budget
from ragkv.model import Adapter, Rows, grown, run_layer
from tests import tiny_models
from tests.fusion import helpers
from tests.fusion.helpers import CHUNKS, QUESTION, N

LAYERS = 4
ASKED = make_selector("attention").asked_layers(LAYERS)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with helpers.engine() as engine:
        yield engine


@pytest.mark.parametrize(
    ("asked", "count", "layers"),
    [
        ((0.5, 0.73), 30, range(15, 22)),
        ((0.5, 0.73), 1, range(1)),
        ((0.5, 0.73), 4, range(2, 3)),
        ((0.5, 1.0), 28, range(14, 28)),
        ((0.6, 0.6), 10, range(6, 7)),
    ],
)
def test_the_asked_layers_are_a_part_of_the_models_depth_and_at_least_one(
    asked: tuple[float, float], count: int, layers: range
) -> None:
    assert Attention(asked).asked_layers(count) == layers


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_the_chosen_tokens_are_those_that_the_question_attends_to_in_the_asked_layers(
    family: str,
) -> None:
    model = tiny_models.model(family)
    with helpers.engine(family) as engine:
        reused = engine.prefill(QUESTION, CHUNKS, ratio=0.0)
        chosen = engine.prefill(QUESTION, CHUNKS, selector="attention", ratio=0.2).selected
        first = engine.prefill(QUESTION, CHUNKS, selector="first-k", ratio=1.0).selected
    ids = reused.token_ids[None]
    cache = DynamicCache()
    for layer in range(LAYERS):  # what stands before the question
        k_rot, v = reused.kv.view(layer, ids.shape[1] - len(QUESTION))
        cache.update(k_rot, v, layer)
    naive = deepcopy(model)
    naive.set_attn_implementation("eager")
    with torch.no_grad():
        out = naive(ids[:, -len(QUESTION) :], past_key_values=cache, output_attentions=True)
    received = torch.stack([out.attentions[layer] for layer in ASKED]).mean((0, 1, 2, 3))
    beginnings = torch.cat([torch.arange(len(chunk)) for chunk in CHUNKS])[-len(first) :]
    weighed = received[first] * (1 + 2 * torch.exp(-beginnings / 16))
    best = weighed.topk(budget(0.2, N)).indices
    assert chosen.tolist() == sorted(first[best].tolist())


def test_recompute_begins_before_the_layers_above_the_asked_ones_are_taken(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, int]] = []
    taken = LayerReader.take
    computed = Adapter.call_layer

    def take(reader: LayerReader, number: int) -> None:
        events.append(("load", number))
        taken(reader, number)

    def call_layer(adapter: Adapter, number: int, *rows: object) -> torch.Tensor:
        events.append(("compute", number))
        return computed(adapter, number, *rows)  # type: ignore[arg-type]

    monkeypatch.setattr(LayerReader, "take", take)
    monkeypatch.setattr(Adapter, "call_layer", call_layer)
    engine.prefill(QUESTION, CHUNKS, selector="attention", ratio=0.2)

    def both(number: int) -> list[tuple[str, int]]:
        return [("load", number), ("compute", number)]

    asking = [event for number in range(ASKED.stop) for event in both(number)]
    lower = [("compute", number) for number in range(ASKED.stop)]
    upper = [event for number in range(ASKED.stop, LAYERS) for event in both(number)]
    assert events == asking + lower + upper


def test_a_row_before_the_first_candidate_is_computed_once_in_each_layer(engine: Engine) -> None:
    missed = tiny_models.tokens(25, seed=77)
    prefill = engine.prefill(QUESTION, [missed, *CHUNKS[1:]], selector="attention", ratio=0.2)
    leading = len(missed)
    question = len(QUESTION)
    rows = LAYERS * leading + ASKED.stop * question + LAYERS * (question + budget(0.2, N))
    assert prefill.reuse.compute == pytest.approx(rows / (LAYERS * prefill.reuse.tokens))


EARLY = 9  # tokens


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller has `EARLY` tokens recomputed before the question chooses."""
    decide = Controller.decide

    def decided(controller: Controller, plan: Plan, method: Method) -> tuple[Plan, Recompute]:
        plan, recompute = decide(controller, plan, method)
        return plan, replace(recompute, early=EARLY)

    monkeypatch.setattr(Controller, "decide", decided)


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_early_tokens_are_recomputed_while_the_question_waits_and_then_with_the_chosen_ones(
    family: str,
) -> None:
    with helpers.engine(family) as engine:
        beginnings = engine.prefill(QUESTION, CHUNKS, selector="first-k", ratio=EARLY / N)
        prefill = engine.prefill(QUESTION, CHUNKS, selector="attention", ratio=0.2)
        again = engine.prefill(QUESTION, CHUNKS, selector="attention", ratio=0.2)
        reused = engine.prefill(QUESTION, CHUNKS, ratio=0.0)
    own = beginnings.selected
    assert len(own) == EARLY
    assert torch.isin(own, prefill.selected).all()
    assert len(prefill.selected.unique()) == EARLY + budget(0.2, N) == prefill.reuse.recomputed
    assert torch.equal(prefill.logits, again.logits)
    for layer in range(LAYERS):
        for made in ("keys", "values"):
            kv, first, stored = (
                getattr(one.kv, made)[layer][0, :, own] for one in (prefill, beginnings, reused)
            )
            if layer < ASKED.stop:  # as without the chosen ones, which the question chose later
                assert torch.allclose(kv, first, atol=1e-4 * float(first.abs().max()))
            elif layer > ASKED.stop:  # fresh from what the chosen ones are there
                assert not torch.allclose(kv, stored, atol=1e-3)


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_with_early_tokens_a_prompt_is_that_of_two_passes_one_after_the_other(family: str) -> None:
    with helpers.engine(family) as engine, torch.no_grad():
        adapter = engine.model.adapter
        prefill = engine.prefill(QUESTION, CHUNKS, selector="attention", ratio=0.2)
        early = engine.prefill(QUESTION, CHUNKS, selector="first-k", ratio=EARLY / N).selected
        kv = grown(engine.prefill(QUESTION, CHUNKS, ratio=0.0).kv, 0)
        length = len(prefill.token_ids)
        tables = adapter.rope.tables(length)

        def through(positions: torch.Tensor, hidden: torch.Tensor, layers: range) -> torch.Tensor:
            for layer in layers:
                hidden = run_layer(adapter, layer, hidden, Rows.of(positions), kv, tables)
            return hidden

        question = torch.arange(length - len(QUESTION), length)
        lower = range(ASKED.stop)
        first = torch.cat((early, question))
        asking = through(first, adapter.embed(prefill.token_ids[first]), lower)
        chosen = prefill.selected[~torch.isin(prefill.selected, early)]
        second = torch.cat((chosen, question))
        hidden = through(second, adapter.embed(prefill.token_ids[second]), lower)
        rows = torch.cat((early, second)).sort()
        hidden = torch.cat((asking[:, :EARLY], hidden), dim=1)[:, rows.indices]
        hidden = through(rows.values, hidden, range(ASKED.stop, LAYERS))
        logits = adapter.logits(hidden[:, -1:])[0]
    assert torch.allclose(prefill.logits, logits, atol=1e-4 * float(logits.abs().max()))


def test_a_layer_computes_the_early_tokens_and_the_chosen_ones_at_most() -> None:
    spans = (
        Span(SpanKind.CHUNK, 0, 100, SpanState.FUSED),
        Span(SpanKind.QUESTION, 100, 110, SpanState.COMPUTED),
    )
    plan = Plan.of(torch.arange(110), spans)
    recompute = Recompute(Attention(), 0.2, EARLY)
    assert TokenChoice(plan, recompute, 0, LAYERS).most_rows == 10 + EARLY + 20


@pytest.mark.usefixtures("early")
def test_early_tokens_count_as_compute_once_in_each_layer(engine: Engine) -> None:
    prefill = engine.prefill(QUESTION, CHUNKS, selector="attention", ratio=0.2)
    leading = prefill.reuse.computed - len(QUESTION)
    question = len(QUESTION)
    rows = ASKED.stop * question + LAYERS * (leading + EARLY + question + budget(0.2, N))
    assert prefill.reuse.compute == pytest.approx(rows / (LAYERS * prefill.reuse.tokens))


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("ratio", [0.97, 1.0])
def test_all_tokens_may_be_chosen_so_fewer_are_early(engine: Engine, ratio: float) -> None:
    prefill = engine.prefill(QUESTION, CHUNKS, selector="attention", ratio=ratio)
    assert len(prefill.selected.unique()) == N == prefill.reuse.recomputed
    if ratio == 1.0:
        full = engine.prefill(QUESTION, CHUNKS, reuse="none")
        assert torch.allclose(prefill.logits, full.logits, atol=1e-4)


def test_the_layers_above_the_asked_ones_are_read_while_those_below_are_recomputed() -> None:
    with helpers.engine() as engine:
        aheads: list[int] = []
        made = LayerReader.__init__

        def init(
            reader: LayerReader, leases: object, layers: int, ahead: int, *rest: object
        ) -> None:
            aheads.append(ahead)
            made(reader, leases, layers, ahead, *rest)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LayerReader, "__init__", init)
            engine.prefill(QUESTION, CHUNKS, selector=Attention((0.0, 0.25)), ratio=0.2)
            engine.prefill(QUESTION, CHUNKS, selector="first-k", ratio=0.2)
    assert aheads == [3, UNMEASURED]
