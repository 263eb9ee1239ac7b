"""The scheduler's half: which prompts are fused, when their KV is promised to vLLM, and the reports
about them.

vLLM asks about a waiting request in every step. The first time, its prompt is handed to the
`FusingQueue`. Until it is fused, the answer is "ask again". Then exactly the fused tokens are
promised, so a promise never fails. If anything goes wrong before that, vLLM computes the prompt. No
error leaves this class, because it would end vLLM's engine.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from ragkv.engine import Engine
from ragkv.errors import InputError
from ragkv.model import PromptKV
from ragkv.vllm.front import cached_report, connector_answer, fused_report, left_report
from ragkv.vllm.front.salts import SECRET_VARIABLE, is_proved, salted, shared_secret

from .fusing import FusingQueue, PromptJob
from .homes import Homes
from .layout import Wish
from .settings import ConnectorSettings

log = logging.getLogger(__name__)

# How long a step that has nothing to compute waits for a prompt that is being fused.
IDLE_S = 0.005
MOST_NAMED = 4096  # how many reports are kept until they are asked for


@dataclass(frozen=True, slots=True)
class PagedLoad:
    """One prompt's KV that the worker is to write."""

    kv: PromptKV
    start: int  # the positions start ... stop - 1, which vLLM was promised
    stop: int
    block_ids: tuple[int, ...]  # of the paged cache, in the prompt's order


@dataclass(slots=True)
class _Seen:
    """A request that vLLM has."""

    wish: Wish
    # fused KV may stand in its blocks: no request finds them that does not share its salt
    fuses: bool = False
    left: bool = True  # vLLM computes the prompt, also if its wish cannot be read
    job: PromptJob | None = None
    queued: bool = False  # the job is in the queue, or done and its KV not yet written
    cached: int = 0  # tokens that vLLM's prefix cache has
    report: dict[str, Any] | None = None


class PromptScheduler:
    """The prompts of one vLLM engine."""

    def __init__(
        self, engine: Engine, settings: ConnectorSettings, prefix_caching: bool = False
    ) -> None:
        """`prefix_caching`: vLLM finds blocks again, so only requests with a salt are fused."""
        self._engine = engine
        self._settings = settings
        self._prefix_caching = prefix_caching
        self._homes = Homes(engine, settings)
        self._queue = FusingQueue(self._homes, settings)
        self._secret = shared_secret()
        self._requests: dict[str, _Seen] = {}  # requests that have not ended, by their ids
        # meanwhile the engine counts a request, so that missed chunks are encoded later
        self._busy = ExitStack()
        self._loads: list[PagedLoad] = []  # of the step that is being scheduled
        # reports by their names, the oldest first
        self._named: OrderedDict[str, dict[str, Any]] = OrderedDict()

    @property
    def known_chunks(self) -> int:
        """How many chunks are found in prompts."""
        return len(self._homes.unnamed.index)

    def arrived(self, request: Any) -> None:
        """vLLM has a new request. It gets a salt by which it finds only blocks of its tenant, made
        in its way.
        """
        try:
            self._seen(request)
        except Exception:
            log.exception("Request %s is computed by vLLM.", request.request_id)

    def promised(self, request: Any, computed: int) -> int | None:
        """How many of the request's tokens behind the `computed` ones are fused; `None`:
        ask again.
        """
        try:
            seen = self._seen(request)
            seen.cached = computed
            return self._promised(request, seen)
        except Exception as error:
            log.exception("Request %s is computed by vLLM.", request.request_id)
            seen = self._requests.setdefault(request.request_id, _Seen(Wish(reuse="none")))
            return self._leave(seen, f"an error: {error}")

    def allocated(self, request: Any, block_ids: Sequence[int], tokens: int) -> None:
        """vLLM allocated blocks for the request, and takes `tokens` of those that were promised."""
        seen = self._requests.get(request.request_id)
        if seen is None or seen.wish.report_of is not None:
            return
        job = seen.job
        seen.job = None
        seen.queued = False
        if job is not None and job.prefill is not None:
            kv = job.prefill.kv
            start = job.promised - tokens
            self._loads += [PagedLoad(kv, start, job.promised, tuple(block_ids))] if tokens else []
            self._keep(seen, fused_report(job.prefill, job.promised))
        elif seen.cached and (seen.report is None or not seen.report["promised_tokens"]):
            state = "fused" if seen.fuses else "exact"
            self._keep(seen, cached_report(seen.report or left_report(), seen.cached, state))

    def take_loads(self, *, idle: bool) -> tuple[PagedLoad, ...]:
        """What is to be written in this step. If vLLM has nothing to compute (`idle`), wait a
        moment for a prompt.
        """
        loads = tuple(self._loads)
        self._loads = []
        if idle and any(seen.queued for seen in self._requests.values()):
            self._queue.wait(IDLE_S)
        return loads

    def finished(self, request: Any) -> dict[str, Any] | None:
        """The report of a request that has ended or was aborted; `None` if it had nothing to do
        with ragkv.
        """
        seen = self._requests.pop(request.request_id, None)
        if not self._requests:
            self._busy.close()
        if seen is not None and seen.job is not None:
            seen.job.cancel.set()
        return None if seen is None or seen.report is None else {"ragkv": seen.report}

    def close(self) -> None:
        """Stop fusing, and close the engines and their stores. Safe to call twice."""
        for seen in self._requests.values():
            if seen.job is not None:
                seen.job.cancel.set()
        self._busy.close()
        self._queue.close()
        self._homes.close()

    def _seen(self, request: Any) -> _Seen:
        """What is known of the request; the first time its wish is read, and its salt is made."""
        if (seen := self._requests.get(request.request_id)) is not None:
            return seen
        if not self._requests:
            self._busy.enter_context(self._engine.parts.scheduler.request())
        seen = self._requests[request.request_id] = _Seen(Wish(reuse="none"))
        why = ""
        salt = request.cache_salt or ""
        try:
            seen.wish = Wish.of(request.kv_transfer_params, len(request.prompt_token_ids or ()))
        except InputError as error:
            why = str(error)
        wish = seen.wish
        if wish.tenant and not is_proved(self._secret, wish.tenant, salt, wish.proof):
            why = f"the tenant is not proved: both servers need the same {SECRET_VARIABLE}"
        if salt or wish.tenant:
            alone = request.request_id if why else ""
            request.cache_salt = salted(salt, wish.tenant, wish.method, alone, secret=self._secret)
            request.block_hashes.clear()
            request.update_block_hashes()
        other = (
            request.lora_request is not None
            or bool(request.mm_features)
            or request.pooling_params is not None
        )
        left = (
            other
            or request.skip_reading_prefix_cache
            or request.prompt_token_ids is None
            or wish.reuse == "none"
        )
        seen.fuses = not why and not left and (bool(salt) or not self._prefix_caching)
        seen.left = not seen.fuses
        if wish.report_of is not None:
            seen.report = self._answer(wish.report_of)
            seen.left = True
        # else it is another answer to the same prompt
        elif why or (wish.name and wish.name not in self._named):
            self._keep(seen, left_report(why))
        return seen

    def _promised(self, request: Any, seen: _Seen) -> int | None:
        if seen.left:
            return 0
        if seen.job is None:
            seen.job = PromptJob(
                tuple(request.prompt_token_ids), seen.wish, request.cache_salt or ""
            )
        job = seen.job
        if not seen.queued:
            if sum(one.queued for one in self._requests.values()) >= self._settings.prompts:
                return self._leave(seen, "the store is stalled") if self._queue.stalled() else None
            seen.queued = True
            self._queue.submit(job)
        if not job.done.is_set():
            return (
                self._leave(seen, f"no KV within {self._settings.timeout_s} s")
                if self._queue.stalled()
                else None
            )
        return (
            self._leave(seen, job.why)
            if job.prefill is None
            else max(0, job.promised - seen.cached)
        )

    def _leave(self, seen: _Seen, why: str) -> int:
        """Leave a prompt to vLLM, because of `why`; 0 tokens are promised."""
        missed = [] if seen.job is None else seen.job.missed
        if seen.job is not None:
            seen.job.cancel.set()
        seen.job = None
        seen.queued = False
        seen.left = True
        if why:
            self._keep(seen, left_report(why, missed))
        return 0

    def _keep(self, seen: _Seen, report: dict[str, Any]) -> None:
        """Keep the report of a request for its response, and under the name that it gave it."""
        seen.report = report
        before = self._named.get(seen.wish.name, {})
        if seen.wish.name and (report["promised_tokens"] or not before.get("promised_tokens")):
            self._named[seen.wish.name] = report
            if len(self._named) > MOST_NAMED:
                self._named.popitem(last=False)

    def _answer(self, name: str) -> dict[str, Any]:
        """What a request gets that asks for a report; it is kept no longer."""
        method = self._engine.method()
        ratio = None if method.controlled else method.ratio
        identity = self._engine.entries.encoder.identity
        answer: dict[str, Any] = connector_answer(
            self._named.pop(name, None), identity, ratio, method.selector.name
        )
        return answer
