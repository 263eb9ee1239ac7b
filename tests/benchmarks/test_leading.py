"""The ways to serve a leading passage: computed whole, exact, or with its first tokens in place."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

leading = pytest.importorskip("benchmarks.leading")
from benchmarks.leading import EXACT, FULL, WHOLE, Passages, Way  # noqa: E402
from benchmarks.leading_report import differences, means  # noqa: E402
from ragkv import Engine  # noqa: E402
from tests.engine.helpers import text_engine  # noqa: E402

TEXTS = ["Dana leads Acme, says the register.", "Acme makes ships.", "It lies in the north."]
QUESTION = "Who leads Acme?"
OPTIONS = {"selector": "attention", "ratio": 0.25}


@pytest.fixture
def engine() -> Iterator[Engine]:
    with text_engine() as engine:
        yield engine


def test_the_first_tokens_in_place_are_what_the_engine_does(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragkv.prompt.planning.LEADING_TOKENS", 5)
    passages = Passages(engine, **OPTIONS)
    prompt = passages.prompt(QUESTION, TEXTS)
    exact = passages.encode(prompt)
    full = passages.fused(prompt, Way(FULL, fuses=False), exact)
    assert torch.equal(full.logits, engine.prefill(QUESTION, TEXTS, reuse="none").logits)
    made = passages.fused(prompt, Way.first(5), exact)
    served = engine.prefill(QUESTION, TEXTS, **OPTIONS)
    assert torch.equal(made.logits, served.logits)
    length = len(prompt.token_ids)
    layers = engine.model.adapter.layer_count
    assert made.fused.row_layers == served.reuse.compute * layers * length


def test_an_exact_entry_gives_what_computing_the_whole_passage_gives(engine: Engine) -> None:
    passages = Passages(engine, **OPTIONS)
    prompt = passages.prompt(QUESTION, TEXTS)
    exact = passages.encode(prompt)
    whole = passages.fused(prompt, WHOLE, exact)
    again = passages.fused(prompt, EXACT, exact)
    torch.testing.assert_close(again.logits, whole.logits, atol=1e-4, rtol=1e-4)
    assert again.fused.row_layers < whole.fused.row_layers


@pytest.mark.parametrize("count", [0, 5, 500])
def test_the_first_tokens_are_computed_and_the_others_are_candidates(
    engine: Engine, count: int
) -> None:
    passages = Passages(engine, **OPTIONS)
    prompt = passages.prompt(QUESTION, TEXTS)
    exact = passages.encode(prompt)
    start = len(prompt.prefix)
    stop = start + len(prompt.chunks[0])
    cut = min(start + count, stop)
    with ExitStack() as held:
        plan = passages.plan(prompt, Way.first(count), exact, held)
        own = plan.forced[(plan.forced >= start) & (plan.forced < stop)]
        assert own.tolist() == list(range(start, cut))
        candidates = plan.candidates.positions
        assert candidates[candidates < stop].tolist() == list(range(cut, stop))


def test_fused_tokens_keep_the_stored_kv_of_their_own_place_in_the_passage(
    engine: Engine,
) -> None:
    passages = Passages(engine, "none", 0.0)
    prompt = passages.prompt(QUESTION, TEXTS)
    exact = passages.encode(prompt)
    start = len(prompt.prefix)
    stop = start + len(prompt.chunks[0])
    kept = passages.fused(prompt, Way.first(0), exact).fused.kv
    made = passages.fused(prompt, Way.first(5), exact).fused.kv
    for layer in range(engine.model.adapter.layer_count):
        for before, after in zip(kept.view(layer, stop), made.view(layer, stop), strict=True):
            assert torch.equal(before[:, :, start + 5 :], after[:, :, start + 5 :])


def test_differences_are_paired_and_a_question_without_all_ways_is_left_out() -> None:
    def row(question: str, way: str, kl: float) -> dict[str, object]:
        place = {"half": "dev", "set": "short", "question": question, "way": way}
        values = {"agreement": 1.0, "gold": -kl, "compute": 0.5, "first_token_s": kl}
        return {**place, "kl": kl, **values, "first_token_cpu_s": kl}

    rows = [row("a", "one", 3.0), row("a", "other", 1.0), row("b", "one", 4.0)]
    rows += [row("b", "other", 2.0), row("c", "one", 99.0)]
    in_set, in_all = differences(rows, [("one", "other")])
    assert in_set["questions"] == "dev, short" and in_all["questions"] == "dev, all"
    assert in_set["n"] == 2 and in_set["KL"] == [2.0, 2.0, 2.0]
    assert in_set["gold log-likelihood"] == [-2.0, -2.0, -2.0]
    assert in_set["first token of the processor, ratio"] == 3.5 / 1.5
    assert [line["KL"] for line in means(rows, ["one", "other"])[:2]] == [3.5, 1.5]
