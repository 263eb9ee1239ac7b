"""A share of fused requests is computed again in full while no request runs, and what differs is noticed."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ragkv import Engine
from ragkv.api.metrics import Metrics, TenantStats
from ragkv.errors import CancelledError, ConfigError
from ragkv.fusion.gate_result import Tolerance
from ragkv.prompt import DriftStats, DriftWatch
from ragkv.prompt.drift import PENDING, WINDOW, agreement_at_most, compare
from ragkv.scheduling import Activity
from ragkv.scheduling.encoding import Encoder
from ragkv.store import Entry
from tests import tiny_models
from tests.fusion import helpers

NEARLY_ALL = 0.99  # of the tokens are recomputed: one is fused


def questions(count: int) -> list[list[int]]:
    return [tiny_models.tokens(7, seed=seed) for seed in range(100, 100 + count)]


def ask(engine: Engine, count: int) -> DriftStats:
    """Prefill, check, and say what was found."""
    for question in questions(count):
        engine.prefill(question, helpers.CHUNKS)
        engine.flush()
    found = engine.stats().drift
    assert found is not None
    return found


@pytest.fixture
def wrong_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are stored with the values of other tokens."""
    right = Encoder._entry

    def wrong(self: Encoder, ids: tuple[int, ...], kv: torch.Tensor, behind: tuple[int, ...]) -> Entry:
        return right(self, ids, kv.roll(1, dims=-2) if behind else kv, behind)

    monkeypatch.setattr(Encoder, "_entry", wrong)


def test_nothing_is_sampled_by_default() -> None:
    with helpers.engine() as engine:
        engine.prefill(helpers.QUESTION, helpers.CHUNKS)
        engine.flush()
        assert engine.stats().drift is None
        assert "ragkv-drift" not in {thread.name for thread in threading.enumerate()}


def test_a_share_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="drift_sample is 2"):
        helpers.cold_engine(drift_sample=2.0)


def test_right_answers_agree_with_full_recompute(caplog: pytest.LogCaptureFixture) -> None:
    with helpers.engine(drift_sample=1.0, ratio=NEARLY_ALL) as engine:
        found = ask(engine, 12)
    assert (found.checked, found.dropped, found.drifted) == (12, 0, False)
    assert found.counted > 0 and found.agreement == 1.0
    assert found.kl == pytest.approx(0.0, abs=0.05)
    assert "drift" not in caplog.text


@pytest.mark.usefixtures("wrong_kv")
def test_wrong_stored_kv_is_noticed_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with helpers.engine(drift_sample=1.0, ratio=0.0) as engine:
        found = ask(engine, 24)
        metrics = Metrics(lambda: [TenantStats("ada", engine.stats(), 0, 0)]).render(is_ready=True).decode()
    assert found.checked == 24 and found.drifted
    assert found.agreement is not None and found.agreement < found.tolerance == 0.98
    assert found.kl is not None and found.kl > 0.1
    said = [record.getMessage() for record in caplog.records if "drift" in record.getMessage()]
    assert len(said) == 1 and "ragkv gate --apply" in said[0]
    assert 'ragkv_drift_checked_total{tenant="ada"} 24.0' in metrics
    assert f'ragkv_drift_agreement{{tenant="ada"}} {found.agreement}' in metrics


def test_requests_that_name_ratio_or_selector_or_fuse_nothing_are_not_sampled() -> None:
    with helpers.engine(drift_sample=1.0) as engine:
        engine.prefill(helpers.QUESTION, helpers.CHUNKS, ratio=0.0)
        engine.prefill(helpers.QUESTION, helpers.CHUNKS, selector="first-k")
        engine.prefill(helpers.QUESTION, helpers.CHUNKS, reuse="none")
        engine.flush()
        found = engine.stats().drift
    assert found is not None and (found.checked, found.dropped) == (0, 0)


def test_few_samples_wait_while_requests_run_and_the_others_are_counted_as_dropped() -> None:
    with helpers.engine(drift_sample=1.0) as engine:
        with engine.parts.activity.request():
            for question in questions(PENDING + 2):
                engine.prefill(question, helpers.CHUNKS)
            found = engine.stats().drift
            assert found is not None and (found.checked, found.dropped) == (0, 2)
        engine.flush()
        found = engine.stats().drift
    assert found is not None and (found.checked, found.dropped) == (PENDING, 2)


def test_deleting_chunks_deletes_the_samples_that_may_hold_them() -> None:
    with helpers.engine(drift_sample=1.0) as engine, engine.parts.activity.request():
        engine.prefill(helpers.QUESTION, helpers.CHUNKS)
        engine.delete(helpers.CHUNKS[:1])
        found = engine.stats().drift
        assert found is not None and (found.checked, found.dropped) == (0, 1)
        assert not engine.parts.drift._waiting


def test_deleting_a_conversation_deletes_the_samples_that_may_hold_it() -> None:
    with helpers.engine(drift_sample=1.0) as engine, engine.parts.activity.request():
        session = engine.session("s")
        engine.answer(helpers.QUESTION, helpers.CHUNKS, session, max_new_tokens=1)
        assert engine.parts.drift._waiting
        session.delete()
        assert not engine.parts.drift._waiting


@pytest.mark.usefixtures("wrong_kv")
def test_a_new_gate_result_starts_the_counting_again() -> None:
    with helpers.engine(drift_sample=1.0, ratio=0.0) as engine:
        assert ask(engine, 6).kl is not None
        engine.parts.drift.restart()
        found = engine.stats().drift
    assert found is not None and (found.counted, found.agreement, found.kl, found.drifted) == (0, None, None, False)


class _Interrupted:
    """A prefiller whose passes all end because a request came."""

    def __init__(self) -> None:
        self.passes = 0

    def prefill(self, _: Any) -> Any:
        self.passes += 1
        raise CancelledError("A request came.")


def test_a_check_that_requests_end_again_and_again_is_dropped() -> None:
    prefiller, activity = _Interrupted(), Activity()
    watch = DriftWatch(prefiller, activity, 1.0, Tolerance)  # type: ignore[arg-type]
    prefill = SimpleNamespace(logits=torch.arange(5.0), reuse=SimpleNamespace(fused=3))
    asked = SimpleNamespace(method=SimpleNamespace(named=False))
    watch.offer(SimpleNamespace(request=asked, prompt=SimpleNamespace(token_ids=(1, 2))), prefill)  # type: ignore[arg-type]
    watch.flush()
    found = watch.stats()
    watch.close()
    assert prefiller.passes == 3
    assert found is not None and (found.checked, found.dropped) == (0, 1)


class TestCompare:
    def test_equal_distributions_agree_without_divergence(self) -> None:
        full = torch.tensor([3.0, 1.0, 0.0, -1.0]).log_softmax(-1)
        best = full.topk(2)
        check = compare(full, best.indices, best.values)
        assert (check.agrees, check.kl) == (True, pytest.approx(0.0, abs=1e-6))

    def test_with_all_tokens_it_is_the_kl_divergence(self) -> None:
        full, fused = torch.tensor([3.0, 1.0, 0.0]).log_softmax(-1), torch.tensor([0.0, 2.0, 0.0]).log_softmax(-1)
        best = fused.topk(3)
        check = compare(full, best.indices, best.values)
        assert check.agrees is False
        assert check.kl == pytest.approx(float((full.exp() * (full - fused)).sum()), abs=1e-5)

    def test_where_full_recompute_is_not_sure_nothing_is_said_about_agreement(self) -> None:
        full = torch.tensor([1.0, 0.9, 0.0]).log_softmax(-1)
        best = full.topk(1)
        assert compare(full, best.indices, best.values).agrees is None


def test_the_bound_of_the_agreement_falls_with_the_evidence() -> None:
    assert agreement_at_most(5, 5) == 1.0
    assert agreement_at_most(0, 1) == pytest.approx(0.99)
    assert agreement_at_most(0, 2) == pytest.approx(0.9)
    assert agreement_at_most(WINDOW // 2, WINDOW) == pytest.approx(0.573, abs=0.005)
