"""Training of learned scores: its pass equals fusion, its shares keep a budget, and it improves
predictions.
"""

from collections.abc import Iterator

import pytest
import torch

from ragkv import Engine
from ragkv.errors import InputError, UnsupportedModelError
from ragkv.fusion.learned import ScoreModel
from ragkv.model import Rows
from ragkv.model.attention import Watch
from tests import tiny_models
from tests.fusion.helpers import SHORT_CHUNKS as CHUNKS
from tests.fusion.helpers import cold_engine
from training.mixed_pass import predict
from training.score_training import (
    Continuation,
    ScoreTrainer,
    TrainingExample,
    inherited_attention,
    kl,
    shares,
    train,
)

CONTINUATIONS = (
    Continuation(tuple(tiny_models.tokens(6, 5)), 2),
    Continuation(tuple(tiny_models.tokens(9, 6)), 4),
)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with cold_engine() as made:
        yield made


def example(engine: Engine) -> TrainingExample:
    return TrainingExample(tuple(engine.chunk(ids) for ids in CHUNKS), CONTINUATIONS)


def predicted(engine: Engine, tail: Continuation, **how: object) -> torch.Tensor:
    """Log-probabilities (A, V) behind a tail's tokens from the engine itself, with one prefill per
    token.
    """
    rows = []
    for count in range(tail.known, len(tail.token_ids)):
        rows.append(engine.prefill(tail.token_ids[:count], CHUNKS, **how).logits.log_softmax(-1))  # type: ignore[arg-type]
    return torch.stack(rows)


class TestTrainingPass:
    @pytest.mark.parametrize(
        "family", ["llama", "gemma2", "gemma3_text", "mistral", "qwen3_moe", "gpt_neox", "cohere2"]
    )
    def test_training_with_all_tokens_fresh_equals_a_full_prefill_and_with_none_full_reuse(
        self, family: str
    ) -> None:
        with cold_engine(family) as engine:
            engine.intake.separator = (7, 5)
            engine.warm(CHUNKS)
            trainer = ScoreTrainer(engine)
            at = trainer.prepare(example(engine))
            wanted = torch.cat([predicted(engine, tail, reuse="none") for tail in CONTINUATIONS])
            torch.testing.assert_close(at.teacher, wanted, atol=1e-4, rtol=1e-4)
            fresh = torch.ones(len(at.token_ids)).index_fill(0, at.reused, 0.0)
            stale = torch.cat([predicted(engine, tail, ratio=0.0) for tail in CONTINUATIONS])
            torch.testing.assert_close(
                predict(trainer.adapter, at, fresh), stale, atol=1e-4, rtol=1e-4
            )
            assert (stale - wanted).abs().max() > 0.01

    def test_training_with_some_tokens_fresh_equals_fusing_them(self, engine: Engine) -> None:
        engine.warm(CHUNKS)
        trainer = ScoreTrainer(engine)
        at = trainer.prepare(example(engine))
        got = engine.prefill(
            CONTINUATIONS[0].token_ids[:2], CHUNKS, ratio=0.3, selector="sensitivity"
        )
        fresh = (
            torch.ones(len(at.token_ids))
            .index_fill(0, at.reused, 0.0)
            .index_fill(0, got.selected, 1.0)
        )
        said = predict(trainer.adapter, at, fresh)[0]
        torch.testing.assert_close(said, got.logits.log_softmax(-1), atol=1e-4, rtol=1e-4)

    def test_the_gradient_of_freshness_equals_the_measured_slope(self, engine: Engine) -> None:
        trainer = ScoreTrainer(engine)
        at = trainer.prepare(example(engine))
        fresh = torch.ones(len(at.token_ids)).index_fill(0, at.reused, 0.5)
        place = int(at.reused[7])
        step = 1e-2

        def worse(values: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.kl_div(
                predict(trainer.adapter, at, values),
                at.teacher,
                log_target=True,
                reduction="batchmean",
            )

        given = fresh.clone().requires_grad_()
        torch.autograd.backward(worse(given), inputs=[given])
        assert given.grad is not None
        up = fresh.clone()
        down = fresh.clone()
        up[place] += step
        down[place] -= step
        slope = float((worse(up) - worse(down)).detach()) / (2 * step)
        assert float(given.grad[place]) == pytest.approx(slope, rel=0.05, abs=1e-4)


def test_shares_keep_the_budget_and_follow_the_scores() -> None:
    torch.manual_seed(0)
    scores = torch.linspace(-6, 6, 200)
    drawn = torch.stack([shares(scores, 20.0) for _ in range(200)])
    assert (drawn.sum(1) - 20).abs().max() < 0.2
    assert drawn[:, -20:].mean() > 0.6 and drawn[:, :100].mean() < 0.01


class TestTraining:
    def test_together_scores_and_gains_improve_the_predictions_behind_each_question(
        self, engine: Engine
    ) -> None:
        told: list[tuple[int, int]] = []
        taught = train(engine, [example(engine)], 40, 3, on_step=lambda *at: told.append(at[:2]))
        assert told == [(step, 6 * 40) for step in range(1, 6 * 40 + 1)]
        trainer = ScoreTrainer(engine)
        at = trainer.prepare(example(engine))

        def left(model: ScoreModel) -> float:
            found = torch.cat([model(one) for one in at.features])
            total = 0.0
            for number, question in enumerate(at.questions):
                asked = at.asked(number)
                weights = found[:, 0] + model.gains(found[:, 1:], question)
                chosen = at.reused[weights.topk(2).indices]
                fresh = (
                    torch.ones(len(asked.token_ids))
                    .index_fill(0, at.reused, 0.0)
                    .index_fill(0, chosen, 1.0)
                )
                total += float(kl(predict(trainer.adapter, asked, fresh), asked.teacher).mean())
            return total

        with torch.no_grad():
            assert left(taught) < left(ScoreModel(4, 32, 64))

    def test_the_training_target_equals_the_attention_of_the_questions_last_row(
        self, engine: Engine
    ) -> None:
        at = ScoreTrainer(engine).prepare(example(engine))
        adapter = engine.model.adapter
        prefix = engine.intake.runs.before_documents
        for tail, attended in zip(CONTINUATIONS, at.attended, strict=True):
            ids = [*prefix, *sum(CHUNKS, ()), *tail.token_ids[: tail.known]]
            watch = Watch(1, len(ids), adapter.device)
            kv = adapter.new_kv(len(ids))
            tables = adapter.rope.tables(len(ids))
            rows = Rows.span(0, len(ids), adapter.device)
            hidden = adapter.embed(torch.tensor(ids))
            for layer in range(adapter.layer_count):
                seen = watch if layer >= adapter.layer_count // 2 else None
                hidden = adapter.run_layer(layer, hidden, rows, kv, tables, None, seen)
            starts = torch.tensor([n for n, chunk in enumerate(CHUNKS[1:]) for _ in chunk])
            wanted = inherited_attention(watch.received()[at.reused], starts)
            torch.testing.assert_close(
                attended / attended.sum(), wanted / wanted.sum(), atol=1e-4, rtol=1e-3
            )

    def test_training_does_not_change_the_model(self, engine: Engine) -> None:
        weights = dict(engine.model.adapter.model.named_parameters())
        before = {name: (weight.requires_grad, weight.clone()) for name, weight in weights.items()}
        assert any(wanted for wanted, _ in before.values())
        train(engine, [example(engine)], steps=2)
        for name, weight in weights.items():
            wanted, value = before[name]
            assert (
                weight.requires_grad is wanted
                and weight.grad is None
                and torch.equal(weight, value)
            )

    def test_training_twice_with_one_seed_gives_the_same_file(self, engine: Engine) -> None:
        one, other = (train(engine, [example(engine)], steps=3, seed=5) for _ in range(2))
        assert one.digest == other.digest

    def test_unusable_training_data_is_refused_with_the_reason(self, engine: Engine) -> None:
        alone = TrainingExample((engine.chunk(CHUNKS[0]),), CONTINUATIONS)
        for examples in ([], [alone], [TrainingExample(example(engine).chunks, ())]):
            with pytest.raises(InputError, match="at least two chunks and a continuation"):
                train(engine, examples, steps=1)
        for known in (0, 6):
            given = TrainingExample(
                example(engine).chunks, (Continuation(CONTINUATIONS[0].token_ids, known),)
            )
            with pytest.raises(InputError, match="one or more behind them to predict"):
                train(engine, [given], steps=1)
        with (
            cold_engine(sensitivity_prefixes=1) as other,
            pytest.raises(InputError, match="sensitivity_prefixes = 2"),
        ):
            train(other, [example(other)], steps=1)
        with (
            cold_engine("llama-dynamic") as other,
            pytest.raises(UnsupportedModelError, match="depend on the prompt"),
        ):
            train(other, [example(other)], steps=1)
