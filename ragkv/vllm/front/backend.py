"""The engine's answers, computed by a vLLM server: prompts go there as token ids, tokens come back.

The chunks' positions go with the prompt, so that the connector inside vLLM fuses their stored KV.
Texts, stop strings and end tokens are the engine's own, exactly as for its own model.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from ragkv.assembly import BackendMaker
from ragkv.entries import Entries
from ragkv.errors import AnswerServerError, UnsupportedError
from ragkv.model.decode.stopping import end_tokens
from ragkv.prompt import (
    NO_PREFILL,
    ActiveAnswer,
    AnswerEvents,
    Prompt,
    PromptReport,
    Request,
    SharedModel,
    StartedAnswer,
    Task,
    stored_ids,
)
from ragkv.prompt.history import Part, PartKind
from ragkv.scheduling import Scheduler
from ragkv.types import Answer, TokenEvent

from .prompt_report import differences, prompt_report
from .salts import SECRET_VARIABLE, proof, salted, shared_secret
from .vllm_server import Step, StepStream, VllmServer

ENDS = ("stop", "length")  # An answer ends for one of these reasons.
OTHER_TENANT = (
    "vLLM computed the whole prompt: a tenant's KV is read where both servers have "
    f"the same {SECRET_VARIABLE}"
)


class VllmBackend:
    """Answers of one engine. `VllmBackend.on(server)` is what an engine takes as its backend."""

    def __init__(
        self, model: SharedModel, entries: Entries, scheduler: Scheduler, server: VllmServer
    ) -> None:
        self._scheduler = scheduler
        self._entries = entries
        self._server = server
        self._tokenizer = model.tokenizer
        self._ends = end_tokens(model.adapter.model, self._tokenizer)
        self._tenant = entries.identity.tenant
        self._secret = shared_secret()
        self._shares_kv = not self._tenant or bool(self._secret)

    @classmethod
    def on(cls, server: VllmServer) -> BackendMaker:
        """What makes the backend of an engine."""
        return lambda model, entries, scheduler: cls(model, entries, scheduler, server)

    def refuse_unsupported(self, request: Request) -> None:
        """Raise `UnsupportedError` for what is not sent to vLLM."""
        if not request.max_new_tokens:
            raise UnsupportedError(NO_PREFILL)
        if request.grammar is not None:
            raise UnsupportedError(
                "Response formats and required tool calls are not offered where vLLM computes "
                "the answers: leave "
                "response_format out, and tool_choice at auto or none."
            )
        if request.method.reuse == "prefix":
            raise UnsupportedError(
                "reuse 'prefix' is not offered where vLLM computes the answers: 'fused' or 'none'."
            )

    @contextmanager
    def started(self, task: Task) -> Iterator[StartedAnswer]:
        """Wait to be admitted, send the prompt, and wait for its first token and its report."""
        with ExitStack() as held:
            # no hint: the connector reads the store itself
            tokens = len(task.prompt.token_ids)
            with self._scheduler.admitted(task.claim, tokens):
                report, stream, first = self._begin(task, held)
            with closing(self._events(task, report, stream, first)) as events:
                yield StartedAnswer(report, events)

    def _begin(self, task: Task, held: ExitStack) -> tuple[PromptReport, StepStream, Step | None]:
        """Send the prompt; the report, and the stream of tokens with its first step."""
        prompt = task.prompt
        name = uuid.uuid4().hex
        check = task.claim.check
        wish = self._wish(task, name)
        salt = self._salt(task, name)
        if self._tenant and self._secret:
            wish |= {"tenant": self._tenant, "proof": proof(self._secret, self._tenant, salt or "")}
        fields = {
            **_fields(task, self._ends),
            "kv_transfer_params": {"ragkv": wish},
            "cache_salt": salt,
        }
        sent_s = task.claim.elapsed_s()
        stream = held.enter_context(self._server.stream(prompt.token_ids, fields))
        first = stream.next(check)
        first_token_s = task.claim.elapsed_s()
        answer = self._server.report(name, check)
        report = self._report(task, answer, sent_s, first_token_s)
        if report.reuse.missed_chunks:
            chunks = [stored_ids(chunk) for chunk in prompt.chunks]
            self._entries.encode_soon([ids for ids in chunks if not self._entries.has(ids)])
        return report, stream, first

    def _events(
        self, task: Task, report: PromptReport, stream: StepStream, step: Step | None
    ) -> AnswerEvents:
        """The events of the answer whose first tokens are in `step`."""
        answer = ActiveAnswer(task, report, self._tokenizer)
        while step is not None:
            yield from self._follow(answer, step)
            if answer.ended:
                # else a stop string ended it, and vLLM had gone on
                if step.finish_reason is not None:
                    stream.read_to_end()
                return
            step = stream.next(task.claim.check)
        raise self._broken("ended its answer before it was complete")

    def _follow(self, answer: ActiveAnswer, step: Step) -> Iterator[TokenEvent | Answer]:
        """The events of the answer's new tokens."""
        for number, token in enumerate(step.token_ids):
            if token in self._ends:
                answer.end()
            else:
                yield answer.add(token, step.logprobs[number] if step.logprobs else None)
            if answer.ended:
                yield from answer.finish()
                return
        if step.finish_reason is not None:
            if step.finish_reason not in ENDS:
                raise self._broken(f"ended its answer with {step.finish_reason!r}")
            answer.reason = step.finish_reason  # vLLM's context is shorter than the model's
            yield from answer.finish()

    def _report(
        self, task: Task, answer: Mapping[str, Any], sent_s: float, first_token_s: float
    ) -> PromptReport:
        """What the connector's answer says of the prompt. Raises `AnswerServerError` if it is not
        of this model.
        """
        if other := differences(self._entries.identity, answer["identity"]):
            raise self._broken(
                f"serves another model or has other settings than this server: {', '.join(other)}"
            )
        given = answer["report"]
        if given is None:
            raise self._broken("lost the report of this prompt")
        method = task.request.method
        # else the connector's settings count, and its notes
        notes = method.notes if method.reuse == "none" else ()
        if not self._shares_kv:
            notes += (OTHER_TENANT,)
        try:
            return prompt_report(task.prompt, given, sent_s, first_token_s, notes)
        except (KeyError, TypeError, ValueError) as error:
            raise self._broken(
                "has a connector of another version of ragkv: its report has another form"
            ) from error

    def _wish(self, task: Task, name: str) -> dict[str, Any]:
        """What the connector is told: how to fuse, where the chunks are, and the name of the
        report.
        """
        method = task.request.method
        if method.reuse == "none" or not self._shares_kv:
            return {"name": name, "reuse": "none"}
        wish: dict[str, Any] = {
            "name": name,
            "chunks": [*self._stored_history(task.prompt), *_chunks(task.prompt)],
        }
        if task.adds_turn:
            wish["keep"] = True
        if "ratio" in method.named:
            wish["ratio"] = None if method.controlled else method.ratio
        if "selector" in method.named:
            wish["selector"] = method.selector.name
        return wish

    def _salt(self, task: Task, name: str) -> str | None:
        """By which vLLM finds the request's prefix again: exact KV its tenant's requests, fused KV
        this conversation's.

        A conversation has the salt of what its first turn asked, and one request without a
        conversation its own.
        """
        prompt = task.prompt
        if task.request.method.reuse == "none" or not self._shares_kv:
            return salted(self._tenant, secret=self._secret) if self._tenant else None
        first = list[int]()
        for run, part in _history(prompt):
            if part.turn == 0 and part.kind in (PartKind.CHUNK, PartKind.QUESTION):
                first += prompt.token_ids[run]
        if not prompt.past_ids:
            first = [*prompt.token_ids[len(prompt.prefix) :]]
        return salted(first if task.adds_turn and first else name, secret=self._secret)

    def _stored_history(self, prompt: Prompt) -> Iterator[list[int]]:
        """The positions of whole chunks of earlier turns whose KV is stored: they are
        fused again.
        """
        for run, part in _history(prompt):
            if part.kind is PartKind.CHUNK and self._entries.has(prompt.token_ids[run]):
                yield [run.start, run.stop]

    def _broken(self, what: str) -> AnswerServerError:
        return AnswerServerError(f"vLLM at {self._server.url} {what}. See docs/vllm.md.")


def _history(prompt: Prompt) -> Iterator[tuple[slice, Part]]:
    """The parts of the prompt's history, each with its positions."""
    at = len(prompt.prefix)
    for part in prompt.history.parts if prompt.history else ():
        yield slice(at, at + len(part)), part
        at += len(part)


def _chunks(prompt: Prompt) -> Iterator[list[int]]:
    """The positions of the prompt's chunks."""
    at = prompt.body_start
    for ids, index in prompt.body:
        if index is not None:
            yield [at, at + len(ids)]
        at += len(ids)


def _fields(task: Task, ends: Sequence[int]) -> dict[str, Any]:
    """The request in the fields of vLLM's completions. Every one is given: the defaults of the
    server are others.
    """
    request = task.request
    sampling = request.sampling
    most_tokens = task.prompt.answer_tokens
    fields: dict[str, Any] = {
        "max_tokens": most_tokens,
        "temperature": (1.0 if sampling.temperature is None else sampling.temperature)
        if sampling.samples
        else 0.0,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p or 0.0,
        "seed": sampling.seed,
        "presence_penalty": sampling.presence_penalty or 0.0,
        "frequency_penalty": sampling.frequency_penalty or 0.0,
        "repetition_penalty": sampling.repetition_penalty or 1.0,
        "logit_bias": {str(token): bias for token, bias in (sampling.logit_bias or {}).items()}
        or None,
        "min_tokens": min(sampling.min_new_tokens or 0, most_tokens),
        "ignore_eos": True,  # the end tokens are the engine's
        "stop_token_ids": list(ends),
        "return_token_ids": True,
        "add_special_tokens": False,
    }
    if request.logprobs is not None:
        fields |= {"logprobs": request.logprobs, "return_tokens_as_token_ids": True}
    return fields
