"""Conversations: what was said is kept with its KV, so that the next turn costs its new tokens (CachedAttention 3.1).

A turn takes the history as it is, hands what it makes over as it is made, and, once answered, becomes part of the
history in one step; a turn that fails or is given up leaves the session as it was and its blocks are dropped. State is
an immutable `Conversation`; everything here only replaces it. Whether a block is exact is for the planner to say.
"""

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Self
from weakref import WeakValueDictionary

from ragkv.config import SessionConfig
from ragkv.errors import InputError
from ragkv.history import (
    Block,
    BlockWriter,
    Chain,
    Conversation,
    Discard,
    Discardable,
    History,
    Part,
    PartKind,
    PastTurn,
    find,
    fitted,
    merged,
)
from ragkv.inference import Made, Past, Prefill, Prompt
from ragkv.model.layout import TemplateRuns
from ragkv.scheduling import Ticket
from ragkv.store import Background, Identity, Job, Turn, ids_digest
from ragkv.types import Answer, TokenEvent

from .manifest import Manifests, Summary

log = logging.getLogger(__name__)

SWEEP_S = 1.0  # idle sessions are looked for at most so often


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session as it is listed."""

    session_id: str
    turns: int
    tokens: int  # of its history
    stored_bytes: int  # KV of its history that is stored
    used_at: float  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class House:
    """What sessions need to know of their engine."""

    identity: Identity  # of its entries, whatever their context
    runs: TemplateRuns
    settings: SessionConfig
    token_bytes: int  # KV of one token
    context_length: int | None
    frequencies: Callable[[int], str]  # digest of the RoPE frequencies of a prompt of that length


class Session:
    """One conversation. Its turns are serialised by `lock`; made by `Engine.session`."""

    def __init__(
        self,
        sessions: "Sessions",
        session_id: str,
        conversation: Conversation,
        discard: str | Discard | None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.session_id = session_id
        self.lock = threading.Lock()
        self.conversation = conversation  # replaced by `Sessions.commit` alone
        self.discard_by = discard
        self.notes = notes  # what the next turn's report should say
        self.version: str | None = None  # where replicas share it: the edition this state is of
        self.deleted = False
        self._sessions = sessions
        self._owner: int | None = None  # the thread that has the lock, as far as known

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The history that the next turn stands behind, without the application's prefix."""
        return self.conversation.history.token_ids

    @property
    def turns(self) -> int:
        """How many turns it has."""
        return len(self.conversation.turns)

    @property
    def past(self) -> Past:
        """What the next turn stands behind."""
        return Past(self.conversation.history, self.discard_by, self.notes)

    def reset(self) -> None:
        """Forget every turn; blocks nobody else's history has are deleted."""
        with self.held():
            self._sessions.clear(self)

    def delete(self) -> None:
        """Delete the conversation: its manifest, and its blocks in every tier where no other session has them."""
        with self.held():
            self._sessions.clear(self)
            self._sessions.forget(self)

    def fork(self, session_id: str) -> "Session":
        """A new conversation with the same past; both share its blocks. Raises `InputError` if that id has turns."""
        return self._sessions.fork(self, session_id)

    def rewind(self, turns: int = 1) -> None:
        """Go back to before the last `turns` turns, to ask again or otherwise; `InputError` if there are fewer."""
        with self.held():
            past = self.conversation.turns
            if not 1 <= turns <= len(past):
                raise InputError(f"Cannot rewind {turns} turns: {self.session_id!r} has {len(past)}.")
            history = past[-turns].began
            self._sessions.commit(self, replace(self.conversation, turns=past[:-turns], history=history))

    def discard(self, what: Iterable[tuple[int, int]] | str | Discard) -> int:
        """Drop tokens from the history now: ranges of indices, or what a discarding list names; how many went."""
        with self.held():
            history = self.conversation.history
            if isinstance(what, str) or callable(what):
                target = int(self._sessions.house.settings.truncation_ratio * len(history))
                sinks = min(self._sessions.house.settings.sink_tokens, len(history))
                what = find(what)(Discardable(history.token_ids, history.parts, 0, target, sinks))
            return self._edit(history, merged(what, len(history)))

    def make_room(self, tokens: int) -> int:
        """Drop what a turn of `tokens` in all, answer included, would have to drop; how many went."""
        house = self._sessions.house
        with self.held():
            history, prefix = self.conversation.history, len(house.runs.before_documents)
            if house.context_length is None:
                return 0
            discard = house.settings.discard if self.discard_by is None else self.discard_by
            cut, _ = fitted(history, house.context_length - prefix - tokens, house.settings, discard, prefix)
            if cut is not history:
                self._sessions.commit(self, replace(self.conversation, history=cut))
            return len(history) - len(cut)

    def _edit(self, history: History, ranges: Sequence[tuple[int, int]]) -> int:
        house = self._sessions.house
        cut = history.without(ranges, house.settings.truncation, len(house.runs.before_documents))
        if ranges:
            self._sessions.commit(self, replace(self.conversation, history=cut))
        return len(history) - len(cut)

    @contextmanager
    def held(self, ticket: Ticket | None = None) -> Iterator[None]:
        """The session, alone. Raises `InputError` instead of waiting for this very thread, and once deleted.

        Raises what `ticket` raises while it waits.
        """
        if self._owner == threading.get_ident() and self.lock.locked():
            raise InputError(
                f"Session {self.session_id!r} has an answer under way on this thread: finish or close its stream first."
            )
        if ticket is None:
            self.lock.acquire()
        else:
            ticket.acquire(self.lock)
        try:
            if self.deleted:
                raise InputError(f"Session {self.session_id!r} was deleted; ask the engine for a new one.")
            self._owner = threading.get_ident()
            self._sessions.refresh(self)
            yield
        finally:
            self._owner = None
            self.lock.release()


class Sessions:
    """The conversations of one engine. All methods are thread-safe."""

    def __init__(
        self, house: House, saver: BlockWriter, manifests: Manifests | None, clock: Callable[[], float] = time.time
    ) -> None:
        """Without `manifests` sessions live in memory alone."""
        self.house, self._saver, self._manifests, self._clock = house, saver, manifests, clock
        self._writer: Background[None] = Background(0, "ragkv-manifests")
        self._lock = threading.RLock()  # the books; never held while waiting for a session or a disk
        self._live: WeakValueDictionary[str, Session] = WeakValueDictionary()
        self._held: dict[str, Session] = {}  # those that are nowhere else
        self._known: dict[str, Summary] = {}
        self._references: Counter[str] = Counter()  # how many histories have a block, by its key
        self._writing = threading.Lock()
        self._swept_at = 0.0
        self._requests = 0
        for summary in manifests.summaries() if manifests else ():
            self._known[summary.session_id] = summary
            self._references.update(summary.keys)
        self._sweep()
        self._writer.flush()

    def session(self, session_id: str, ttl_s: float | None = None, discard: str | Discard | None = None) -> Session:
        """The conversation of that id, new or as it stands; a given `ttl_s` or `discard` holds from now on."""
        if not isinstance(session_id, str) or not session_id:
            raise InputError(f"A session's id must be a string that is not empty, not {session_id!r:.80}.")
        if ttl_s is not None and not ttl_s > 0:
            raise InputError(f"ttl_s is {ttl_s}; it must be more than 0.")
        if discard is not None:
            find(discard)
        with self._lock:
            session = self._live.get(session_id) or self._opened(session_id)
            if discard is not None:
                session.discard_by = discard
            if ttl_s not in (None, session.conversation.ttl_s):
                self._live_for(session, ttl_s)
        self._clear_idle(session)
        return session

    @contextmanager
    def turn(self, session: Session | None, ticket: Ticket | None = None) -> "Iterator[OpenTurn]":
        """A turn of `session`, or one that nobody keeps. Given up, it leaves the session as it was."""
        if session is None:
            yield OpenTurn()
            return
        with session.held(ticket):
            if self._expired(session.session_id):
                self.clear(session)
            self._sweep()
            with SessionTurn(self, self._saver, session) as turn:
                yield turn

    def refresh(self, session: Session) -> None:
        """Bring a session up to what others made of it. The caller holds it; here there are no others."""

    def commit(self, session: Session, conversation: Conversation) -> None:
        """Replace a session's state, let go of blocks it no longer has, write it down behind. The caller holds it."""
        new = Summary.of(session.session_id, replace(conversation, used_at=self._clock()), self.house.identity)
        with self._lock:
            old = self._known.get(session.session_id)
            session.conversation = replace(conversation, used_at=new.used_at)
            self._known[session.session_id] = new
            self._references.update(new.keys)
            self._references.subtract(old.keys if old else ())
        for key in set(old.keys if old else ()) - set(new.keys):
            self._saver.then(partial(self.drop, key))
        self._write_behind(session)

    def drop(self, key: str) -> None:
        """Delete a block unless a history has it."""
        with self._lock:
            if self._references[key] > 0:
                return
            del self._references[key]
        self._saver.delete(key)

    def clear(self, session: Session) -> None:
        """Forget a session's turns, at once and everywhere. The caller holds it."""
        with self._lock:
            old = self._known.pop(session.session_id, None)
            self._references.subtract(old.keys if old else ())
            now = self._clock()
            session.conversation = Conversation(created_at=now, used_at=now, ttl_s=session.conversation.ttl_s)
            session.notes = ()
            if self._manifests is not None:
                self._held.pop(session.session_id, None)
        self._write(session)
        for key in old.keys if old else ():
            self.drop(key)

    def forget(self, session: Session) -> None:
        """Let go of a session that was cleared for good."""
        with self._lock:
            session.deleted = True
            self._live.pop(session.session_id, None)
            self._held.pop(session.session_id, None)

    def announce(self, keys: Sequence[str]) -> None:
        """Entries were deleted that others may hold; here there are no others."""

    def fork(self, session: Session, session_id: str) -> Session:
        """A session of that id with the same past, without a turn under way."""
        past, other = session.conversation, self.session(session_id, discard=session.discard_by)
        if other is session:
            raise InputError(f"{session_id!r} is the id of the conversation to be forked itself: choose another.")
        with other.held():
            if other.turns:
                raise InputError(f"There is a conversation {session_id!r} already: choose another id, or delete it.")
            self.commit(other, replace(past, created_at=self._clock()))
        return other

    def list(self) -> tuple[SessionInfo, ...]:
        """Every session that has turns, the last used first."""
        with self._lock:
            known = sorted(self._known.values(), key=lambda summary: -summary.used_at)
        return tuple(self._info(summary) for summary in known if summary.turns)

    def ids(self) -> tuple[str, ...]:
        """Of every session that has turns, in no order."""
        with self._lock:
            return tuple(summary.session_id for summary in self._known.values() if summary.turns)

    def next_request(self) -> int:
        """A number, one higher each time."""
        with self._lock:
            self._requests += 1
            return self._requests

    def now(self) -> float:
        """Seconds since the epoch."""
        return self._clock()

    def flush(self) -> None:
        """Return when every turn so far is handed to the store and written down."""
        self._saver.flush()
        self._writer.flush()

    def close(self) -> None:
        """Finish writing and stop. Twice is harmless."""
        self._saver.close()
        self._writer.close()

    def _opened(self, session_id: str) -> Session:
        conversation, note = self._manifests.load(session_id) if self._manifests else (None, None)
        now = self._clock()
        if conversation is None:
            conversation = Conversation(created_at=now, used_at=now)
            if lost := self._known.pop(session_id, None):
                self._references.subtract(lost.keys)
        elif session_id not in self._known:  # its summary was not readable at open
            summary = self._known[session_id] = Summary.of(session_id, conversation, self.house.identity)
            self._references.update(summary.keys)
        session = Session(self, session_id, conversation, None, (note,) if note else ())
        self._live[session_id] = session
        if self._manifests is None:
            self._held[session_id] = session
        return session

    def _live_for(self, session: Session, ttl_s: float | None) -> None:
        session.conversation = replace(session.conversation, ttl_s=ttl_s)
        self._write_behind(session)

    def _write_behind(self, session: Session) -> None:
        if self._manifests is None:
            self._held[session.session_id] = session
        else:
            self._writer.submit(Job(lambda: self._write(session)))  # which holds on to the session until it is written

    def _write(self, session: Session) -> None:
        """Bring a session's manifest up to its state; a failure is its next turn's note."""
        manifests = self._manifests
        if manifests is None or session.deleted:
            return
        try:
            with self._writing:  # one at a time, so that the newest state is written last
                self._save(manifests, session)
        except OSError as error:
            log.warning("Session %r cannot be written to disk: %s. It lives in memory.", session.session_id, error)
            with self._lock:
                self._held[session.session_id] = session
                session.notes = (f"the conversation could not be written to disk ({error.strerror})",)
        else:
            with self._lock:
                self._held.pop(session.session_id, None)

    @staticmethod
    def _save(manifests: Manifests, session: Session) -> None:
        conversation = session.conversation
        if conversation.turns or len(conversation.history):
            manifests.save(session.session_id, conversation)
        else:
            manifests.delete(session.session_id)

    def _expired(self, session_id: str) -> bool:
        with self._lock:
            summary, live = self._known.get(session_id), self._live.get(session_id)
        own = live.conversation.ttl_s if live else summary.ttl_s if summary else None
        ttl_s = self.house.settings.ttl_s if own is None else own
        return summary is not None and ttl_s is not None and self._clock() - summary.used_at > ttl_s

    def _clear_idle(self, session: Session) -> None:
        """Clear a session that was idle for too long; not while somebody has it."""
        if self._expired(session.session_id) and session.lock.acquire(blocking=False):
            try:
                self.clear(session)
            finally:
                session.lock.release()

    def _sweep(self) -> None:
        """Have sessions cleared that were idle for too long, behind; not those of which a turn runs."""
        now = self._clock()
        with self._lock:
            if now - self._swept_at < SWEEP_S:
                return
            self._swept_at, known = now, list(self._known)
        for session_id in filter(self._expired, known):
            self._writer.submit(Job(partial(self.session, session_id)))  # which clears it, unless somebody has it

    def _info(self, summary: Summary) -> SessionInfo:
        sizes = zip(summary.keys, summary.key_tokens, strict=True)
        stored = sum(tokens for key, tokens in sizes if self._saver.stored(key))
        size = stored * self.house.token_bytes
        return SessionInfo(summary.session_id, summary.turns, summary.tokens, size, summary.used_at)


class OpenTurn:
    """A turn being answered that nobody keeps; dies with it."""

    past = Past()
    keeps = False

    def prefilled(self, prompt: Prompt, prefill: Prefill) -> None:
        """The prompt's KV is there."""

    def follow(self, event: TokenEvent | Answer) -> None:
        """The answer went on, or ended."""

    def end(self, answer: tuple[int, ...] = ()) -> None:
        """All is said."""


class SessionTurn(OpenTurn):
    """A turn of a conversation: cuts what it makes into blocks, and becomes part of the history once it is answered."""

    keeps = True

    def __init__(self, sessions: Sessions, saver: BlockWriter, session: Session) -> None:
        self._sessions, self._saver, self._session, self._house = sessions, saver, session, sessions.house
        self.past = session.past
        self._before = session.conversation
        self._taint = secrets.token_hex(16)  # of what is not exact: nobody else's
        self._saved: list[str] = []  # keys
        self._blocks: list[Block] = []
        self._ended = False

    def prefilled(self, prompt: Prompt, prefill: Prefill) -> None:
        """Hand over the blocks that the prompt made and that are whole."""
        self._prompt, self._prefix = prompt, len(prompt.prefix)
        self._ids = list(prompt.token_ids)
        self._made, self._behind = prefill.made, ids_digest(prompt.prefix)
        self._chain, self._at = Chain(prompt.prefix), self._prefix
        history, made = prompt.history, prefill.made
        self._blocks = list(history.blocks)
        for number, block in enumerate(history.blocks):
            if made is not None and number in made.remade:
                self._blocks[number] = self._cut(made, self._at + len(block), block.index)
            self._at += len(block)
            self._chain.saw(block.kept_ids)
        self._next_index = self._before.history.next_index
        self._grow()

    def follow(self, event: TokenEvent | Answer) -> None:
        """Hand over blocks as they become whole; an `Answer` ends the turn."""
        if isinstance(event, Answer):
            self.end(event.token_ids)
        else:
            self._ids.append(event.token_id)
            self._grow()

    def end(self, answer: tuple[int, ...] = ()) -> None:
        """Make the turn part of the history: blocks for what has KV, a tail for the rest."""
        prompt, runs = self._prompt, self._house.runs
        between = runs.after_answer + runs.before_next_turn
        self._ids = [*prompt.token_ids, *answer]
        whole = (*self._ids, *between)
        made = self._made
        if made is not None and self._house.frequencies(len(whole) + 1) == made.frequencies:
            self._grow()
            if self._at < self._filled(made):
                self._add(made, self._filled(made))
        else:  # no longer prompt could use what was made
            self._blocks = list(prompt.history.blocks)
            self._at = self._prefix + sum(map(len, self._blocks))
        turn = len(self._before.turns)
        parts = [*prompt.parts, Part(PartKind.ANSWER, len(answer)), Part(PartKind.BETWEEN, len(between))]
        said = tuple(replace(part, turn=turn) for part in parts if len(part))
        history = History(tuple(self._blocks), whole[self._at :], prompt.history.parts + said)
        began = PastTurn(self._before.history, self._sessions.now())
        self._session.notes = ()
        self._sessions.commit(
            self._session, replace(self._session.conversation, turns=(*self._before.turns, began), history=history)
        )
        self._ended = True
        self._drop_unused()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._ended:
            self._drop_unused()

    def _filled(self, made: Made) -> int:
        return min(made.record.filled_to, len(self._ids))

    def _grow(self) -> None:
        made, size = self._made, self._house.settings.block_tokens
        while made is not None and self._filled(made) - self._at >= size:
            self._add(made, self._at + size)

    def _add(self, made: Made, stop: int) -> None:
        """The block from where we are up to `stop` comes next."""
        block = self._cut(made, stop, self._next_index)
        self._blocks.append(block)
        self._next_index += 1
        self._at = stop
        self._chain.saw(block.kept_ids)

    def _cut(self, made: Made, stop: int, index: int) -> Block:
        """A block of what was made from where we are up to `stop`, handed over to be stored."""
        ids = tuple(self._ids[self._at : stop])
        taint = "" if stop <= made.exact_to else self._taint
        context = self._chain.context(made.frequencies, taint)
        block = Block(context, self._behind, made.frequencies, ids, index, 0, len(ids))
        if not self._saved:
            self._saver.served(self._policy_turn(made))
        first = made.record.start
        self._saved.append(self._saver.key(block))
        self._saver.save(block, made.record.kv[:, :, :, self._at - first : stop - first], self._session.session_id)
        return block

    def _policy_turn(self, made: Made) -> Turn:
        """This turn as policies see it; of the answer only the room it was given is known yet."""
        size, held = self._house.settings.block_tokens, len(self._prompt.history.blocks)
        behind = self._prefix + sum(map(len, self._prompt.history.blocks))
        turns, now = self._before.turns, self._sessions.now()
        return Turn(
            at=now,
            request=self._sessions.next_request(),
            group=self._session.session_id,
            prompt=held + -(-(len(self._prompt.token_ids) - behind) // size),
            shared=held - len(made.remade),
            length=held + -(-(made.record.stop - behind) // size),
            number=len(turns) + 1,
            since=now - turns[-1].at if turns else None,
        )

    def _drop_unused(self) -> None:
        """Let go of blocks that were saved and are part of no history."""
        kept = {self._saver.key(block) for block in self._session.conversation.history.blocks}
        for key in set(self._saved) - kept:
            self._saver.then(partial(self._sessions.drop, key))


__all__ = ["House", "OpenTurn", "Session", "SessionInfo", "SessionTurn", "Sessions"]
