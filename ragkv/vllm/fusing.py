"""Fuses prompts on threads of its own, while vLLM computes and decodes other requests."""

import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

from ragkv.engine import Engine
from ragkv.errors import RagKVError, SessionConflictError
from ragkv.fusion import Selection
from ragkv.prompt import PrefilledPrompt, PrefillOptions, chunks_among, stored_ids
from ragkv.prompt.history import Block, History, Part, PartKind
from ragkv.runtime import Closing, openmp
from ragkv.sessions import Session

from .homes import Home, Homes
from .layout import FusedLayout, Wish, layout
from .settings import ConnectorSettings

log = logging.getLogger(__name__)

THREADS = 2  # two: one computes, the other looks up entries and reads ahead


class PromptJob:
    """One prompt on its way to fused KV. It ends with a prefill, or with a reason why there is
    none.
    """

    def __init__(self, token_ids: tuple[int, ...], wish: Wish, salt: str = "") -> None:
        """`salt` names the conversation, if its KV is to be kept; "": none is."""
        self.token_ids = token_ids
        self.wish = wish
        self.session_id = salt if wish.keep else ""
        self.promised = 0  # the first tokens, whose KV `prefill` has
        self.cancel = threading.Event()
        self.done = threading.Event()
        self.prefill: PrefilledPrompt | None = None  # set before `done` is
        self.why = ""  # why vLLM computes the prompt
        self.missed: list[int] = []  # lengths of its chunks that have no stored KV, if that is why


class FusingQueue(Closing):
    """Fuses prompts in the order in which they come."""

    def __init__(self, homes: Homes, settings: ConnectorSettings) -> None:
        self._homes = homes
        self._settings = settings
        self._pool = ThreadPoolExecutor(THREADS, "ragkv-fuse", initializer=_use_all_processors)
        self._guard = threading.Lock()
        self._unfinished = 0  # jobs that were submitted and have not ended
        # when a job began or ended last, or the first was submitted
        self._progress = time.monotonic()
        self._ended = threading.Event()  # some job ended since the last `wait`

    def submit(self, job: PromptJob) -> None:
        """Fuse the prompt of `job` when its turn comes."""
        with self._guard:
            if not self._unfinished:
                self._progress = time.monotonic()
            self._unfinished += 1
        self._pool.submit(self._run, job)

    def stalled(self) -> bool:
        """Whether no job began or ended for `timeout_s`, although some wait."""
        return time.monotonic() - self._progress > self._settings.timeout_s

    def wait(self, seconds: float) -> None:
        """Return when a job has ended since the last call, after `seconds` at the latest. vLLM's
        thread has no OpenMP pool meanwhile: an idle pool slows the pools of the fusing threads.
        """
        openmp.release_threads()
        self._ended.wait(seconds)
        self._ended.clear()

    def close(self) -> None:
        """Cancel what waits, and return when the prompt that is fused now has ended. Safe to call
        twice.
        """
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, job: PromptJob) -> None:
        self._progress = time.monotonic()
        try:
            if not job.cancel.is_set():
                with self._homes.use(job.wish.tenant) as home:
                    self._fuse(job, home)
        except RagKVError as error:
            job.why = str(error)
        except Exception as error:
            log.exception(
                "A prompt of %d tokens could not be fused; vLLM computes it.", len(job.token_ids)
            )
            job.why = f"fusing failed: {error}"
        with self._guard:
            self._unfinished -= 1
            self._progress = time.monotonic()
        job.done.set()
        self._ended.set()

    def _fuse(self, job: PromptJob, home: Home) -> None:
        engine = home.engine
        ids = job.token_ids
        prefix = engine.parts.intake.runs.before_documents
        session = engine.session(job.session_id) if job.session_id else None
        held = (
            0
            if session is None
            else keep_beginning(session, ids[len(prefix) if ids[: len(prefix)] == prefix else 0 :])
        )
        found = layout(ids, job.wish, home.index, prefix, held)
        if found is None or not self._is_stored(job, found, engine):
            return
        question = found.question(whole=self._needs_question(found, engine))
        options = cast(
            PrefillOptions,
            dict(found.options) | {"raw": True, "separator": "", "cancel": job.cancel},
        )
        if session is None:
            prefill = engine.prefill(question, found.runs, **options)
        else:
            prefill = engine.append(session, question, (), found.runs, **options)
        if tuple(prefill.token_ids[: found.promised].tolist()) != ids[: found.promised]:
            raise SessionConflictError(
                "two requests with the same cache_salt were turns of one conversation at once"
            )
        engine.model.adapter.wait_for_device()  # vLLM reads the KV on another stream
        job.promised = found.promised
        job.prefill = prefill

    def _is_stored(self, job: PromptJob, found: FusedLayout, engine: Engine) -> bool:
        """Whether enough of the prompt has stored KV; else the job gets the reason."""
        chunks = chunks_among(found.runs)
        lacking = [run for run in chunks if not engine.entries.has(stored_ids(run))]
        stored = found.held + sum(map(len, chunks)) - sum(map(len, lacking))
        # up to the end of the last chunk
        wanted = found.held + (sum(map(len, found.runs)) if chunks else 0)
        if stored >= self._settings.least_reuse * wanted:
            return True
        engine.entries.encode_soon([stored_ids(run) for run in lacking])
        job.missed = [len(stored_ids(run)) for run in lacking]
        job.why = f"only {stored} of {wanted} tokens up to the last chunk have stored KV"
        return False

    def _needs_question(self, found: FusedLayout, engine: Engine) -> bool:
        """Whether the tokens to recompute depend on the question, so that ragkv must compute it
        too.
        """
        selector = engine.method(found.options).selector
        return found.promised == len(found.token_ids) - 1 or selector.selection is Selection.ASKING


def keep_beginning(session: Session, token_ids: Sequence[int]) -> int:
    """Keep the blocks with which `token_ids`, the next prompt behind the prefix, begins; returns
    their tokens.

    vLLM's client keeps the text of the conversation. All text after the blocks is then part of the
    prompt.
    """
    with session.held():
        history = session.history
        blocks = list[Block]()
        at = 0
        for block in history.blocks:
            end = at + len(block)
            if block.kept_ids != tuple(token_ids[at:end]) or end == len(token_ids):
                break
            blocks.append(block)
            at = end
        if len(history) > at:
            kept = History(tuple(blocks), (), (Part(PartKind.CHUNK, at),) if at else ())
            session.commit(lambda state: replace(state, turns=(), history=kept))
        return at


def _use_all_processors() -> None:
    """Let this thread run on every processor of the process: vLLM binds the thread that started it
    to one of them.
    """
    allowed: set[int] = set()
    with suppress(OSError, AttributeError):
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):
                allowed |= os.sched_getaffinity(int(task.name))
        os.sched_setaffinity(0, allowed)
