"""Makes the history of conversations exact between their turns, while no request runs (`session.inexact_history`).

A history is computed again block by block, each over the exact blocks before it, so that what is done stays done. A
pass gives up between two layers as soon as a request comes, and goes on when none runs. A turn does not wait for it: it
finds the blocks as they are.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from ragkv.errors import CancelledError, RagKVError
from ragkv.fusion import make_selector
from ragkv.prompt import ActiveRequest, Prefiller, PrefillMethod, Prompt, Request
from ragkv.prompt.history import History, exact_blocks
from ragkv.scheduling import IdleWorker, Ticket
from ragkv.store import CODECS, ids_digest

from .session import Session
from .turn import Turn

log = logging.getLogger(__name__)

# `EXACTLY` is how history is computed again: from exact blocks alone.
EXACTLY = PrefillMethod(0.0, make_selector("none"), "prefix", inexact_history="recompute")


class RepairTurn(Turn):
    """What replaces blocks of a history by exact ones; it adds no turn, and policies do not count it as one."""

    def _announce(self) -> None:
        pass

    def end(self, answer: tuple[int, ...] = ()) -> None:
        """Make the blocks that were computed part of the history, in place of those that were not exact."""
        assert self._session is not None
        before, made = self._before.history, self._made
        if made is not None:
            blocks = (*self._blocks, *before.blocks[len(self._blocks) :])
            repaired = sum(len(before.blocks[number]) for number in made.recomputed_blocks)
            self._owner.commit(self._session, replace(self._before, history=replace(before, blocks=blocks)))
            self._session.repaired_tokens += repaired
            self._ended = True
        self._drop_unused()


TurnOf = Callable[[Session, Ticket], AbstractContextManager[RepairTurn]]


class Repair:
    """The conversations whose history is to be made exact. Thread-safe."""

    def __init__(self, prefiller: Prefiller, prefix: tuple[int, ...], codec: str, turn: TurnOf) -> None:
        """`prefix` is the application's. `turn` holds a session and makes a `RepairTurn` of it."""
        self._prefiller, self._prefix, self._turn = prefiller, prefix, turn
        self._lossless = CODECS[codec].lossless
        self._worker = IdleWorker[str, Session](prefiller.scheduler, "ragkv-repair", self._repair)

    def add(self, session: Session) -> None:
        """Make the session's history exact when there is time. With a rounding codec no block can be."""
        if self._lossless:
            self._worker.add(session.session_id, session)

    def flush(self) -> None:
        """Return when no history waits, except of conversations of which a turn runs."""
        self._worker.flush()

    def close(self) -> None:
        """Give up the pass under way, and what waits. Twice is harmless."""
        self._worker.close()

    def _repair(self, session: Session) -> bool:
        """Make a session's history exact; `False` if a request came first."""
        try:
            while not session.deleted and self._repair_block(session):
                pass
        except CancelledError:
            return session.lock.locked()  # a turn that holds it adds the session again
        except RagKVError as error:  # another replica changed the conversation, a server is away, or it is closed
            log.debug("The history of %r stays inexact for now: %s", session.session_id, error)
        return True

    def _repair_block(self, session: Session) -> bool:
        """Compute the first block that is not exact; whether there was one. Raises `CancelledError`."""
        ticket = self._worker.ticket()
        with self._turn(session, ticket) as turn:
            prompt = self._prompt(session.state.history)
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
