"""Learned scores: the network and its features, when it is used, and how questions weight the
scores.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from ragkv import Engine, EngineConfig, FusionConfig, StoreConfig
from ragkv.fusion import learned, sensitivity
from ragkv.fusion.learned import (
    FILE_NAME,
    FLOOR,
    KEY_PARTS,
    TOPICS,
    VALUE_PARTS,
    ScoreModel,
    _mixed,
    token_features,
)
from ragkv.fusion.selectors import budget, top
from ragkv.fusion.sensitivity import MOST_MOVED_LEARNED
from ragkv.model.fingerprint import rounded_digest
from tests import tiny_models
from tests.engine.helpers import active_request
from tests.fusion.helpers import SHORT_CHUNKS as CHUNKS
from tests.fusion.helpers import cold_engine


@pytest.fixture
def engine() -> Iterator[Engine]:
    with cold_engine() as made:
        yield made


def network(layers: int = 4, seed: int = 0, teacher: torch.nn.Module | None = None) -> ScoreModel:
    torch.manual_seed(seed)
    made = ScoreModel(layers, 32, 64, *([] if teacher is None else [rounded_digest(teacher)]))
    torch.nn.init.normal_(made.tell.weight, std=0.1)
    torch.nn.init.normal_(made.name.weight, std=5.0)
    return ScoreModel.from_bytes(made.to_bytes())


class TestNetwork:
    def test_an_untrained_network_ranks_tokens_by_their_variance(self) -> None:
        torch.manual_seed(0)
        stored, first, second = (torch.randn(layers, 2, 2, 11, 8) for layers in (4, 3, 3))
        said = ScoreModel(4, 16, 8).scores(stored, [first, second])
        torch.testing.assert_close(said[:, 0], learned.variance(stored, [first, second]) + FLOOR)

    def test_topics_depend_on_keys_behind_the_first_text_and_on_later_stored_keys(self) -> None:
        torch.manual_seed(0)
        stored, first, second = (torch.randn(layers, 2, 2, 11, 4) for layers in (8, 6, 6))
        keys = token_features(stored, [first, second])[
            :, VALUE_PARTS * 8 : (VALUE_PARTS + KEY_PARTS) * 8
        ]
        for number, (layer, kv) in enumerate(((4, first), (5, first), (6, stored), (7, stored))):
            norm = stored[layer, 0].square().sum(dim=(0, 2)).mean().sqrt()
            wanted = kv[layer, 0].transpose(0, 1).reshape(11, 8) / norm
            got = keys[:, number * 8 : (number + 1) * 8]
            assert sorted(got[0].tolist()) == pytest.approx(sorted(wanted[0].tolist()), rel=1e-4)

    def test_the_network_sees_which_tokens_were_not_computed_behind_the_second_text(self) -> None:
        torch.manual_seed(0)
        stored, first, second = (torch.randn(layers, 2, 2, 11, 4) for layers in (8, 6, 6))
        second[..., [2, 5], :] = stored[:6, ..., [2, 5], :]
        moved = token_features(stored, [first, second])[:, -4]
        assert moved.tolist() == [float(token not in (2, 5)) for token in range(11)]

    def test_a_network_survives_saving_and_loading(self) -> None:
        made = network()
        again = ScoreModel.from_bytes(made.to_bytes())
        torch.manual_seed(0)
        stored, first, second = (torch.randn(layers, 2, 2, 11, 16) for layers in (4, 3, 3))
        assert torch.equal(
            again.scores(stored, [first, second]), made.scores(stored, [first, second])
        )
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
        scores = engine.store.scores(engine.entries.encoder.scores_identity, CHUNKS[1])
        assert scores is not None
        return scores[:, 0].tolist()

    def test_scores_come_from_the_network_in_the_models_folder(self, tmp_path: Path) -> None:
        with Engine.from_pretrained(self.folder(tmp_path / "model")) as engine:
            encoder = engine.entries.encoder
            assert (
                encoder.scorer.network_digest == network(teacher=engine.model.adapter.model).digest
            )
            found = self.scores(engine)
            encoder.register(CHUNKS)
            kv = [entry.kv for entry in encoder.chunks(CHUNKS)]
            others = encoder.scorer.kv_behind_texts(CHUNKS, kv, MOST_MOVED_LEARNED)
            assert found == pytest.approx(
                network().scores(kv[1], others[1])[:, 0].half().tolist(), rel=1e-2
            )

    def test_for_a_network_three_tenths_of_the_tokens_are_computed_behind_the_second_text(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        original = sensitivity.raw_kv
        computed = list[tuple[int, int]]()

        def noted(adapter: Any, runs: Any, *rest: Any) -> Any:
            computed.extend(
                (run.row_count, len(run.token_ids)) for run in runs if run.reused is not None
            )
            return original(adapter, runs, *rest)

        monkeypatch.setattr(sensitivity, "raw_kv", noted)
        with Engine.from_pretrained(self.folder(tmp_path / "model")) as engine:
            engine.warm(CHUNKS)
        assert computed == [(math.ceil(0.3 * len(chunk)), len(chunk)) for chunk in CHUNKS]

    def test_scores_of_another_network_are_not_used_but_made_again(self, tmp_path: Path) -> None:
        model = self.folder(tmp_path / "model")
        store = StoreConfig(directory=str(tmp_path / "store"))
        with Engine.from_pretrained(model, EngineConfig(store=store)) as engine:
            learned = self.scores(engine)
        without = EngineConfig(
            store=store, fusion=FusionConfig(selector="sensitivity", learned_scores=False)
        )
        with Engine.from_pretrained(model, without) as engine:
            assert engine.entries.encoder.scorer.network_digest == ""
            assert engine.warm(CHUNKS).encoded == len(CHUNKS)
            assert self.scores(engine) != learned
        with Engine.from_pretrained(model, EngineConfig(store=store)) as engine:
            engine.warm(CHUNKS)
            assert self.scores(engine) == pytest.approx(learned, rel=1e-2)

    def test_a_network_for_another_model_is_not_used(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Engine.from_pretrained(self.folder(tmp_path / "model", layers=6)) as engine:
            assert engine.entries.encoder.scorer.network_digest == ""
        assert (
            "it is for 6 layers, 32 values a token, embeddings of 64, the model has 4 layers"
            in caplog.text
        )

    def test_a_network_trained_with_other_weights_is_not_used(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = tiny_models.model("llama")
        path = self.folder(tmp_path / "model")
        with torch.no_grad():
            next(model.parameters()).mul_(1.5)
        model.save_pretrained(path)
        with Engine.from_pretrained(path) as engine:
            assert engine.entries.encoder.scorer.network_digest == ""
        assert "it was trained with other weights" in caplog.text

    def test_a_network_is_used_for_its_weights_in_bfloat16_too(self, tmp_path: Path) -> None:
        path = self.folder(tmp_path / "model")
        for dtype in ("float32", "bfloat16"):
            with Engine.from_pretrained(path, EngineConfig(dtype=dtype)) as engine:
                assert engine.entries.encoder.scorer.network_digest


class TestQuestion:
    QUESTION = torch.tensor([[1.0, 2.0], [0.5, -1.0]])

    def test_with_an_untrained_network_no_question_changes_the_scores(self) -> None:
        torch.manual_seed(0)
        scores = torch.rand(7)
        model = ScoreModel(4, 16, 2)
        features = token_features(
            torch.randn(4, 2, 2, 7, 8), torch.randn(2, 3, 2, 2, 7, 8).unbind()
        )
        torch.testing.assert_close(
            model.weighted_by_question(scores, model(features)[:, 1:], self.QUESTION), scores
        )

    def test_tokens_on_the_questions_topic_gain_and_the_sum_of_scores_stays(self) -> None:
        torch.manual_seed(0)
        model = ScoreModel(4, 32, 2)
        heard = model.hear(self.QUESTION / self.QUESTION.square().mean(1, True).sqrt())
        wanted = model.ask(_mixed(heard, model.muse))[0, :-1]
        topics = torch.stack((wanted, 0 * wanted, -wanted)).detach() * 9
        weighed = model.weighted_by_question(torch.ones(3), topics, self.QUESTION)
        assert weighed[0] > weighed[1] > weighed[2]
        assert weighed.sum() == pytest.approx(3.0)

    def test_scores_do_not_change_without_a_question_or_without_tokens(self) -> None:
        scores = torch.rand(5)
        topics = torch.rand(5, TOPICS)
        model = ScoreModel(4, 32, 2)
        assert torch.equal(model.weighted_by_question(scores, topics, torch.empty(0, 2)), scores)
        assert model.weighted_by_question(scores[:0], topics[:0], self.QUESTION).tolist() == []

    def test_the_question_changes_which_tokens_are_recomputed(self, tmp_path: Path) -> None:
        """The questions have equal lengths, so stored scores alone would choose the same tokens for
        all of them.
        """
        folder = TestUse().folder(tmp_path / "model")
        with Engine.from_pretrained(folder) as engine:
            engine.warm(CHUNKS)
            questions = [tiny_models.tokens(8, seed) for seed in range(20, 26)]
            chosen = {
                tuple(engine.prefill(one, CHUNKS, ratio=0.2).selected.tolist()) for one in questions
            }
            assert len(chosen) > 1
            one = engine.prefill(questions[0], CHUNKS, ratio=0.2)
            again = engine.prefill(questions[0], CHUNKS, ratio=0.2)
            assert torch.equal(one.selected, again.selected)
            with ExitStack() as leases:
                found = engine._backend._planner.plan(
                    active_request(engine, questions[0], CHUNKS), leases
                ).plan.candidates
            assert found.sensitivity is not None and found.topics is not None
            asked = engine.model.adapter.embed(torch.tensor(questions[0]))[0]
            weighed = network().weighted_by_question(found.sensitivity, found.topics, asked)
            assert torch.equal(found.positions[top(weighed, budget(0.2, len(found)))], one.selected)

    def test_chunks_of_earlier_turns_are_not_part_of_the_question(self, engine: Engine) -> None:
        session = engine.session("s")
        first, answer, second = ([n] * 3 for n in (30, 31, 32))
        engine.append(session, first, answer, CHUNKS)
        prompt = active_request(engine, second, session=session).prompt
        assert [
            one for one in prompt.dialogue_ids if one in (30, 31, 32)
        ] == first + answer + second
        assert not set(prompt.dialogue_ids) & (set().union(*CHUNKS) - {30, 31, 32})
