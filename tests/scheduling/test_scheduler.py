"""The scheduler: order, limits, deadlines, cancellation at every stage, and nothing held
afterwards.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragkv import Engine, StoreConfig
from ragkv.config import SchedulerConfig, SessionConfig
from ragkv.errors import CancelledError, DeadlineError, QueueFullError
from ragkv.model import adapt
from ragkv.prompt.constraints import ResponseFormat
from ragkv.runtime import Claim, no_check
from ragkv.scheduling import Scheduler, SharedCompute
from ragkv.scheduling.scheduler import JOINT_TOKENS, PREPARED_AHEAD
from ragkv.store.prefetch import PrefetchHint
from tests import tiny_models
from tests.engine.helpers import A, B, C, Q, engine_of, text_engine
from tests.faults import at_each_layer
from tests.store.entries import open_leases

from .helpers import begin, until


class Listener:
    """Records what the store would receive."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, PrefetchHint]] = []

    def __getattr__(self, what: str) -> Callable[[PrefetchHint], None]:
        return lambda hint: self.calls.append((what, hint))


class Queue:
    """A scheduler, and requests on threads that hold their slot until a test releases them."""

    def __init__(self, tenant: str = "", **settings: Any) -> None:
        self.listener = Listener()
        self.compute = SharedCompute(adapt(tiny_models.model("llama")))
        config = SchedulerConfig(**settings)
        self.scheduler = Scheduler(self.compute, config, self.listener, tenant)
        self.order: list[int] = []
        self.errors: list[Exception] = []
        self.go = [threading.Event() for _ in range(20)]
        self.threads: list[threading.Thread] = []

    def ask(self, number: int, tokens: int = JOINT_TOKENS, **patience: Any) -> None:
        """Start a request on a thread; return when it has a slot, waits, or was refused."""

        def run() -> None:
            try:
                with (
                    self.scheduler.request(),
                    self.scheduler.admitted(Claim(**patience), tokens),
                ):
                    self.order.append(number)
                    self.go[number].wait(60)
            except Exception as error:
                self.errors.append(error)

        before = self.scheduler.stats()
        self.threads.append(begin(run))
        until(lambda: self.scheduler.stats() != before)

    def end(self) -> None:
        """End all requests, and check that nothing is held."""
        for event in self.go:
            event.set()
        for thread in self.threads:
            thread.join(60)
        stats = self.scheduler.stats()
        assert (stats.waiting, stats.admitted) == (0, 0)
        for hint in {hint for _, hint in self.listener.calls}:
            calls = [what for what, other in self.listener.calls if other is hint]
            assert calls in (["queued", "started", "left"], ["queued", "left"])


class TestQueue:
    def test_requests_are_admitted_in_the_order_of_arrival(self) -> None:
        queue = Queue(workers=1)
        for number in range(6):
            queue.ask(number)
        until(lambda: queue.order == [0])
        assert (queue.scheduler.stats().waiting, queue.scheduler.stats().admitted) == (5, 1)
        queue.end()
        waited = [hint for what, hint in queue.listener.calls if what == "queued"]
        assert len(set(waited)) == 5, "one that is admitted at once tells the store nothing"
        assert queue.order == [0, 1, 2, 3, 4, 5]
        assert queue.scheduler.stats().served == 6

    def test_the_queue_has_as_many_slots_as_workers(self) -> None:
        queue = Queue(workers=3)
        for number in range(5):
            queue.ask(number)
        until(lambda: len(queue.order) == 3)
        queue.go[1].set()
        until(lambda: queue.order[3:] == [3])
        queue.end()

    def test_short_prompts_are_admitted_beyond_the_workers_unless_there_is_one(self) -> None:
        for workers, admitted in ((2, 4), (1, 1)):
            queue = Queue(workers=workers)
            for number in range(6):
                queue.ask(number, tokens=JOINT_TOKENS // 4)
            assert queue.scheduler.stats().admitted == admitted
            queue.end()

    def test_a_full_queue_refuses_a_request_and_tells_the_store_nothing(self) -> None:
        queue = Queue(workers=1, queue_limit=2)
        for number in range(3):
            queue.ask(number)
        calls = len(queue.listener.calls)
        with (
            pytest.raises(QueueFullError, match="2 requests wait and the queue takes 2"),
            queue.scheduler.admitted(Claim(), hint=lambda: pytest.fail("it is refused first")),
        ):
            pytest.fail("no slot is free")
        assert (queue.scheduler.stats().refused, len(queue.listener.calls)) == (1, calls)
        queue.end()

    @pytest.mark.parametrize("how", ["deadline", "cancel"])
    def test_a_waiting_request_that_is_late_or_cancelled_leaves_the_queue(self, how: str) -> None:
        queue = Queue(workers=1)
        cancel = threading.Event()
        queue.ask(0)
        queue.ask(1, **({"deadline_s": 0.05} if how == "deadline" else {"cancel": cancel}))
        queue.ask(2)
        cancel.set()
        until(lambda: bool(queue.errors) and queue.scheduler.stats().waiting == 1)
        assert isinstance(queue.errors[0], DeadlineError if how == "deadline" else CancelledError)
        queue.end()
        stats = queue.scheduler.stats()
        assert (queue.order, stats.expired, stats.cancelled) == (
            [0, 2],
            how == "deadline",
            how == "cancel",
        )

    def test_a_request_that_fails_frees_its_slot(self) -> None:
        queue = Queue(workers=1)
        with (
            pytest.raises(ZeroDivisionError),
            queue.scheduler.admitted(Claim()),
        ):
            raise ZeroDivisionError
        assert queue.scheduler.stats().served == 0
        queue.ask(0)
        queue.end()

    def test_many_concurrent_requests_leave_nothing_held(self) -> None:
        queue = Queue(workers=2, queue_limit=8)
        ended: list[str] = []

        def ask(number: int) -> None:
            for _ in range(20):
                patience: dict[str, Any] = {"deadline_s": 0.002} if number % 3 else {}
                try:
                    with (
                        queue.scheduler.request(),
                        queue.scheduler.admitted(Claim(**patience)),
                    ):
                        time.sleep(0.0005)
                    ended.append("served")
                except (DeadlineError, QueueFullError) as error:
                    ended.append(type(error).__name__)

        queue.threads = [begin(ask, number) for number in range(32)]
        queue.end()
        stats = queue.scheduler.stats()
        assert len(ended) == 640
        assert [ended.count(what) for what in ("served", "DeadlineError", "QueueFullError")] == [
            stats.served,
            stats.expired,
            stats.refused,
        ]
        assert 0 < stats.served < 640


def held(engine: Engine) -> dict[str, int]:
    """Everything that a request may hold."""
    stats = engine.stats().queue
    return {
        "leases": open_leases(*engine.parts.store.tiers),
        "waiting": stats.waiting,
        "admitted": stats.admitted,
        "announced": engine.parts.store.stats().announced,
        "requests": int(engine.parts.idle_time.busy),
        "computing": int(engine.model.compute.lock.held),
    }


NOTHING = dict.fromkeys(("leases", "waiting", "admitted", "announced", "requests", "computing"), 0)


class Cancellation:
    """Cancels a request, by its event or by its deadline, which passes when the test says so."""

    def __init__(self, how: str, patch: pytest.MonkeyPatch) -> None:
        self.event = threading.Event()
        self._patch = patch
        self.error = CancelledError if how == "cancel" else DeadlineError
        self.patience: dict[str, Any] = (
            {"cancel": self.event} if how == "cancel" else {"deadline_s": 600.0}
        )

    def now(self) -> None:
        self.event.set()
        if self.error is DeadlineError:
            clock = SimpleNamespace(
                perf_counter=lambda: time.perf_counter() + 600.0, monotonic=time.monotonic
            )
            self._patch.setattr("ragkv.runtime.waiting.time", clock)


@pytest.fixture(params=["cancel", "deadline"])
def cancellation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cancellation:
    return Cancellation(request.param, monkeypatch)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with engine_of(
        store=StoreConfig(directory=str(tmp_path), memory_bytes=10**6),
        scheduler=SchedulerConfig(workers=1),
        session=SessionConfig(block_tokens=4),
    ) as built:
        built.entries.encode([A, B, C])
        built.answer(Q, [A], built.session("s"), max_new_tokens=3, min_new_tokens=3)
        built.flush()
        yield built


class TestCancellation:
    def answer(self, engine: Engine, cancellation: Cancellation, **how: Any) -> threading.Thread:
        """Start an answer of session s, which will be cancelled, on a thread."""

        def run() -> None:
            with pytest.raises(cancellation.error):
                engine.answer(
                    Q, [A, B], engine.session("s"), max_new_tokens=4, **cancellation.patience, **how
                )
            self.was_cancelled = True

        self.was_cancelled = False
        return begin(run)

    def over(self, engine: Engine, thread: threading.Thread | None = None) -> None:
        """Check that it was cancelled, that nothing is held, and that the session is as it was and
        works.
        """
        if thread is not None:
            thread.join(60)
            assert self.was_cancelled
        until(lambda: held(engine) == NOTHING)
        session = engine.session("s")
        assert (session.turns, session.lock.held) == (1, False)
        assert engine.answer(Q, [A, B], session, max_new_tokens=2).reuse.tokens > 0
        engine.flush()
        assert held(engine) == NOTHING
        stats = engine.stats().queue
        assert stats.expired + stats.cancelled == 1

    @pytest.mark.parametrize(
        "where", ["behind a turn of its session", "in the queue", "for the compute lock"]
    )
    def test_a_request_can_be_cancelled_wherever_it_waits(
        self, engine: Engine, cancellation: Cancellation, where: str
    ) -> None:
        session = engine.session("s")  # the reference keeps the session object alive
        hold, waits = {
            "behind a turn of its session": (session.held(), lambda: engine.parts.idle_time.busy),
            "in the queue": (
                engine.parts.scheduler.admitted(Claim()),
                lambda: engine.stats().queue.waiting == 1,
            ),
            "for the compute lock": (
                engine.parts.scheduler.computing(),
                lambda: held(engine)["leases"] >= 2,
            ),
        }[where]
        with hold:
            thread = self.answer(engine, cancellation)
            until(waits)
            if where == "behind a turn of its session":
                # a request that waits for a session holds no slot
                assert engine.stats().queue.admitted == 0
                assert engine.prefill(Q, [A]).reuse.tokens
            cancellation.now()
            thread.join(60)
        self.over(engine, thread)

    def test_a_request_can_be_cancelled_between_two_layers(
        self, engine: Engine, cancellation: Cancellation, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layers: list[int] = []

        def spy(layer: int) -> None:
            layers.append(layer)
            if len(layers) == 2:
                cancellation.now()

        with monkeypatch.context() as patch:
            at_each_layer(patch, spy)
            thread = self.answer(engine, cancellation)
            thread.join(60)
        assert layers == [0, 1]
        self.over(engine, thread)

    def test_a_request_can_be_cancelled_between_two_tokens(
        self, engine: Engine, cancellation: Cancellation
    ) -> None:
        how: dict[str, Any] = dict(max_new_tokens=20, min_new_tokens=20, **cancellation.patience)
        events = engine.stream(Q, [A, B], engine.session("s"), **how)
        next(events)
        cancellation.now()
        with pytest.raises(cancellation.error):
            next(events)
        self.over(engine)

    def test_the_time_in_which_a_grammar_was_compiled_is_part_of_the_deadline(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slow = Cancellation("deadline", monkeypatch)

        def compiled(*_: Any) -> None:
            slow.now()

        monkeypatch.setattr(engine.parts.intake, "_compiled", compiled)
        form = ResponseFormat.json_schema({})
        with pytest.raises(DeadlineError):
            engine.answer(Q, [A], response_format=form, deadline_s=600.0)

    def test_a_request_that_is_cancelled_already_computes_nothing(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cancellation = Cancellation("cancel", monkeypatch)
        cancellation.now()
        monkeypatch.setattr(
            engine.parts.backend.prefiller,
            "prefill",
            lambda *_: pytest.fail("nothing may be computed"),
        )
        self.answer(engine, cancellation).join(60)
        assert self.was_cancelled and held(engine) == NOTHING
        with pytest.raises(CancelledError):
            engine.prefill(Q, [A], cancel=cancellation.event)

    def test_cancelling_after_the_last_token_still_delivers_the_answer(
        self, engine: Engine
    ) -> None:
        cancel = threading.Event()
        events = engine.stream(Q, [A], max_new_tokens=2, min_new_tokens=2, cancel=cancel)
        next(events), next(events)
        cancel.set()
        (answer,) = events
        assert len(answer.token_ids) == 2  # type: ignore[union-attr]


def test_few_prompts_of_a_tenant_are_prepared_ahead_while_another_tenant_has_requests() -> None:
    queue = Queue(tenant="flood")
    checks = list[None]()
    other = Scheduler(queue.compute, SchedulerConfig(), Listener(), "other")
    with other.request():
        for number in range(PREPARED_AHEAD + 1):
            # one of them was computed
            queue.scheduler.wait_for_room(lambda: checks.append(queue.go[0].set()))
            assert bool(checks) == (number == PREPARED_AHEAD)
            queue.ask(number, tokens=1)
    queue.scheduler.wait_for_room(lambda: pytest.fail("no other tenant has requests"))
    queue.end()


@pytest.mark.parametrize("by", ["its own", "another's"])
def test_a_prompt_is_prepared_as_soon_as_a_request_ends(
    monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr("ragkv.scheduling.scheduler.POLL_S", 600.0)
    queue = Queue(tenant="flood")
    other = Scheduler(queue.compute, SchedulerConfig(), Listener(), "other")
    with ExitStack() as running:
        running.enter_context(other.request())
        for number in range(PREPARED_AHEAD):
            queue.ask(number, tokens=1)
        waiting = begin(lambda: queue.scheduler.wait_for_room(no_check))
        waiting.join(0.2)
        assert waiting.is_alive()
        if by == "its own":
            queue.go[0].set()
        else:
            running.close()
        waiting.join(60)
        assert not waiting.is_alive()
    queue.end()


def test_an_open_stream_blocks_no_other_request_even_on_its_own_thread() -> None:
    with engine_of(scheduler=SchedulerConfig(workers=1)) as engine:
        events = engine.stream(Q, [A], max_new_tokens=5, min_new_tokens=5)
        next(events)
        assert engine.answer(Q, [B], max_new_tokens=2).token_ids
        assert len(list(events)) == 5


class TestPrefetching:
    def ask_behind_another(self, engine: Engine, ask: Callable[[], Any], entries: int) -> Any:
        """The result of `ask`, which waits in the queue until `entries` entries are in memory."""
        got: list[Any] = []
        with engine.parts.scheduler.admitted(Claim()):
            thread = begin(lambda: got.append(ask()))
            until(lambda: engine.stats().store.tiers[0].entries == entries)
        thread.join(60)
        return got[0]

    @pytest.mark.parametrize("reuse", ["fused", "none"])
    def test_chunks_of_a_waiting_request_are_fetched_to_memory(
        self, tmp_path: Path, reuse: str
    ) -> None:
        config = dict(
            store=StoreConfig(directory=str(tmp_path)), scheduler=SchedulerConfig(workers=1)
        )
        with engine_of(**config) as engine:
            engine.entries.encode([A, B])
        with engine_of(**config) as engine:
            wanted = 2 if reuse == "fused" else 0
            ask = lambda: engine.prefill(Q, [A, B], ratio=0.0, reuse=reuse)  # noqa: E731
            prefill = self.ask_behind_another(engine, ask, wanted)
            assert engine.stats().store.prefetched == wanted
            assert prefill.reuse.bytes_by_tier.get("disk", 0) == 0
            assert (prefill.reuse.bytes_by_tier.get("memory", 0) > 0) == (wanted > 0)

    def test_the_history_of_a_waiting_turn_is_fetched_to_memory(self, tmp_path: Path) -> None:
        config = dict(
            store=StoreConfig(directory=str(tmp_path)),
            scheduler=SchedulerConfig(workers=1),
            session=SessionConfig(block_tokens=4),
        )
        with text_engine(**config) as engine:
            engine.answer(
                "a question", ["ab"], engine.session("s"), max_new_tokens=8, min_new_tokens=8
            )
            engine.flush()
        with text_engine(**config) as engine:
            session = engine.session("s")
            blocks = len(session.state.history.blocks)
            assert blocks > 2
            how: dict[str, Any] = dict(max_new_tokens=1, min_new_tokens=1, reuse="prefix")
            answer = self.ask_behind_another(
                engine, lambda: engine.answer("more", (), session, **how), blocks
            )
            assert answer.reuse.bytes_by_tier.get("disk", 0) == 0
            assert answer.reuse.bytes_by_tier["memory"] > 0


def test_a_turn_computes_on_the_threads_that_are_chosen_and_they_are_chosen_again_between_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = Queue()
    begun: list[str] = []
    threads = queue.compute.threads
    monkeypatch.setattr(type(threads), "begin", lambda _: begun.append("begin"))
    monkeypatch.setattr(type(threads), "end", lambda _: begun.append("end"))
    with queue.scheduler.computing():
        assert begun[-1:] != ["end"]
        before = len(begun)
        queue.scheduler.between_layers()
        assert len(begun) == before + 1
