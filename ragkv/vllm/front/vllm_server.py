"""A vLLM server, spoken to in OpenAI's protocol with the `openai` client: streams of tokens,
reports, and its health.

One thread runs an event loop with all requests. The threads that wait for tokens check their
request's deadline and cancellation meanwhile. Closing a stream closes its connection, and then vLLM
aborts the request.
"""

import logging
import math
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeVar

from ragkv.errors import (
    AnswerServerError,
    CancelledError,
    DeadlineError,
    InputError,
    MissingExtraError,
)
from ragkv.runtime import Check, Closing
from ragkv.store.entry import Identity
from ragkv.types import TokenLogprob

from .prompt_report import differences

log = logging.getLogger(__name__)

POLL_S = 0.02  # A request that waits looks this often at its deadline and its cancellation.
CONNECT_S = 5.0  # to connect to the server
# A connection idle for longer is not used again: vLLM closes it after 5 s, and nothing is sent
# twice.
REUSED_S = 2.0
PROBE_S = 2.0  # for which the result of a health probe is used
PROBE_WAIT_S = 3.0  # A server that needs longer for its health is away.
NO_REPORT = ""  # This names no report: asking for it shows the connector alone.

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Step:
    """New tokens of the answer."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]  # one for each token, if they were asked for
    finish_reason: str | None  # "stop" or "length", or that it was broken off; None: it goes on


class VllmServer(Closing):
    """The client of one server."""

    def __init__(self, url: str, api_key: str = "", timeout_s: float = 120.0) -> None:
        """`timeout_s` is the longest time without a byte from the server. Raises
        `MissingExtraError`.
        """
        try:
            import openai
            from anyio.from_thread import start_blocking_portal  # which openai requires
        except ImportError as error:
            raise MissingExtraError("openai", "openai", "serving in front of vLLM") from error
        self.url = url.rstrip("/").removesuffix("/v1")
        self._openai = openai
        timeout = openai.Timeout(timeout_s, connect=CONNECT_S)
        limits = copy(openai.DEFAULT_CONNECTION_LIMITS)
        limits.keepalive_expiry = REUSED_S
        self._http = openai.DefaultAsyncHttpxClient(timeout=timeout, limits=limits, trust_env=False)
        self._client = openai.AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key=api_key or "none",
            http_client=self._http,
            max_retries=0,
            timeout=timeout,
        )
        self._probing = threading.Lock()
        self._problem: str | None = f"vLLM at {self.url} was not asked yet."
        # What the connector said about itself: its `ratio` and `selector` count for requests that
        # name none.
        self.connector: Mapping[str, Any] = {"ratio": None, "selector": ""}
        self._probed_at = -math.inf
        self.identity: Identity | None = None  # of the model that must be there; None: any
        self._running = start_blocking_portal(name="ragkv-vllm")
        self._portal = self._running.__enter__()
        for noisy in ("httpx", "httpx2", "openai"):  # they log a line for every request
            logging.getLogger(noisy).setLevel(logging.WARNING)

    def stream(self, prompt: tuple[int, ...], fields: Mapping[str, Any]) -> "StepStream":
        """The answer to a prompt's ids, sent with the other `fields` of vLLM's completions."""
        return StepStream(self, self._stream(prompt, fields))

    def report(self, name: str, check: Check) -> Mapping[str, Any]:
        """What the connector answers to `report_of`: a request of one token, which vLLM computes in
        its next step.

        Raises `AnswerServerError` if vLLM has no connector or another model, and what `check`
        raises.
        """
        return self.wait(self._ask_connector, name, check=check)

    def failure(self) -> str | None:
        """Why the server gives no answers; `None` if it does. Asks at most every `PROBE_S`, and
        waits a moment.
        """
        with self._probing:
            if time.monotonic() - self._probed_at > PROBE_S:
                with suppress(TimeoutError):
                    self.submit(self._ask).result(PROBE_WAIT_S + 1.0)
                self._probed_at = time.monotonic()
        return self._problem

    def close(self) -> None:
        """Close every connection."""
        with suppress(Exception):  # it is closed, or a connection does not close
            self._portal.start_task_soon(self._client.close).result(CONNECT_S)
            self._portal.call(self._portal.stop, True)
        self._running.__exit__(None, None, None)

    def submit(self, work: Callable[..., Awaitable[T]], *arguments: object) -> "Future[T]":
        """Run `work` on the loop; returns its future. Raises `AnswerServerError` once this is
        closed.
        """
        try:
            return self._portal.start_task_soon(work, *arguments)
        except RuntimeError as error:
            raise AnswerServerError(
                "The server shuts down: its connections to vLLM are closed."
            ) from error

    async def _stream(
        self, prompt: tuple[int, ...], fields: Mapping[str, Any]
    ) -> AsyncGenerator[Step, None]:
        """The tokens of the answer to a prompt. Raises what an OpenAI client raises."""
        stream = await self._client.completions.create(
            model="", prompt=list(prompt), stream=True, extra_body=dict(fields)
        )
        try:
            async for part in stream:
                for choice in part.choices:
                    given: Any = choice
                    logprobs = (
                        ()
                        if choice.logprobs is None
                        else _logprobs(choice.logprobs, fields.get("logprobs"))
                    )
                    yield Step(tuple(given.token_ids), logprobs, choice.finish_reason)
        finally:
            await stream.close()
            # ends its generators here: garbage collection may do it in another thread
            with suppress(Exception):
                async for _ in stream:
                    pass

    def as_error(self, error: BaseException, began: bool = False) -> Exception:
        """`error` of a request, in ragkv's terms; one that the server is to blame for is
        remembered.

        `began`: some of the answer had come.
        """
        if isinstance(error, AnswerServerError):
            self._problem = str(error)
            return error
        if isinstance(error, self._openai.BadRequestError | self._openai.UnprocessableEntityError):
            return InputError(f"vLLM refused the prompt: {_said(error)}")
        if isinstance(error, self._openai.APIStatusError):
            hint = (
                " (its key is read from the variable VLLM_API_KEY)"
                if error.status_code == 401
                else ""
            )
            # its text may have what is not for clients
            what = f"answered {error.status_code}{hint}"
        elif "Timeout" in type(error).__name__:
            what = "did not answer in time"
        elif not began and "Connect" in type(error).__name__:
            what = "does not answer"
        else:
            what = f"broke off its answer ({type(error).__name__})"
        self._problem = f"vLLM at {self.url} {what}."
        return AnswerServerError(f"{self._problem} Ask again when it is back.")

    def wait(
        self,
        work: Callable[..., Awaitable[T]],
        *arguments: object,
        check: Check,
        began: bool = False,
    ) -> T:
        """What `work` returns on the loop; meanwhile `check` is called. `began`: some of the answer
        had come.
        """
        future = self.submit(work, *arguments)
        try:
            while not futures.wait((future,), POLL_S).done:
                check()
            return future.result()
        except (CancelledError, DeadlineError):
            raise
        except futures.CancelledError as error:  # the whole client was closed while a thread waits
            raise AnswerServerError("The connection to vLLM was closed here.") from error
        except Exception as error:
            raise self.as_error(error, began) from error
        finally:
            future.cancel()

    async def _ask_connector(self, name: str) -> Mapping[str, Any]:
        """Its answer, which is remembered. Raises `AnswerServerError` if there is no connector, or
        another model's.
        """
        fields = {"kv_transfer_params": {"ragkv": {"report_of": name}}, "add_special_tokens": False}
        answer: Any = await self._client.completions.create(
            model="", prompt=[0], max_tokens=1, extra_body=fields
        )
        found = (getattr(answer, "kv_transfer_params", None) or {}).get("ragkv") or {}
        if not {"identity", "report", "ratio", "selector"} <= found.keys():
            raise AnswerServerError(
                f"vLLM at {self.url} runs without ragkv's connector, or with one of another "
                "version (docs/vllm.md)."
            )
        if (own := self.identity) is not None:
            # Tokens before and codec are a tenant's: they are compared with every report.
            theirs = {**found["identity"], "context": own.seen_digest, "codec": own.codec}
            if other := differences(own, theirs):
                raise AnswerServerError(
                    f"vLLM serves another model than this server ingests with: {', '.join(other)}."
                )
        self.connector = found
        self._problem = None
        return dict(found)

    async def _ask(self) -> None:
        """Ask for the server's health, and for its connector if it was not asked or there was a
        problem.
        """
        try:
            answer = await self._http.get(f"{self.url}/health", timeout=PROBE_WAIT_S)
            if answer.status_code != 200:
                raise AnswerServerError(
                    f"vLLM at {self.url} is not healthy: it answers {answer.status_code}."
                )
            if self._problem is not None:
                await self._ask_connector(NO_REPORT)
        except Exception as error:
            if isinstance(shown := self.as_error(error), InputError):
                self._problem = str(shown)


class StepStream(Closing):
    """The tokens of one request, in the order in which they come."""

    def __init__(self, server: VllmServer, steps: AsyncGenerator[Step, None]) -> None:
        self._server = server
        self._steps = steps
        self._began = self._read_to_end = False

    def next(self, check: Check) -> Step | None:
        """The next tokens; `None` at the end. Raises `AnswerServerError`, `InputError`, and what
        `check` raises.
        """
        step = self._server.wait(self._next, check=check, began=self._began)
        self._began = True
        return step

    def read_to_end(self) -> None:
        """Note that the answers are complete at vLLM too: the connection ends by itself and is
        kept.
        """
        self._read_to_end = True

    def close(self) -> None:
        """Close the connection if the answer has not ended at vLLM, which then aborts it. Twice is
        harmless.
        """
        with suppress(AnswerServerError):  # closed with the client
            self._server.submit(self._end)

    async def _next(self) -> Step | None:
        return await anext(self._steps, None)

    async def _end(self) -> None:
        while self._read_to_end and await self._next() is not None:
            pass
        await self._steps.aclose()


def _said(error: Any) -> str:
    """The message that the server sent with an error."""
    body = error.body if isinstance(error.body, dict) else {}
    message = body.get("message") or (body.get("error") or {}).get("message") or error.message
    return str(message)[:500].rstrip(".")


def _logprobs(given: Any, wanted: int | None) -> tuple[TokenLogprob, ...]:
    """Log probabilities as vLLM's completions write them, tokens as "token_id:5"; `wanted` most
    probable ones each.
    """
    found = []
    for token, logprob, others in zip(
        given.tokens, given.token_logprobs, given.top_logprobs, strict=True
    ):
        best = sorted(
            ((_token_id(name), value) for name, value in (others or {}).items()),
            key=lambda one: -one[1],
        )
        found.append(TokenLogprob(_token_id(token), logprob, tuple(best[:wanted])))
    return tuple(found)


def _token_id(name: str) -> int:
    return int(name.removeprefix("token_id:"))
