"""A turn of a conversation while it runs (CachedAttention section 3.1).

A turn never changes the history that it reads. `BlockMaker` divides new KV into blocks while it is
made, and `Handover` gives them to the block writer. Once the answer is complete, the turn becomes
part of the history in one step. A turn that fails or is abandoned leaves the session as it was, and
its blocks are deleted. The planner decides which blocks are exact.
"""

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ragkv.prompt import Prompt, PromptReport, Task, TurnKV
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
from ragkv.runtime import Claim, Closing
from ragkv.runtime.waiting import POLL_S
from ragkv.store.entry import EntryKey, conversation_group, ids_digest
from ragkv.store.policies import TurnSize
from ragkv.types import Answer, TokenEvent

from .session import Session

if TYPE_CHECKING:
    from .history_blocks import HistoryBlocks


class NewBlock(NamedTuple):
    """A block with its KV."""

    block: Block
    kv: torch.Tensor  # (L, 2, G, T, D), a view of what the turn recorded


class BlockMaker:
    """The blocks of one turn's prompt and answer, which grow from the front."""

    def __init__(self, prompt: Prompt, turn_kv: TurnKV, block_tokens: int, next_index: int) -> None:
        """`next_index` is the number of the first new block."""
        self._turn_kv = turn_kv
        self._block_tokens = block_tokens
        self._next_index = next_index
        self._prefix_digest = ids_digest(prompt.prefix)
        self._chain = Chain(prompt.prefix)
        # in the digest of inexact blocks, so that only this session finds them
        self._taint = secrets.token_hex(16)
        self._past = prompt.blocks
        self.blocks: list[Block] = []  # so far, from the beginning of the history on
        self.at = len(prompt.prefix)  # the position behind them

    def past(self, token_ids: Sequence[int]) -> Iterator[NewBlock]:
        """The blocks of the prompt's history that were computed again. `token_ids` are the
        prompt's.
        """
        for number, block in enumerate(self._past):
            if number in self._turn_kv.lost_blocks:
                new = self._block(token_ids, self.at + len(block), block.index)
                block = new.block
                yield new
            self._append(block)

    def complete(self, token_ids: Sequence[int]) -> Iterator[NewBlock]:
        """New blocks that are complete. `token_ids` are those of the prompt and of the answer so
        far.
        """
        turn_kv = self._turn_kv
        while True:
            stop = self.at + self._block_tokens
            if self.at < turn_kv.exact_until < stop:  # so that what is exact has a block of its own
                stop = turn_kv.exact_until
            if self._recorded_to(token_ids) < stop:
                return
            yield self._new(token_ids, stop)

    def rest(self, token_ids: Sequence[int]) -> Iterator[NewBlock]:
        """What is left once all tokens are known: complete blocks, then a shorter one."""
        yield from self.complete(token_ids)
        # it is exact all through, or not at all: a complete block ended at the bound
        if self.at < (stop := self._recorded_to(token_ids)):
            yield self._new(token_ids, stop)

    def _recorded_to(self, token_ids: Sequence[int]) -> int:
        return min(self._turn_kv.record.filled_to, len(token_ids))

    def _new(self, token_ids: Sequence[int], stop: int) -> NewBlock:
        new = self._block(token_ids, stop, self._next_index)
        self._next_index += 1
        self._append(new.block)
        return new

    def _append(self, block: Block) -> None:
        self.blocks.append(block)
        self.at += len(block)
        self._chain.add(block.kept_ids)

    def _block(self, token_ids: Sequence[int], stop: int, index: int) -> NewBlock:
        """The tokens from `at` to `stop` as block number `index`."""
        turn_kv = self._turn_kv
        ids = tuple(token_ids[self.at : stop])
        is_exact = stop <= turn_kv.exact_until
        block = Block(
            self._chain.digest(turn_kv.rope_digest, "" if is_exact else self._taint),
            self._prefix_digest,
            turn_kv.rope_digest,
            token_ids=ids,
            index=index,
            start=0,
            stop=len(ids),
            fused=turn_kv.fused and not is_exact,
        )
        first = turn_kv.record.start
        return NewBlock(block, turn_kv.record.kv[:, :, :, self.at - first : stop - first])


class Handover:
    """Hands the blocks of a turn to the block writer, and keeps those for which it has no room."""

    def __init__(self, blocks: "HistoryBlocks", group: str, claim: Claim) -> None:
        """`group` is that of the conversation. Once `claim` is over, no room is waited for."""
        self._blocks = blocks
        self._group = group
        self._claim = claim
        self.keys: list[EntryKey] = []  # of all blocks so far
        self._waiting: deque[NewBlock] = deque()  # not handed over yet

    def add(self, new: NewBlock) -> None:
        """Hand over one more block, as soon as there is room."""
        self.keys.append(self._blocks.writer.key(new.block))
        self._waiting.append(new)
        self._hand_over(0.0)

    def hand_over_rest(self) -> tuple[str, ...]:
        """Wait for room for the blocks that are left, at most `SAVE_WAIT_S`; notes say how long,
        and how many blocks are lost.
        """
        if not self._waiting:
            return ()
        began = time.monotonic()
        self._hand_over(SAVE_WAIT_S)
        waited = (
            f"the turn's end waited {time.monotonic() - began:.1f} s for storage to take "
            "its history"
        )
        if not self._waiting:
            return (waited,)
        return (
            f"{waited}; {len(self._waiting)} blocks are not saved, and the next turn computes "
            "them again",
        )

    def _hand_over(self, wait_s: float) -> None:
        """Give the writer the blocks that it has room for, in order; for room, wait at most
        `wait_s` in all.
        """
        until = time.monotonic() + wait_s
        while self._waiting:
            left_s = until - time.monotonic()
            tried_until = time.monotonic() + min(max(0.0, left_s), POLL_S)
            new = self._waiting[0]
            if self._blocks.save(*new, self._group, tried_until - time.monotonic()):
                self._waiting.popleft()
            elif left_s <= 0.0 or self._claim.is_over or self._blocks.writer.is_closed:
                return
            else:  # its thread could not begin, which is no wait
                time.sleep(max(0.0, tried_until - time.monotonic()))


class Turn(Closing):
    """A turn of a conversation, which saves the KV that it makes block by block."""

    def __init__(self, session: Session, task: Task, report: PromptReport) -> None:
        """The session is held, and the prompt's KV is complete. Nothing is saved yet."""
        sessions = session.sessions
        self._session = session
        self._before = session.state
        self._task = task
        self._turn_kv = report.turn_kv
        self._ids = list(task.prompt.token_ids)  # of the prompt, and of the answer so far
        self._maker: BlockMaker | None = None  # without KV there are no blocks
        if self._turn_kv is not None:
            size = sessions.config.session.block_tokens
            index = session.state.history.next_index
            self._maker = BlockMaker(task.prompt, self._turn_kv, size, index)
        self._handover = Handover(sessions.blocks, self._group, task.claim)
        self._ended = False

    @property
    def saved_keys(self) -> tuple[EntryKey, ...]:
        """The keys of the blocks that this turn has saved so far."""
        return tuple(self._handover.keys)

    def begin(self) -> None:
        """Save blocks of history that were computed again, then complete new ones."""
        if self._maker is not None:
            self._save(self._maker.past(self._ids))
            self._save(self._maker.complete(self._ids))

    def follow(self, event: TokenEvent | Answer) -> TokenEvent | Answer:
        """The answer has one more token: save blocks as they become complete. An `Answer` finishes
        the turn.

        Returns the event as the caller gets it.
        """
        self._session.continued()
        if isinstance(event, Answer):
            return event.with_notes(*self.end(event.token_ids))
        if event.token_id is not None:
            self._ids.append(event.token_id)
            if self._maker is not None:
                self._save(self._maker.complete(self._ids))
        return event

    def end(self, answer: tuple[int, ...] = ()) -> tuple[str, ...]:
        """Make the turn part of the history: tokens with KV become blocks, the others the tail.

        Waits until the writer has all blocks, at most `SAVE_WAIT_S`; the returned notes say if it
        had to.
        """
        prompt = self._task.prompt
        sessions = self._session.sessions
        between = sessions.runs.after_answer + sessions.runs.before_next_turn
        self._ids = [*prompt.token_ids, *answer]
        whole = (*self._ids, *between)
        blocks = prompt.blocks
        at = len(prompt.prefix) + sum(map(len, blocks))
        next_digest = sessions.adapter.rope.digest(len(whole) + 1)
        # Under other RoPE frequencies the next prompt, which is longer, cannot use this KV.
        if (
            self._maker is not None
            and self._turn_kv is not None
            and next_digest == self._turn_kv.rope_digest
        ):
            self._save(self._maker.rest(self._ids))
            blocks = tuple(self._maker.blocks)
            at = self._maker.at
        assert prompt.history is not None
        parts = prompt.history.parts + self._parts(len(answer), len(between))
        history = History(blocks, whole[at:], parts)
        turns = with_turn(self._before.turns, self._before.history, sessions.clock())
        notes = self._handover.hand_over_rest()
        title = self._task.request.title
        self._commit(
            lambda state: replace(state, turns=turns, history=history, title=state.title or title)
        )
        self._ended = True
        self._drop_unused()
        return notes

    def _commit(self, change: Callable[[SessionState], SessionState]) -> None:
        """Commit the session's state, and drop the notes that this turn's report has."""
        # before the commit: the write that it begins may leave the same one again
        told = self._session.take_notes(self._task.prompt.notes)
        try:
            self._session.commit(change, lambda: self._task.claim.is_over)
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

    def _save(self, blocks: Iterable[NewBlock]) -> None:
        """Hand blocks to the writer. Before the first one the policies learn of the turn."""
        for new in blocks:
            if not self._handover.keys and self._turn_kv is not None:
                writer = self._session.sessions.blocks.writer
                writer.turn_prefilled(self._policy_turn(self._turn_kv))
            self._handover.add(new)

    def _policy_turn(self, turn_kv: TurnKV) -> TurnSize:
        """This turn as eviction policies see it; the answer counts with its most tokens, as its
        length is unknown.
        """
        prompt = self._task.prompt
        turns = self._before.turns
        sessions = self._session.sessions
        size = sessions.config.session.block_tokens
        now = sessions.clock()
        held = len(prompt.blocks)
        # tokens in front of the new blocks
        covered = len(prompt.prefix) + sum(map(len, prompt.blocks))
        return TurnSize(
            at=now,
            request=0,
            group=self._group,
            prompt=held + _blocks(covered, len(prompt.token_ids), turn_kv.exact_until, size),
            shared=held - len(turn_kv.lost_blocks),
            length=held + _blocks(covered, turn_kv.record.stop, turn_kv.exact_until, size),
            number=len(turns) + 1,
            since=now - turns[-1].at if turns else None,
        )

    def _drop_unused(self) -> None:
        """Delete the blocks that were saved and are in no history."""
        blocks = self._session.sessions.blocks
        blocks.delete_unused_later(set(self._handover.keys) - blocks.keys(self._session.state))

    def _parts(self, answer: int, between: int) -> tuple[Part, ...]:
        """The turn's runs of tokens. `answer` and `between` are the lengths of those after it."""
        prompt = self._task.prompt
        given_answer = len(self._task.request.given_answer)
        turn = len(self._before.turns)
        parts = [
            *(Part(PartKind.CHUNK, len(ids), turn) for ids, _ in prompt.body),
            Part(PartKind.QUESTION, len(prompt.tail) - given_answer, turn),
            Part(PartKind.ANSWER, given_answer, turn),
            Part(PartKind.ANSWER, answer, turn),
            Part(PartKind.BETWEEN, between, turn),
        ]
        return tuple(part for part in parts if len(part))


def _blocks(start: int, stop: int, exact_until: int, size: int) -> int:
    """How many blocks of at most `size` tokens hold start ... stop - 1. One ends where they are
    exact no more.
    """
    between = min(max(start, exact_until), stop)
    return -(-(between - start) // size) - (-(stop - between) // size)
