"""Makes the history of conversations exact between their turns, while no request runs (`session.inexact_history`).

A history is computed again block by block, each over the exact blocks before it, so that what is done stays done. A
pass gives up between two layers as soon as a request comes, and goes on when none runs. A turn does not wait for it: it
finds the blocks as they are.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from ragkv.errors import CancelledError, RagKVError
from ragkv.fusion import make_selector
from ragkv.prompt import ActiveRequest, Prefiller, PrefillMethod, Prompt, Request
from ragkv.prompt.history import History, exact_blocks
from ragkv.runtime import openmp
from ragkv.scheduling import IdleTicket, Ticket
from ragkv.store import CODECS, ids_digest

from .turn import SessionTurn

if TYPE_CHECKING:
    from .session import Session

log = logging.getLogger(__name__)

LOOK_S = 60.0  # longest wait for idle time before it is looked for again
EXACTLY = PrefillMethod(0.0, make_selector("none"), "prefix", inexact_history="recompute")


class RepairTurn(SessionTurn):
    """What replaces blocks of a history by exact ones; it adds no turn, and policies do not count it as one."""

    def _announce(self) -> None:
        pass

    def end(self, answer: tuple[int, ...] = ()) -> None:
        """Make the blocks that were computed part of the history, in place of those that were not exact."""
        before, made = self._before.history, self._made
        if made is not None:
            blocks = (*self._blocks, *before.blocks[len(self._blocks) :])
            repaired = sum(len(before.blocks[number]) for number in made.recomputed_blocks)
            self._owner.commit(self._session, replace(self._before, history=replace(before, blocks=blocks)))
            self._session.repaired_tokens += repaired
            self._ended = True
        self._drop_unused()


TurnOf = Callable[["Session", Ticket], AbstractContextManager[RepairTurn]]


class Repair:
    """The conversations whose history is to be made exact, and the thread that does it. Thread-safe."""

    def __init__(self, prefiller: Prefiller, prefix: tuple[int, ...], codec: str, turn: TurnOf) -> None:
        """`prefix` is the application's. `turn` holds a session and makes a `RepairTurn` of it."""
        self._prefiller, self._prefix, self._turn = prefiller, prefix, turn
        self._scheduler, self._lossless = prefiller.scheduler, CODECS[codec].lossless
        self._waiting: OrderedDict[str, Session] = OrderedDict()  # by id, so that each waits once
        self._working = False
        self._changed = threading.Condition()
        self._closing = False
        self._flushing = 0  # calls of `flush` under way; meanwhile no request stops the work
        self._thread: threading.Thread | None = None

    def add(self, session: "Session") -> None:
        """Make the session's history exact when there is time. With a rounding codec no block can be."""
        with self._changed:
            if self._closing or not self._lossless:
                return
            self._waiting[session.session_id] = session
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="ragkv-repair", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self) -> None:
        """Return when no history waits, except of conversations of which a turn runs."""
        openmp.release_threads()
        with self._changed:
            self._flushing += 1
            self._scheduler.wake()
            self._changed.wait_for(lambda: self._closing or not (self._waiting or self._working))
            self._flushing -= 1

    def close(self) -> None:
        """Give up the pass under way, and what waits. Twice is harmless."""
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._changed.notify_all()
        self._scheduler.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        while (session := self._next()) is not None:
            done = True
            try:
                while not session.deleted and self._repair_block(session):
                    pass
            except CancelledError:
                done = session.lock.locked()  # a turn that holds it adds the session again
            except RagKVError as error:  # another replica changed the conversation, a server is away, or it is closed
                log.debug("The history of %r stays inexact for now: %s", session.session_id, error)
            except Exception:
                log.exception("The history of %r could not be made exact; it stays as it is.", session.session_id)
            openmp.release_threads()
            with self._changed:
                self._working = False
                if not done and not self._closing:
                    self._waiting.setdefault(session.session_id, session)
                self._changed.notify_all()
            del session  # otherwise it would live until the next one comes

    def _next(self) -> "Session | None":
        """The next session once no request runs; `None` when this is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
            self._scheduler.wait_idle(LOOK_S, lambda: self._closing or self._flushing > 0)
            with self._changed:
                if self._closing:
                    return None
                if self._waiting and not self._busy():
                    self._working = True
                    return self._waiting.popitem(last=False)[1]

    def _busy(self) -> bool:
        return self._closing or (self._scheduler.busy and not self._flushing)

    def _repair_block(self, session: "Session") -> bool:
        """Compute the first block that is not exact; whether there was one. Raises `CancelledError`."""
        ticket = IdleTicket(self._busy)
        with self._turn(session, ticket) as turn:
            prompt = self._prompt(session.conversation.history)
            if prompt is None:
                return False
            request = Request((), (), EXACTLY)
            active = ActiveRequest(request, prompt, ticket, session.session_id, keep=True)
            turn.prefilled(prompt, self._prefiller.prefill(active))
            turn.end()
            return bool(turn.saved_keys)

    def _prompt(self, history: History) -> Prompt | None:
        """The history up to its first block that is not exact; `None` if all are, or none can be.

        A block behind another prefix than the application's cannot: the prefix's ids are not known. Nor can one of
        other RoPE frequencies than the next prompt has.
        """
        prefix, rope = self._prefix, self._prefiller.adapter.rope
        frequencies = rope.frequencies(len(prefix) + len(history) + 1)
        found = zip(history.blocks, exact_blocks(prefix, history.blocks, frequencies), strict=True)
        first = next((number for number, (_, exact) in enumerate(found) if not exact), None)
        if first is None:
            return None
        cut, digest = history.blocks[: first + 1], ids_digest(prefix)
        if any(block.prefix_digest != digest or block.frequencies != frequencies for block in cut):
            return None
        prompt = Prompt(prefix, History(cut), (), ())
        return prompt if rope.frequencies(len(prompt.token_ids)) == frequencies else None


__all__ = ["Repair", "RepairTurn"]
