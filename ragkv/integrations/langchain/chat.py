"""`ChatRagKV`: a LangChain chat model whose documents' KV is computed once.

The constructor loads nothing; engines are shared (see `engines`). Documents reach the model in
every way in which chains carry them (see `messages`). Any number of threads and tasks may call one
model.
"""

import threading
from collections.abc import AsyncIterator, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Literal, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel, LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr, SkipValidation

from ragkv.chat import ChatAnswer, ChatPrompt, required_form
from ragkv.config import EngineConfig, ReuseMode
from ragkv.engine import Engine
from ragkv.entries import EncodeReport
from ragkv.errors import InputError
from ragkv.home import model_or_default
from ragkv.model.decode.token_text import TokenText
from ragkv.prompt import AnswerOptions
from ragkv.prompt.constraints import parse
from ragkv.runtime import Claim
from ragkv.runtime.thread_stream import iterate_in_thread
from ragkv.types import TokenEvent

from .engines import SharedEngine, shared_engine, shared_engine_of
from .messages import (
    bound_tools,
    chat_chunk,
    chat_input,
    chat_result,
    to_document,
    tool_names,
)
from .structured_output import Method, structured

SAMPLING = (
    *(
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
    ),
    *("repetition_penalty", "min_new_tokens"),
)
LOGPROBS = ("logprobs", "top_logprobs")
TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
FUSION = ("ratio", "selector", "reuse")
# The settings of a call: LangChain's names, ours, and the options of `Engine.stream`.
OWN = (
    "max_tokens",
    "documents",
    "session_id",
    "response_format",
    *TOOLS,
    *LOGPROBS,
    *FUSION,
    *SAMPLING,
)
# `_LANGCHAIN` adds LangChain itself; ignored.
_LANGCHAIN = ("ls_structured_output_format", "stream_usage")


class ChatRagKV(BaseChatModel):
    """A chat model over a `ragkv` engine. `config` defaults to `EngineConfig.gather(None)`.

    `corpus` holds the texts that the chain's retriever may return, split in the same way. They are
    recognised wherever a prompt holds them. Their KV is computed in the background from the first
    use on; `ingest` computes it at once (docs/langchain.md).
    """

    model_config = ConfigDict(
        extra="forbid", populate_by_name=True, protected_namespaces=(), arbitrary_types_allowed=True
    )

    # A name, a folder, a GGUF file or a hub id; empty: that of the home in which `config` stores,
    # else smollm2.
    model: str = Field(default="", alias="model_name")
    config: SkipValidation[EngineConfig] | None = Field(default=None, exclude=True)
    # instead of `model`; not closed here
    engine: SkipValidation[Engine] | None = Field(default=None, exclude=True)
    temperature: float | None = None  # 0, or no sampling parameter at all: greedy
    max_tokens: int = Field(default=256, ge=1)
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None  # by token id
    repetition_penalty: float | None = None
    min_new_tokens: int | None = None
    seed: int | None = None
    logprobs: bool | None = None  # log probabilities of an answer's tokens, in `response_metadata`
    top_logprobs: int | None = None  # and of so many most probable tokens, 0 to 20
    # recompute ratio; None: the config's; "auto": the controller's
    ratio: float | Literal["auto"] | None = None
    selector: str | None = None
    reuse: ReuseMode | None = None
    corpus: SkipValidation[Sequence[Document | str]] = Field(default=(), exclude=True, repr=False)
    conversations: bool = True  # find a conversation's session by its messages
    timeout: float | None = None  # seconds until an answer fails with `DeadlineError`
    # Chains pass the next two to every chat model. A local model needs neither retries nor a key.
    max_retries: int = 0
    api_key: SecretStr | None = Field(default=None, exclude=True)
    streaming: bool = False  # stream in `invoke` too, for callbacks

    _shared: SharedEngine | None = PrivateAttr(default=None)

    # LangChain's interface

    @property
    def _llm_type(self) -> str:
        return "ragkv"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """All that an answer depends on: LangChain's own cache uses it as the key."""
        params = {
            name: getattr(self, name) for name in ("model", *OWN) if name in type(self).model_fields
        }
        engine = (
            None
            if self.engine is None
            else (self.engine.model.identity.tokenizer, self.engine.config)
        )
        return {**params, "stop": self.stop, "config": repr(self.config), "engine": repr(engine)}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "ragkv"
        params["ls_model_name"] = kwargs.get("model") or model_or_default(self.model)
        return params

    def _get_invocation_params(
        self, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Without the documents of the call, which do not belong in traces."""
        kwargs.pop("documents", None)
        return super()._get_invocation_params(stop=stop, **kwargs)

    # Documents

    @property
    def shared(self) -> SharedEngine:
        """The engine, its known texts and its conversations. Loads the model at the first use."""
        if self._shared is None or self._shared.closed:
            if self.engine is not None:
                self._shared = shared_engine_of(self.engine)
            else:
                self._shared = shared_engine(self.model, self.config or EngineConfig.gather(None))
            self._shared.catalogue.register(map(to_document, self.corpus))
            self._shared.encode_known()
        return self._shared

    def ingest(self, documents: Iterable[Document | str], encode: bool = True) -> EncodeReport:
        """Register `documents` as chunks and compute their KV; without `encode`, at their first
        cache miss.

        A document is one chunk. Split long documents first, with the splitter of your index.
        """
        return self.shared.catalogue.ingest(map(to_document, documents), encode)

    def delete(self, documents: Iterable[Document | str]) -> int:
        """Delete `documents` here, and their KV from every tier. Returns how many had KV
        stored.
        """
        return self.shared.catalogue.delete(to_document(document).text for document in documents)

    def get_token_ids(self, text: str) -> list[int]:
        """The token ids of `text`."""
        return list(self.shared.template.token_ids(text))

    # Answering

    def bind_tools(
        self,
        tools: Sequence[Any],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[Any, AIMessage]:
        """This model with `tools`. `tool_choice` is auto, none, any, or a tool's name: then its
        arguments validate.

        With `strict` a tool's arguments are all that it names and no others.
        """
        if "ls_structured_output_format" in kwargs:  # LangChain's structured output is one call
            strict = True
            parallel_tool_calls = False
        how = bound_tools(tools, tool_choice, strict)
        return self.bind(**how, parallel_tool_calls=parallel_tool_calls, **kwargs)

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        method: Method | Literal["function_calling"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[Any, Any]:
        """This model, whose answers are JSON of `schema`: a pydantic class, a TypedDict or a JSON
        schema.

        `strict` changes nothing: every schema is kept strictly. With `function_calling` LangChain's
        own way is taken: the answer is one call of a tool, and `None` if `max_tokens` cut it.
        Raises `InputError`; a schema that cannot be kept raises `SchemaError` when the model is
        called.
        """
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw, **kwargs)
        if kwargs:
            raise InputError(
                f"Unknown arguments of with_structured_output: {', '.join(sorted(kwargs))}."
            )
        return structured(self, schema, method, include_raw)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        *_, last = self._events(messages, stop, kwargs)
        return chat_result(*last)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        async for event in iterate_in_thread(
            lambda cancel: self._events(messages, stop, kwargs, cancel)
        ):
            last = event
        return chat_result(*last)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Generator[ChatGenerationChunk]:
        for event in self._events(messages, stop, kwargs):
            if (chunk := chat_chunk(*event)) is not None:
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        async for event in iterate_in_thread(
            lambda cancel: self._events(messages, stop, kwargs, cancel)
        ):
            if (chunk := chat_chunk(*event)) is not None:
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _events(
        self,
        messages: Sequence[BaseMessage],
        stop: Sequence[str] | None,
        call: dict[str, Any],
        cancel: threading.Event | None = None,
    ) -> Generator[tuple[TokenEvent | ChatAnswer, ChatPrompt, str, TokenText]]:
        """The steps of an answer, each with the prompt, the model's name and the texts of its
        tokens.
        """
        refuse_unknown(call)
        settings = {name: getattr(self, name, None) for name in OWN} | call
        tools = settings["tools"] or ()
        choice = settings["tool_choice"]
        if tools and choice != "none" and settings["response_format"] is not None:
            raise InputError("tools and response_format are not offered together; leave one out.")
        session_id = settings["session_id"]
        shared = self.shared
        given = chat_input(messages, settings["documents"] or (), shared.separator, tools)
        session = shared.engine.session(session_id) if session_id else None
        prompt = shared.build_prompt(given, self.conversations and session is None, session)
        options = answer_options(settings)
        options["separator"] = ""  # the messages have their own text between passages
        must_call = bool(tools) and choice not in (None, "auto", "none")
        if must_call:
            name = None if choice == "required" else choice
            syntax = shared.template_for(given.tools).call_syntax
            options["response_format"] = required_form(
                tools, name, syntax, bool(settings["parallel_tool_calls"])
            )
        options["stop"] = tuple(self.stop or () if stop is None else stop)
        options["deadline_s"], options["cancel"] = self.timeout, cancel
        claim = Claim(deadline_s=self.timeout, cancel=cancel)
        shown = replace(prompt, tools=()) if choice == "none" else prompt
        events = shared.engine.stream(prompt.question, prompt.pieces, prompt.session, **options)
        with closing(shared.follow(prompt, events, tool_names(shown.tools), must_call)) as steps:
            for step in steps:
                yield step, shown, shared.name, shared.tokens
        shared.engine.settle(claim)


def refuse_unknown(call: Mapping[str, Any]) -> None:
    """Raises `InputError` for a setting that would be ignored."""
    unknown = sorted(call.keys() - set(OWN) - set(_LANGCHAIN))
    if unknown:
        raise InputError(
            f"Unknown settings of a call: {', '.join(unknown)}. Known: {', '.join(sorted(OWN))}."
        )


def answer_options(settings: Mapping[str, Any]) -> AnswerOptions:
    """The engine's options for these settings. A setting that is `None` is left to the engine."""
    names = ("selector", "reuse", *SAMPLING)
    options = {name: settings[name] for name in names if settings[name] is not None}
    if (form := parse(settings["response_format"])) is not None:
        options["response_format"] = form
    if settings["logprobs"]:
        options["logprobs"] = settings["top_logprobs"] or 0
    elif settings["top_logprobs"]:
        raise InputError("top_logprobs need logprobs: set it to True.")
    if settings["ratio"] is not None:
        options["ratio"] = None if settings["ratio"] == "auto" else settings["ratio"]
    return cast("AnswerOptions", {**options, "max_new_tokens": settings["max_tokens"]})
