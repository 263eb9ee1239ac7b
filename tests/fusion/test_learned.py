"""Learned scores: training uses the same pass as fusion, shares keep a budget, and when a network is used."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from ragkv import Engine, EngineConfig, FusionConfig, StoreConfig
from ragkv.calibration.score_training import Continuation, TrainingExample, _Trainer, examples_of, shares, train
from ragkv.errors import InputError, UnsupportedModelError
from ragkv.fusion.learned import FILE_NAME, KEY_PARTS, TOPICS, VALUE_PARTS, ScoreModel, _mixed, token_features
from ragkv.fusion.selectors import budget, top
from ragkv.fusion.selectors.sensitivity import inherited_attention
from ragkv.fusion.sensitivity import sensitivity
from ragkv.model import Rows
from ragkv.model.attention import Watch
from tests import tiny_models
from tests.engine.helpers import active_request

CHUNKS = [tuple(tiny_models.tokens(n, seed)) for n, seed in ((12, 1), (17, 2), (9, 3), (14, 4))]
TAILS = (Continuation(tuple(tiny_models.tokens(6, 5)), 2), Continuation(tuple(tiny_models.tokens(9, 6)), 4))


def engine_of(family: str = "llama", **fusion: object) -> Engine:
    return Engine(tiny_models.model(family), config=EngineConfig(fusion=FusionConfig(**fusion)))  # type: ignore[arg-type]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with engine_of() as made:
        yield made


def lesson(engine: Engine) -> TrainingExample:
    return TrainingExample(tuple(engine.chunk(ids) for ids in CHUNKS), TAILS)


def predicted(engine: Engine, tail: Continuation, **how: object) -> torch.Tensor:
    """Log-probabilities (A, V) behind a tail's tokens from the engine itself, with one prefill per token."""
    rows = []
    for count in range(tail.known, len(tail.token_ids)):
        rows.append(engine.prefill(tail.token_ids[:count], CHUNKS, **how).logits.log_softmax(-1))  # type: ignore[arg-type]
    return torch.stack(rows)


def network(layers: int = 4, seed: int = 0, teacher: torch.nn.Module | None = None) -> ScoreModel:
    torch.manual_seed(seed)
    made = ScoreModel(layers, 32, 64)
    torch.nn.init.normal_(made.tell.weight, std=0.1)
    torch.nn.init.normal_(made.name.weight, std=5.0)
    if teacher is not None:
        made.set_teacher(teacher)
    return ScoreModel.from_bytes(made.to_bytes())


class TestTrainingPass:
    @pytest.mark.parametrize(
        "family", ["llama", "gemma2", "gemma3_text", "mistral", "qwen3_moe", "gpt_neox", "cohere2"]
    )
    def test_training_with_all_tokens_fresh_equals_a_full_prefill_and_with_none_full_reuse(self, family: str) -> None:
        with engine_of(family) as engine:
            engine.warm(CHUNKS)
            trainer = _Trainer(engine)
            at = trainer._prepare(lesson(engine))
            wanted = torch.cat([predicted(engine, tail, reuse="none") for tail in TAILS])
            torch.testing.assert_close(at.teacher, wanted, atol=1e-4, rtol=1e-4)
            fresh = torch.ones(len(at.token_ids)).index_fill(0, at.reused, 0.0)
            stale = torch.cat([predicted(engine, tail, ratio=0.0) for tail in TAILS])
            torch.testing.assert_close(trainer._predict(at, fresh), stale, atol=1e-4, rtol=1e-4)
            assert (stale - wanted).abs().max() > 0.01

    def test_training_with_some_tokens_fresh_equals_fusing_them(self, engine: Engine) -> None:
        engine.warm(CHUNKS)
        trainer = _Trainer(engine)
        at = trainer._prepare(lesson(engine))
        got = engine.prefill(TAILS[0].token_ids[:2], CHUNKS, ratio=0.3, selector="sensitivity")
        fresh = torch.ones(len(at.token_ids)).index_fill(0, at.reused, 0.0).index_fill(0, got.selected, 1.0)
        said = trainer._predict(at, fresh)[0]
        torch.testing.assert_close(said, got.logits.log_softmax(-1), atol=1e-4, rtol=1e-4)

    def test_the_gradient_of_freshness_equals_the_measured_slope(self, engine: Engine) -> None:
        trainer = _Trainer(engine)
        at = trainer._prepare(lesson(engine))
        fresh = torch.ones(len(at.token_ids)).index_fill(0, at.reused, 0.5)
        place, step = int(at.reused[7]), 1e-2

        def worse(values: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.kl_div(
                trainer._predict(at, values), at.teacher, log_target=True, reduction="batchmean"
            )

        given = fresh.clone().requires_grad_()
        torch.autograd.backward(worse(given), inputs=[given])
        assert given.grad is not None
        up, down = fresh.clone(), fresh.clone()
        up[place] += step
        down[place] -= step
        slope = float((worse(up) - worse(down)).detach()) / (2 * step)
        assert float(given.grad[place]) == pytest.approx(slope, rel=0.05, abs=1e-4)


class TestShares:
    def test_shares_keep_the_budget_and_follow_the_scores(self) -> None:
        torch.manual_seed(0)
        scores = torch.linspace(-6, 6, 200)
        drawn = torch.stack([shares(scores, 20.0) for _ in range(200)])
        assert (drawn.sum(1) - 20).abs().max() < 0.2
        assert drawn[:, -20:].mean() > 0.6 and drawn[:, :100].mean() < 0.01

    def test_a_larger_share_for_one_token_makes_the_other_shares_smaller(self) -> None:
        torch.manual_seed(0)
        scores = torch.zeros(30, requires_grad=True)
        got = shares(scores, 6.0)
        torch.autograd.backward(got[3])
        assert scores.grad is not None
        assert scores.grad[3] > 0 and scores.grad.sum() == pytest.approx(0.0, abs=1e-3)


class TestNetwork:
    def test_an_untrained_network_ranks_tokens_by_their_variance(self) -> None:
        torch.manual_seed(0)
        stored, first, second = (torch.randn(4, 2, 2, 11, 8) for _ in range(3))
        said = ScoreModel(4, 16, 8).scores(stored, [first, second])
        assert said[:, 0].argsort().tolist() == sensitivity(stored, [first, second]).argsort().tolist()

    def test_topics_depend_on_the_later_keys_behind_the_first_text(self) -> None:
        torch.manual_seed(0)
        stored, first, second = (torch.randn(8, 2, 2, 11, 4) for _ in range(3))
        keys = token_features(stored, [first, second])[:, VALUE_PARTS * 8 : (VALUE_PARTS + KEY_PARTS) * 8]
        for number, layer in enumerate((4, 6, 7)):
            norm = stored[layer, 0].square().sum(dim=(0, 2)).mean().sqrt()
            wanted = first[layer, 0].transpose(0, 1).reshape(11, 8) / norm
            got = keys[:, number * 8 : (number + 1) * 8]
            assert sorted(got[0].tolist()) == pytest.approx(sorted(wanted[0].tolist()), rel=1e-4)

    def test_a_network_survives_saving_and_loading(self) -> None:
        made = network()
        again = ScoreModel.from_bytes(made.to_bytes())
        torch.manual_seed(0)
        stored, first, second = (torch.randn(4, 2, 2, 11, 16) for _ in range(3))
        assert torch.equal(again.scores(stored, [first, second]), made.scores(stored, [first, second]))
        assert again.digest == made.digest != network(seed=1).digest

    @pytest.mark.parametrize(
        "damage", [lambda data: data[:-3], lambda _: b"", lambda data: data[:9] + b"x" + data[10:]]
    )
    def test_a_damaged_file_is_refused(self, damage: object) -> None:
        with pytest.raises(ValueError, match="not a file of learned scores"):
            ScoreModel.from_bytes(damage(network().to_bytes()))  # type: ignore[operator]

    def test_a_file_with_nan_is_refused(self) -> None:
        made = network()
        made.tell.bias.fill_(float("nan"))
        with pytest.raises(ValueError, match="not a file"):
            ScoreModel.from_bytes(made.to_bytes())


class TestUse:
    def folder(self, path: Path, layers: int = 4) -> Path:
        teacher = tiny_models.model("llama")
        teacher.save_pretrained(path)
        (path / FILE_NAME).write_bytes(network(layers, teacher=teacher).to_bytes())
        return path

    def scores(self, engine: Engine) -> list[float]:
        engine.warm(CHUNKS)
        with engine.parts.store.lease(engine.parts.encoder.identity, CHUNKS[1]) as lease:  # type: ignore[union-attr]
            assert lease.sensitivity is not None
            return lease.sensitivity[:, 0].tolist()

    def test_scores_come_from_the_network_in_the_models_folder(self, tmp_path: Path) -> None:
        with Engine.from_pretrained(self.folder(tmp_path / "model")) as engine:
            encoder = engine.parts.encoder
            entry, others = encoder.training_sample(CHUNKS[1])
            assert encoder.identity.scorer == network(teacher=engine.parts.adapter.model).digest
            found = self.scores(engine)
            encoder.register(CHUNKS)
            entry, others = encoder.training_sample(CHUNKS[1])
            assert found == pytest.approx(network().scores(entry.kv, others)[:, 0].half().tolist(), rel=1e-2)

    def test_entries_scored_by_another_network_are_not_reused(self, tmp_path: Path) -> None:
        model, store = self.folder(tmp_path / "model"), StoreConfig(directory=str(tmp_path / "store"))
        with Engine.from_pretrained(model, EngineConfig(store=store)) as engine:
            learned = self.scores(engine)
        without = EngineConfig(store=store, fusion=FusionConfig(learned_scores=False))
        with Engine.from_pretrained(model, without) as engine:
            assert engine.parts.encoder.identity.scorer == ""
            assert engine.warm(CHUNKS).present == 0
            assert self.scores(engine) != learned
        with Engine.from_pretrained(model, EngineConfig(store=store)) as engine:
            assert engine.warm(CHUNKS).present == len(CHUNKS)

    def test_a_network_for_another_model_is_not_used(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with Engine.from_pretrained(self.folder(tmp_path / "model", layers=6)) as engine:
            assert engine.parts.encoder.identity.scorer == ""
        assert "it is for 6 layers, 32 values a token, embeddings of 64, the model has 4 layers" in caplog.text

    def test_a_network_trained_with_other_weights_is_not_used(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = tiny_models.model("llama")
        path = self.folder(tmp_path / "model")
        with torch.no_grad():
            next(model.parameters()).mul_(1.5)
        model.save_pretrained(path)
        with Engine.from_pretrained(path) as engine:
            assert engine.parts.encoder.identity.scorer == ""
        assert "it was trained with other weights" in caplog.text

    def test_a_network_is_used_for_its_weights_in_bfloat16_too(self, tmp_path: Path) -> None:
        path = self.folder(tmp_path / "model")
        for dtype in ("float32", "bfloat16"):
            with Engine.from_pretrained(path, EngineConfig(dtype=dtype)) as engine:
                assert engine.parts.encoder.identity.scorer


class TestQuestion:
    ASKED = torch.tensor([[1.0, 2.0], [0.5, -1.0]])

    def test_with_an_untrained_network_no_question_changes_the_scores(self) -> None:
        torch.manual_seed(0)
        scores, model = torch.rand(7), ScoreModel(4, 16, 2)
        studied = token_features(torch.randn(4, 2, 2, 7, 8), torch.randn(2, 4, 2, 2, 7, 8).unbind())
        torch.testing.assert_close(model.weighted_by_question(scores, model(studied)[:, 1:], self.ASKED), scores)

    def test_tokens_on_the_questions_topic_gain_and_the_sum_of_scores_stays(self) -> None:
        torch.manual_seed(0)
        model = ScoreModel(4, 32, 2)
        heard = model.hear(self.ASKED / self.ASKED.square().mean(1, True).sqrt())
        wanted = model.ask(_mixed(heard, model.muse))[0, :-1]
        topics = torch.stack((wanted, 0 * wanted, -wanted)).detach() * 9
        weighed = model.weighted_by_question(torch.ones(3), topics, self.ASKED)
        assert weighed[0] > weighed[1] > weighed[2]
        assert weighed.sum() == pytest.approx(3.0)

    def test_scores_do_not_change_without_a_question_or_without_tokens(self) -> None:
        scores, topics, model = torch.rand(5), torch.rand(5, TOPICS), ScoreModel(4, 32, 2)
        assert torch.equal(model.weighted_by_question(scores, topics, torch.empty(0, 2)), scores)
        assert model.weighted_by_question(scores[:0], topics[:0], self.ASKED).tolist() == []

    def test_the_question_changes_which_tokens_are_recomputed(self, tmp_path: Path) -> None:
        """The questions have equal lengths, so stored scores alone would choose the same tokens for all of them."""
        folder = TestUse().folder(tmp_path / "model")
        with Engine.from_pretrained(folder) as engine:
            engine.warm(CHUNKS)
            questions = [tiny_models.tokens(8, seed) for seed in range(20, 26)]
            chosen = {tuple(engine.prefill(one, CHUNKS, ratio=0.2).selected.tolist()) for one in questions}
            assert len(chosen) > 1
            one = engine.prefill(questions[0], CHUNKS, ratio=0.2)
            again = engine.prefill(questions[0], CHUNKS, ratio=0.2)
            assert torch.equal(one.selected, again.selected)
            with ExitStack() as leases:
                found = engine.parts.planner.plan(active_request(engine, questions[0], CHUNKS), leases).plan.candidates
            assert found.sensitivity is not None and found.topics is not None
            asked = engine.parts.adapter.embed(torch.tensor(questions[0]))[0]
            weighed = network().weighted_by_question(found.sensitivity, found.topics, asked)
            assert torch.equal(found.positions[top(weighed, budget(0.2, len(found)))], one.selected)

    def test_chunks_of_earlier_turns_are_not_part_of_the_question(self, engine: Engine) -> None:
        session = engine.session("s")
        first, answer, second = ([n] * 3 for n in (30, 31, 32))
        engine.append(session, first, answer, CHUNKS)
        prompt = active_request(engine, second, session=session).prompt
        assert [one for one in prompt.dialogue_ids if one in (30, 31, 32)] == first + answer + second
        assert not set(prompt.dialogue_ids) & (set().union(*CHUNKS) - {30, 31, 32})


class TestTraining:
    def test_training_improves_the_predictions_for_its_sample(self, engine: Engine) -> None:
        taught = train(engine, [lesson(engine)], steps=40, seed=3)
        trainer = _Trainer(engine)
        at = trainer._prepare(lesson(engine))

        def left(model: ScoreModel) -> float:
            scores = torch.cat([model(one)[:, 0] for one in at.features])
            chosen = at.reused[scores.topk(4).indices]
            fresh = torch.ones(len(at.token_ids)).index_fill(0, at.reused, 0.0).index_fill(0, chosen, 1.0)
            return float(
                torch.nn.functional.kl_div(
                    trainer._predict(at, fresh), at.teacher, log_target=True, reduction="batchmean"
                )
            )

        with torch.no_grad():
            assert left(taught) < left(ScoreModel(4, 32, 64))

    def test_tokens_that_a_question_attends_to_gain_by_training(self, engine: Engine) -> None:
        taught = train(engine, [lesson(engine)], steps=40, seed=3)
        at = _Trainer(engine)._prepare(lesson(engine))
        topics = torch.cat([taught(one)[:, 1:] for one in at.features])
        for asked, attended in zip(at.questions, at.attended, strict=True):
            gains = taught.gains(topics, asked).softmax(0)
            assert float(gains @ attended) > 1.3 * float(attended.mean())

    def test_the_training_target_equals_the_attention_that_an_asking_selector_gets(self, engine: Engine) -> None:
        """`Watch` collects the last row's attention in a full prefill."""
        at = _Trainer(engine)._prepare(lesson(engine))
        adapter, prefix = engine.parts.adapter, engine.parts.runs.before_documents
        for tail, attended in zip(TAILS, at.attended, strict=True):
            ids = [*prefix, *sum(CHUNKS, ()), *tail.token_ids[: tail.known]]
            watch = Watch(len(ids), adapter.device)
            kv, rows, tables = (
                adapter.new_kv(len(ids)),
                Rows.span(0, len(ids), adapter.device),
                adapter.rope.tables(len(ids)),
            )
            hidden = adapter.embed(torch.tensor(ids))
            for layer in range(adapter.layer_count):
                seen = watch if layer >= adapter.layer_count // 2 else None
                hidden = adapter.run_layer(layer, hidden, rows, kv, tables, None, seen)
            starts = torch.tensor([n for n, chunk in enumerate(CHUNKS[1:]) for _ in chunk])
            wanted = inherited_attention(watch.received()[at.reused], starts)
            torch.testing.assert_close(attended / attended.sum(), wanted / wanted.sum(), atol=1e-4, rtol=1e-3)

    def test_training_does_not_change_the_model(self, engine: Engine) -> None:
        weights = dict(engine.parts.adapter.model.named_parameters())
        before = {name: (weight.requires_grad, weight.clone()) for name, weight in weights.items()}
        assert any(wanted for wanted, _ in before.values())
        train(engine, [lesson(engine)], steps=2)
        for name, weight in weights.items():
            wanted, value = before[name]
            assert weight.requires_grad is wanted and weight.grad is None and torch.equal(weight, value)

    def test_training_twice_with_one_seed_gives_the_same_file(self, engine: Engine) -> None:
        one, other = (train(engine, [lesson(engine)], steps=3, seed=5) for _ in range(2))
        assert one.digest == other.digest

    def test_documents_become_training_samples(self, engine: Engine) -> None:
        chunks = [engine.chunk(tiny_models.tokens(10 + n, seed=n)) for n in range(9)]
        made = examples_of(chunks)
        assert [one.chunks[0] for one in made] == chunks[:3]
        assert [one.continuations for one in made] == [
            (Continuation(chunks[6 + n].token_ids, 1 + n),) for n in range(3)
        ]

    def test_unusable_training_data_is_refused_with_the_reason(self, engine: Engine) -> None:
        with pytest.raises(InputError, match="at least 3 chunks"):
            examples_of([engine.chunk([5, 6, 7])] * 2)
        alone = TrainingExample((engine.chunk(CHUNKS[0]),), TAILS)
        for lessons in ([], [alone], [TrainingExample(lesson(engine).chunks, ())]):
            with pytest.raises(InputError, match="at least two chunks and a continuation"):
                train(engine, lessons, steps=1)
        with engine_of(sensitivity_prefixes=1) as other, pytest.raises(InputError, match="sensitivity_prefixes = 2"):
            train(other, [lesson(other)], steps=1)
        with engine_of("llama-dynamic") as other, pytest.raises(UnsupportedModelError, match="depend on the prompt"):
            train(other, [lesson(other)], steps=1)
