"""A server that answers as vLLM with ragkv's connector does, without vLLM.

It speaks vLLM's completions: prompts of token ids, streams with `token_ids`, reports in
`kv_transfer_params`. The connector's own scheduler decides what is fused and reports it; tokens
come from an engine on the same model and store.
"""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.types import TokenEvent
from ragkv.vllm.layout import Wish, layout
from ragkv.vllm.scheduler import PromptScheduler
from ragkv.vllm.settings import ConnectorSettings
from tests.vllm.models import vllm_request


class FakeVllm:
    """The server's state, and what the tests change in it."""

    def __init__(self, model: Engine, home: Path, config: EngineConfig | None = None) -> None:
        """`home` is the one of the server in front; it exists once that server has stored
        something.
        """
        self._model = model
        self._home = home
        self._config = config or EngineConfig()
        self._prompts: PromptScheduler | None = None
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # vLLM's scheduler is one thread
        self.engine: Engine | None = None  # the connector's, once a request came
        # of the prompts that were asked for, reports left out
        self.bodies: list[dict[str, Any]] = []
        self.is_healthy = True
        self.has_connector = True
        self.answer_changes: dict[str, Any] = {}  # of the connector's answers to `report_of`
        self.refuses: tuple[int, str] | None = None  # status and message for every prompt
        self.breaks_after: int | None = None  # tokens after which it breaks off
        self.pause_s = 0.0  # before each token
        self.holds = False  # whether it sends no token now
        self.ends_with: str | None = None  # a finish reason, with which it breaks off politely
        self.aborted = 0  # streams whose client left
        self.open = 0  # streams under way
        self.app = FastAPI(
            telemetry={"tracing": False, "metrics": False, "logs": False, "operation_spans": False}
        )
        self.app.add_api_route("/health", self.health)
        self.app.add_api_route("/v1/completions", self.completions, methods=["POST"])

    async def health(self) -> Response:
        return Response(status_code=200 if self.is_healthy else 503)

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        given = (body.get("kv_transfer_params") or {}).get("ragkv", {})
        if "report_of" in given:
            return JSONResponse(await asyncio.to_thread(self._report, body))
        self.bodies.append(body)
        if self.refuses is not None:
            status, message = self.refuses
            error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
            return JSONResponse({"error": error}, status)
        return StreamingResponse(self._stream(body), media_type="text/event-stream")

    def close(self) -> None:
        """Close the connector's engine."""
        if self._prompts is not None:
            self._prompts.close()

    def _connector(self) -> PromptScheduler:
        if self._prompts is None:
            store = StoreConfig(directory=str(self._home / "kv"), read_only=True)
            self.engine = self._model.with_config(replace(self._config, store=store))
            self._prompts = PromptScheduler(
                self.engine, ConnectorSettings(refresh_s=60.0, home=str(self._home))
            )
        return self._prompts

    def _asked(self, body: dict[str, Any]) -> Any:
        more = {name: body.get(name) for name in ("kv_transfer_params", "cache_salt")}
        return vllm_request(str(next(self._numbers)), body["prompt"], **more)

    def _report(self, body: dict[str, Any]) -> dict[str, Any]:
        """The unstreamed response of one token."""
        found = None
        if self.has_connector:
            asked = self._asked(body)
            with self._lock:
                assert self._connector().promised(asked, 0) == 0
                found = json.loads(json.dumps(self._connector().finished(asked)))
            found["ragkv"] |= self.answer_changes
        choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
        return {**_head(), "choices": [choice], "kv_transfer_params": found}

    def _promised(self, body: dict[str, Any]) -> int:
        """How many tokens the connector promises, in the end."""
        asked = self._asked(body)
        while True:
            with self._lock:
                prompts = self._connector()
                if (promised := prompts.promised(asked, 0)) is not None:
                    prompts.allocated(asked, [0], promised)
                    prompts.take_loads(idle=False)
                    prompts.finished(asked)
                    return promised
            time.sleep(0.002)

    def _parts(self, body: dict[str, Any]) -> Iterator[str]:
        """The events of the stream: a token each; the last one of an answer says why it ended."""
        promised = self._promised(body)
        engine = self.engine
        ids = body["prompt"]
        assert engine is not None
        wish = Wish.of(body["kv_transfer_params"], len(ids))
        found = (
            layout(ids, wish, None, engine.parts.intake.runs.before_documents) if promised else None
        )  # type: ignore[arg-type]
        runs, question = ((), ids) if found is None else (found.runs, found.question(whole=True))
        options = {"logprobs": body["logprobs"]} if "logprobs" in body else {}
        how: Any = {"reuse": "none"} if found is None else found.options
        *tokens, answer = engine.stream(
            question,
            runs,
            raw=True,
            separator="",
            max_new_tokens=body["max_tokens"],
            **how,
            **options,
        )
        steps = [(one.token_id, _logprobs(one)) for one in tokens[: len(answer.token_ids)]]
        if answer.finish_reason == "stop":  # an end token
            steps.append((body["stop_token_ids"][0], _logprobs(tokens[0])))
        for number, (token, logprobs) in enumerate(steps, 1):
            reason = answer.finish_reason if number == len(steps) else None
            if self.ends_with is not None and number == 3:
                yield _part([], None, self.ends_with)
                return
            yield _part([token], logprobs, reason)

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self.open += 1
        parts = self._parts(body)
        try:
            sent = 0
            while (part := await asyncio.to_thread(next, parts, None)) is not None:
                if sent == self.breaks_after:
                    raise ConnectionResetError("the test breaks this answer off")
                await asyncio.sleep(self.pause_s)
                while self.holds:
                    await asyncio.sleep(0.01)
                sent += 1
                yield part
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.open -= 1


def _head() -> dict[str, Any]:
    return {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "fake"}


def _part(ids: list[int], logprobs: Any, reason: str | None) -> str:
    choice = {
        "index": 0,
        "text": "",
        "logprobs": logprobs,
        "finish_reason": reason,
        "token_ids": ids,
    }
    return f"data: {json.dumps({**_head(), 'choices': [choice]})}\n\n"


def _logprobs(event: TokenEvent) -> Any:
    if event.logprob is None:
        return None
    own = event.logprob
    top = {f"token_id:{token}": value for token, value in ((own.token_id, own.logprob), *own.top)}
    return {
        "tokens": [f"token_id:{own.token_id}"],
        "token_logprobs": [own.logprob],
        "top_logprobs": [top],
        "text_offset": [0],
    }
