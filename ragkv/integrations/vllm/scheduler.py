"""The scheduler's half: which prompts are fused, when their KV is promised to vLLM, and the reports about them.

vLLM asks about a waiting request in every step. The first time its prompt is handed to the `FusingQueue`; until it is
fused the answer is "ask again". Then exactly the tokens that are fused are promised, so a promise never fails: whatever
goes wrong before, vLLM computes the prompt. No error leaves this class, because it would end vLLM's engine.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ragkv.api.vllm_backend import connector_answer, fused_report, left_report
from ragkv.engine import Engine
from ragkv.errors import InputError
from ragkv.model import PromptKV

from .chunk_index import ChunkIndex
from .fusing import FusingQueue, PromptJob
from .layout import Wish, layout
from .settings import ConnectorSettings

log = logging.getLogger(__name__)

IDLE_S = 0.005  # `IDLE_S` is how long a step that has nothing to compute waits for a prompt that is being fused.
MOST_NAMED = 4096  # `MOST_NAMED` is how many reports are kept until they are asked for.
MOST_ENTRIES = 1_000_000  # `MOST_ENTRIES` is how many entries of the store are listed.


@dataclass(frozen=True, slots=True)
class PagedLoad:
    """One prompt's KV that the worker is to write."""

    kv: PromptKV
    tokens: int  # the first positions, which vLLM was promised
    block_ids: tuple[int, ...]  # of the paged cache, in the prompt's order


class PromptScheduler:
    """The prompts of one vLLM engine."""

    def __init__(self, engine: Engine, settings: ConnectorSettings) -> None:
        self._engine, self._settings = engine, settings
        identities, store = engine.entries.encoder.identities, engine.store
        self._index = ChunkIndex(
            lambda: (info.token_ids for info in store.sample(MOST_ENTRIES) if info.identity in identities),
            settings.refresh_s,
        )
        self._queue = FusingQueue(engine, settings)
        self._jobs: dict[str, PromptJob | None] = {}  # by request; None: vLLM computes the prompt
        self._submitted: set[str] = set()  # requests whose prompts are in the queue, or fused and not yet written
        self._waiting_or_running: set[str] = set()  # requests that have not ended
        self._busy = ExitStack()  # meanwhile the engine counts a request, so that missed chunks are encoded later
        self._loads: list[PagedLoad] = []  # of the step that is being scheduled
        self._reports: dict[str, dict[str, Any]] = {}  # by request
        self._names: dict[str, str] = {}  # of the reports of requests, by request
        self._named: OrderedDict[str, dict[str, Any]] = OrderedDict()  # reports by their names, the oldest first

    @property
    def known_chunks(self) -> int:
        """How many chunks are found in prompts."""
        return len(self._index)

    def promised(self, request: Any, computed: int) -> int | None:
        """How many of the request's tokens behind the `computed` ones are fused; `None`: ask again."""
        try:
            self._begin(request.request_id)
            return 0 if computed else self._promised(request)
        except Exception as error:
            log.exception("Request %s is computed by vLLM.", request.request_id)
            self._leave(request.request_id, f"an error: {error}")
            return 0

    def allocated(self, request: Any, block_ids: Sequence[int], tokens: int) -> None:
        """vLLM allocated blocks for the request, and takes `tokens` of those that were promised."""
        job = self._jobs.pop(request.request_id, None)
        self._submitted.discard(request.request_id)
        if job is None or job.prefill is None or not tokens:
            return
        self._loads.append(PagedLoad(job.prefill.fused.kv, tokens, tuple(block_ids)))
        self._keep(request.request_id, fused_report(job.prefill, job.layout.promised))

    def take_loads(self, *, idle: bool) -> tuple[PagedLoad, ...]:
        """What is to be written in this step. If vLLM has nothing to compute (`idle`), wait a moment for a prompt."""
        loads, self._loads = tuple(self._loads), []
        if idle and self._submitted:
            self._queue.wait(IDLE_S)
        return loads

    def finished(self, request: Any) -> dict[str, Any] | None:
        """The report of a request that has ended or was aborted; `None` if it had nothing to do with ragkv."""
        job = self._jobs.pop(request.request_id, None)
        self._submitted.discard(request.request_id)
        if job is not None:
            job.cancel.set()
        self._waiting_or_running.discard(request.request_id)
        if not self._waiting_or_running:
            self._busy.close()
        self._names.pop(request.request_id, None)
        report = self._reports.pop(request.request_id, None)
        return None if report is None else {"ragkv": report}

    def close(self) -> None:
        """Stop fusing, and close the engine and its store. Safe to call twice."""
        for job in self._jobs.values():
            if job is not None:
                job.cancel.set()
        self._busy.close()
        self._index.close()
        self._queue.close()
        self._engine.close()

    def _begin(self, name: str) -> None:
        """Note that vLLM has the request `name`."""
        if not self._waiting_or_running:
            self._busy.enter_context(self._engine.scheduler.request())
        self._waiting_or_running.add(name)

    def _promised(self, request: Any) -> int | None:
        name = request.request_id
        if name not in self._jobs:
            self._jobs[name] = self._job(request)
        job = self._jobs[name]
        if job is None:
            return 0
        if name not in self._submitted:
            if len(self._submitted) >= self._settings.prompts:
                return self._leave(name, "the store is stalled") if self._queue.stalled() else None
            self._submitted.add(name)
            self._queue.submit(job)
        if not job.done.is_set():
            return self._leave(name, f"no KV within {self._settings.timeout_s} s") if self._queue.stalled() else None
        return self._leave(name, job.why) if job.prefill is None else job.layout.promised

    def _job(self, request: Any) -> PromptJob | None:
        """A job for the request's prompt; `None` if vLLM computes it."""
        ids = request.prompt_token_ids
        other = request.lora_request is not None or bool(request.mm_features)
        if ids is None or other or request.pooling_params is not None or request.skip_reading_prefix_cache:
            return None
        params: Mapping[str, Any] | None = request.kv_transfer_params
        try:
            wish = Wish.of(params, len(ids))
        except InputError as error:
            self._leave(request.request_id, str(error))
            return None
        if wish.report_of is not None:
            self._reports[request.request_id] = self._answer(wish.report_of)
            return None
        if wish.name is not None:
            self._names[request.request_id] = wish.name
            if wish.name not in self._named:  # another answer to the same prompt, or this one before vLLM preempted it
                self._name(wish.name, left_report())
        found = layout(ids, wish, self._index, self._engine.intake.runs.before_documents)
        return None if found is None else PromptJob(found)

    def _leave(self, name: str, why: str) -> int:
        """Leave a prompt to vLLM, because of `why`; 0 tokens are promised."""
        job = self._jobs.get(name)
        if job is not None:
            job.cancel.set()
        self._jobs[name] = None
        self._submitted.discard(name)
        self._keep(name, left_report(why, [] if job is None else job.missed))
        return 0

    def _keep(self, request: str, report: dict[str, Any]) -> None:
        """Keep the report of a request for its response, and under the name that it gave it."""
        self._reports[request] = report
        if (name := self._names.get(request)) is not None:
            self._name(name, report)

    def _name(self, name: str, report: dict[str, Any]) -> None:
        self._named[name] = report
        while len(self._named) > MOST_NAMED:
            self._named.popitem(last=False)

    def _answer(self, name: str) -> dict[str, Any]:
        """What a request gets that asks for a report; it is kept no longer."""
        method = self._engine.intake.method({})
        ratio = None if method.controlled else method.ratio
        identity = self._engine.entries.encoder.identity
        answer: dict[str, Any] = connector_answer(self._named.pop(name, None), identity, ratio, method.selector.name)
        return answer
