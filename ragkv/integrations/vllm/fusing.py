"""Fuses prompts on threads of its own, while vLLM computes and decodes other requests."""

import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import cast

from ragkv.engine import Engine
from ragkv.errors import RagKVError
from ragkv.fusion import AskingSelector
from ragkv.prompt import Prefill, PrefillOptions
from ragkv.runtime import Closing
from ragkv.types import Text

from .layout import FusedLayout
from .settings import ConnectorSettings

log = logging.getLogger(__name__)

THREADS = 2  # `THREADS` is two: one computes, the other looks up entries and reads ahead.


class PromptJob:
    """One prompt on its way to fused KV. It ends with a prefill, or with a reason why there is none."""

    def __init__(self, layout: FusedLayout) -> None:
        self.layout = layout
        self.cancel = threading.Event()
        self.done = threading.Event()
        self.prefill: Prefill | None = None  # set before `done` is
        self.why = ""  # why vLLM computes the prompt
        self.missed: list[int] = []  # lengths of its chunks that have no stored KV, if that is why


class FusingQueue(Closing):
    """Fuses prompts in the order in which they come."""

    def __init__(self, engine: Engine, settings: ConnectorSettings) -> None:
        self._engine, self._settings = engine, settings
        self._pool = ThreadPoolExecutor(THREADS, "ragkv-fuse", initializer=_use_all_processors)
        self._guard = threading.Lock()
        self._unfinished = 0  # jobs that were submitted and have not ended
        self._progress = time.monotonic()  # when a job began or ended last, or the first was submitted
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
        """Return when a job has ended since the last call, after `seconds` at the latest."""
        self._ended.wait(seconds)
        self._ended.clear()

    def close(self) -> None:
        """Cancel what waits, and return when the prompt that is fused now has ended. Safe to call twice."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, job: PromptJob) -> None:
        self._progress = time.monotonic()
        try:
            if not job.cancel.is_set():
                self._fuse(job)
        except RagKVError as error:
            job.why = str(error)
        except Exception as error:
            log.exception("A prompt of %d tokens could not be fused; vLLM computes it.", len(job.layout.token_ids))
            job.why = f"fusing failed: {error}"
        with self._guard:
            self._unfinished -= 1
            self._progress = time.monotonic()
        job.done.set()
        self._ended.set()

    def _fuse(self, job: PromptJob) -> None:
        engine, layout = self._engine, job.layout
        stored, lacking = self._stored(layout)
        if stored < self._settings.least_reuse * layout.promised:
            if lacking:
                engine.entries.warm_soon(lacking)
            job.missed = list(map(len, lacking))
            job.why = f"only {stored} of {layout.promised} tokens up to the last chunk have stored KV"
            return
        question = layout.question(whole=self._needs_question(layout))
        prefill = engine.prefill(question, layout.runs, raw=True, separator="", cancel=job.cancel, **layout.options)
        engine.model.adapter.wait_for_device()  # vLLM reads the KV on another stream
        job.prefill = prefill

    def _stored(self, layout: FusedLayout) -> tuple[int, list[tuple[int, ...]]]:
        """How many tokens of the prompt's chunks have stored KV, and the chunks that have none."""
        chunks = [run for run in layout.runs if not isinstance(run, Text)]
        lacking = [run for run in chunks if not self._engine.entries.has(run.stored_ids)]
        return sum(map(len, chunks)) - sum(map(len, lacking)), [run.stored_ids for run in lacking]

    def _needs_question(self, layout: FusedLayout) -> bool:
        """Whether the tokens to recompute depend on the question, so that ragkv must compute it too."""
        selector = self._engine.intake.method(cast(PrefillOptions, layout.options)).selector
        scorer = self._engine.entries.encoder.scorer
        by_network = selector.needs_scores and scorer is not None and bool(scorer.network_digest)
        return isinstance(selector, AskingSelector) or by_network


def _use_all_processors() -> None:
    """Let this thread run on every processor of the process: vLLM binds the thread that started it to one of them."""
    allowed: set[int] = set()
    with suppress(OSError, AttributeError):
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):
                allowed |= os.sched_getaffinity(int(task.name))
        os.sched_setaffinity(0, allowed)
