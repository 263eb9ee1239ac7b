"""A turn of a conversation while it runs (CachedAttention section 3.1).

A turn never changes the history that it reads. It hands blocks of new KV to the block writer while
they are made. Once the answer is complete, the turn becomes part of the history in one step. A turn
that fails or is abandoned leaves the session as it was, and its blocks are deleted. The planner
decides which blocks are exact.
"""

import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ragkv.prompt import Prompt, PromptReport, Request, Task, TurnKV
from ragkv.prompt.history import (
    SAVE_WAIT_S,
    Block,
    Chain,
    History,
    Part,
    PartKind,
    SessionState,
    with_turn,
)
from ragkv.runtime import Closing
from ragkv.runtime.waiting import POLL_S
from ragkv.store import EntryKey, TurnSize, conversation_group, ids_digest
from ragkv.types import Answer, TokenEvent

from .session import Session


class Turn(Closing):
    """A turn of a conversation, which cuts the KV that it makes into blocks."""

    def __init__(self, session: Session, task: Task, report: PromptReport) -> None:
        """The session is held, and the prompt's KV is complete. Nothing is saved yet."""
        prompt = task.prompt
        assert prompt.history is not None
        self._sessions = session.sessions
        self._writer = session.sessions.blocks.writer
        self._session = session
        self._before = session.state
        self._prompt = prompt
        self._history = prompt.history
        self._parts = _parts(prompt, task.request)
        self._made = report.turn_kv
        self._title = task.request.title
        self._claim = task.claim
        self._ids = list(prompt.token_ids)
        self._prefix_digest = ids_digest(prompt.prefix)
        self._chain = Chain(prompt.prefix)
        self._at = len(prompt.prefix)  # position behind the last block
        self._blocks = list(prompt.blocks)
        self._next_index = session.state.history.next_index
        # in the context of inexact blocks, so that only this session finds them
        self._taint = secrets.token_hex(16)
        self._saved: list[EntryKey] = []
        # blocks the writer has no room for yet, as calls
        self._unsaved: deque[Callable[[float], bool]] = deque()
        self._ended = False

    @property
    def saved_keys(self) -> tuple[EntryKey, ...]:
        """The keys of the blocks that this turn has saved so far."""
        return tuple(self._saved)

    def begin(self) -> None:
        """Save blocks of history that were computed again, then complete new ones."""
        for number, block in enumerate(self._prompt.blocks):
            if self._made is not None and number in self._made.recomputed_blocks:
                self._blocks[number] = self._save(self._made, self._at + len(block), block.index)
            self._at += len(block)
            self._chain.add(block.kept_ids)
        self._save_complete_blocks()

    def follow(self, event: TokenEvent | Answer) -> TokenEvent | Answer:
        """The answer has one more token: save blocks as they become complete. An `Answer` finishes
        the turn.

        Returns the event as the caller gets it.
        """
        if isinstance(event, Answer):
            return event.with_notes(*self.end(event.token_ids))
        self._ids.append(event.token_id)
        self._save_complete_blocks()
        return event

    def end(self, answer: tuple[int, ...] = ()) -> tuple[str, ...]:
        """Make the turn part of the history: tokens with KV become blocks, the others the tail.

        Waits until the writer has all blocks, at most `SAVE_WAIT_S`; the returned notes say if it
        had to.
        """
        prompt = self._prompt
        runs = self._sessions.runs
        made = self._made
        between = runs.after_answer + runs.before_next_turn
        self._ids = [*prompt.token_ids, *answer]
        whole = (*self._ids, *between)
        if (
            made is not None
            and self._sessions.adapter.rope.frequencies(len(whole) + 1) == made.frequencies
        ):
            self._save_complete_blocks()
            # what is left is exact all through, or not at all: a complete block ended at the bound
            if self._at < self._recorded_to(made):
                self._add_block(made, self._recorded_to(made))
        else:  # the next prompt is longer and has other RoPE frequencies: it cannot use this KV
            self._blocks = list(prompt.blocks)
            self._at = len(prompt.prefix) + sum(map(len, self._blocks))
        parts = [
            *self._parts,
            Part(PartKind.ANSWER, len(answer)),
            Part(PartKind.BETWEEN, len(between)),
        ]
        own_parts = tuple(
            replace(part, turn=len(self._before.turns)) for part in parts if len(part)
        )
        history = History(tuple(self._blocks), whole[self._at :], self._history.parts + own_parts)
        turns = with_turn(self._before.turns, self._before.history, self._sessions.clock())
        notes = self._wait_for_writer()
        title = self._title
        self._commit(
            lambda state: replace(state, turns=turns, history=history, title=state.title or title)
        )
        self._ended = True
        self._drop_unused()
        return notes

    def _commit(self, change: Callable[[SessionState], SessionState]) -> None:
        """Commit the session's state. Its notes that this turn's report has are dropped, unless this
        raises.
        """
        # before the commit: the write that it begins may leave the same one again
        told = self._session.take_notes(self._prompt.notes)
        try:
            self._sessions.commit(self._session, change)
        except BaseException:
            self._session.note(*told)
            raise

    def close(self) -> None:
        """Delete the blocks of a turn that did not end. Does nothing after `end`."""
        if not self._ended:
            self._drop_unused()

    @property
    def _group(self) -> str:
        """By which policies see which blocks belong together."""
        return conversation_group(self._session.session_id)

    def _recorded_to(self, made: TurnKV) -> int:
        return min(made.record.filled_to, len(self._ids))

    def _save_complete_blocks(self) -> None:
        made = self._made
        size = self._sessions.config.session.block_tokens
        while made is not None:
            stop = self._at + size
            if self._at < made.exact_until < stop:  # so that what is exact has a block of its own
                stop = made.exact_until
            if self._recorded_to(made) < stop:
                return
            self._add_block(made, stop)

    def _add_block(self, made: TurnKV, stop: int) -> None:
        """Save the tokens from `_at` to `stop` as the next block."""
        block = self._save(made, stop, self._next_index)
        self._blocks.append(block)
        self._next_index += 1
        self._at = stop
        self._chain.add(block.kept_ids)

    def _save(self, made: TurnKV, stop: int, index: int) -> Block:
        """Hand the KV from `_at` to `stop` to the block writer, as block number `index`."""
        ids = tuple(self._ids[self._at : stop])
        context = self._chain.context(
            made.frequencies, "" if stop <= made.exact_until else self._taint
        )
        block = Block(
            context,
            self._prefix_digest,
            made.frequencies,
            token_ids=ids,
            index=index,
            start=0,
            stop=len(ids),
            fused=made.fused and stop > made.exact_until,
        )
        if not self._saved:
            # before the store's policies see its blocks
            self._writer.turn_ended(self._policy_turn(made))
        first = made.record.start
        self._saved.append(self._writer.key(block))
        kv = made.record.kv[:, :, :, self._at - first : stop - first]
        self._unsaved.append(partial(self._sessions.blocks.save, block, kv, self._group))
        self._hand_over(0.0)
        return block

    def _hand_over(self, wait_s: float) -> None:
        """Give the writer the blocks that it has room for, in order; for room, wait at most
        `wait_s` in all.
        """
        until = time.monotonic() + wait_s
        while self._unsaved:
            left_s = until - time.monotonic()
            if self._unsaved[0](min(max(0.0, left_s), POLL_S)):
                self._unsaved.popleft()
            elif left_s <= 0.0 or self._claim.is_over:
                return

    def _wait_for_writer(self) -> tuple[str, ...]:
        """Wait for room for the blocks that are left; notes say how long, and how many blocks are
        lost.
        """
        if not self._unsaved:
            return ()
        began = time.monotonic()
        self._hand_over(SAVE_WAIT_S)
        waited = (
            f"the turn's end waited {time.monotonic() - began:.1f} s for storage to take "
            "its history"
        )
        if not self._unsaved:
            return (waited,)
        return (
            f"{waited}; {len(self._unsaved)} blocks are not saved, and the next turn computes "
            "them again",
        )

    def _policy_turn(self, made: TurnKV) -> TurnSize:
        """This turn as eviction policies see it; the answer counts with its most tokens, as its
        length is unknown.
        """
        prompt = self._prompt
        turns = self._before.turns
        size = self._sessions.config.session.block_tokens
        now = self._sessions.clock()
        held = len(prompt.blocks)
        # tokens in front of the new blocks
        covered = len(prompt.prefix) + sum(map(len, prompt.blocks))
        return TurnSize(
            at=now,
            request=0,
            group=self._group,
            prompt=held + _blocks(covered, len(prompt.token_ids), made.exact_until, size),
            shared=held - len(made.recomputed_blocks),
            length=held + _blocks(covered, made.record.stop, made.exact_until, size),
            number=len(turns) + 1,
            since=now - turns[-1].at if turns else None,
        )

    def _drop_unused(self) -> None:
        """Delete the blocks that were saved and are in no history."""
        used = {self._writer.key(block) for block in self._session.state.history.blocks}
        if unused := set(self._saved) - used:
            self._writer.then(partial(self._sessions.blocks.drop, unused))


def _parts(prompt: Prompt, request: Request) -> tuple[Part, ...]:
    """The runs after the history, marked as documents, question and given answer."""
    given = request.chunks[len(request.chunks) - len(prompt.chunks) :]
    sources = [str(chunk.metadata.get("source", "")) for chunk in given]
    answer = len(request.given_answer)
    parts = [
        *(
            Part(PartKind.CHUNK, len(ids), source="" if at is None else sources[at])
            for ids, at in prompt.body
        ),
        Part(PartKind.QUESTION, len(prompt.question) - answer),
        Part(PartKind.ANSWER, answer),
    ]
    return tuple(part for part in parts if len(part))


def _blocks(start: int, stop: int, exact_until: int, size: int) -> int:
    """How many blocks of at most `size` tokens hold start ... stop - 1, cut where they are exact no
    more.
    """
    cut = min(max(start, exact_until), stop)
    return -(-(cut - start) // size) - (-(stop - cut) // size)
