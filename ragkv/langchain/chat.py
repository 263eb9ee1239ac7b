"""`ChatRagKV`: a LangChain chat model whose documents' KV is computed once.

The constructor loads nothing; engines are shared (see `registry`). Documents reach it in every way in which chains
carry them (see `messages` and `recognition`). Any number of threads and tasks may call one model.
"""

import threading
from collections.abc import AsyncIterator, Generator, Iterable, Sequence
from typing import Any, Literal, NoReturn

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel, LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr, SkipValidation

from ragkv.config import EngineConfig, ReuseMode
from ragkv.dialogue import DialoguePrompt
from ragkv.engine import Engine, WarmReport
from ragkv.errors import UnsupportedError
from ragkv.types import Answer, TokenEvent

from . import registry, reporting
from .background import drained
from .messages import given, request
from .settings import OWN, engine_arguments, refuse_unknown


class ChatRagKV(BaseChatModel):
    """A chat model over a `ragkv` engine. `config` left out is `EngineConfig.from_env()`.

    `corpus` is what the chain's retriever may find, split as the retriever has it: recognised wherever a prompt holds
    it, its KV stored when it is first met. `ingest` computes it beforehand.
    """

    model_config = ConfigDict(
        extra="forbid", populate_by_name=True, protected_namespaces=(), arbitrary_types_allowed=True
    )

    model: str = Field(default="reader", alias="model_name")  # a folder, a hub id, or "reader"
    config: SkipValidation[EngineConfig] | None = Field(default=None, exclude=True)
    engine: SkipValidation[Engine] | None = Field(
        default=None, exclude=True
    )  # one that was made already; its owner closes it
    temperature: float | None = None  # None or 0: greedy
    max_tokens: int = Field(default=256, ge=1)
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    min_new_tokens: int | None = None
    seed: int | None = None
    ratio: float | Literal["auto"] | None = None  # recompute ratio; None: the config's; "auto": the controller's
    selector: str | None = None
    reuse: ReuseMode | None = None
    corpus: SkipValidation[Sequence[Document | str]] = Field(default=(), exclude=True, repr=False)  # chunks to know
    conversations: bool = True  # find a conversation's session by the content of its messages
    document_separator: str | None = (
        None  # behind a document put into the prompt; None: a blank line, a space for the reader
    )
    timeout: float | None = None  # seconds an answer may take before `DeadlineError`
    max_retries: int = 0  # accepted for LangChain's sake: nothing here is worth trying again
    api_key: SecretStr | None = Field(default=None, exclude=True)  # likewise: the model is here
    streaming: bool = False  # stream even where `invoke` was called, for callbacks

    _shared: registry.Shared | None = PrivateAttr(default=None)

    # What LangChain asks for

    @property
    def _llm_type(self) -> str:
        return "ragkv"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What an answer depends on: the key of LangChain's own cache of answers."""
        named = {name: getattr(self, name) for name in OWN if name in type(self).model_fields}
        return {**named, "stop": self.stop, "config": repr(self.config), "engine": repr(self._given_engine())}

    def _given_engine(self) -> tuple[str, EngineConfig] | None:
        return None if self.engine is None else (self.engine.tokenizer_id, self.engine.config)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "ragkv"
        params["ls_model_name"] = kwargs.get("model") or self.model
        return params

    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        """As the base has it, without documents: they do not belong into traces."""
        kwargs.pop("documents", None)
        return super()._get_invocation_params(stop=stop, **kwargs)

    def bind_tools(self, tools: Sequence[Any], **_: Any) -> NoReturn:
        """Refused: nothing here makes a model's answer a valid tool call."""
        raise UnsupportedError("Tools are not offered yet: nothing here constrains an answer to a valid tool call.")

    def with_structured_output(self, schema: Any, **_: Any) -> NoReturn:
        """Refused: nothing here makes a model's answer follow a schema."""
        raise UnsupportedError(
            "Structured output is not offered yet: nothing here constrains an answer to a schema. "
            "Ask for the form in the prompt and parse it with an output parser."
        )

    # Documents

    @property
    def shared(self) -> registry.Shared:
        """The engine and what belongs to it; loads the model at the first use."""
        return self._shared_for(self.model)

    def ingest(self, documents: Iterable[Document | str], encode: bool = True) -> WarmReport:
        """Know `documents` as chunks and compute their KV; without `encode` when they are first missed.

        A document is one chunk: split long ones first, with the splitter your index was made with.
        """
        return self.shared.catalogue.ingest(map(given, documents), encode)

    def forget(self, documents: Iterable[Document | str]) -> int:
        """Drop `documents` and their KV from every tier; how many had KV stored."""
        return self.shared.catalogue.forget(given(one).text for one in documents)

    def get_num_tokens(self, text: str) -> int:
        """How many tokens `text` has for this model."""
        return self.shared.engine.count_tokens(text)

    def get_token_ids(self, text: str) -> list[int]:
        """The ids of `text` for this model."""
        return list(self.shared.template.encode(text))

    # Answering

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        *_, last = self._events(messages, stop, kwargs)
        return _result(*last)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        async for event in drained(lambda left: self._events(messages, stop, kwargs, left)):
            last = event
        return _result(*last)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Generator[ChatGenerationChunk]:
        for event in self._events(messages, stop, kwargs):
            if (chunk := _chunk(*event)) is not None:
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
        async for event in drained(lambda left: self._events(messages, stop, kwargs, left)):
            if (chunk := _chunk(*event)) is not None:
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _events(
        self,
        messages: Sequence[BaseMessage],
        stop: Sequence[str] | None,
        call: dict[str, Any],
        cancel: threading.Event | None = None,
    ) -> Generator[tuple[TokenEvent | Answer, DialoguePrompt, str]]:
        """What the engine says, what it was asked, and the model's name."""
        refuse_unknown(call)
        settings = {name: getattr(self, name, None) for name in OWN} | call
        model = str(settings["model"])
        shared = self._shared_for(model)
        model = shared.name if self.engine is not None and model == self.model else model
        spoken = request(messages, settings["documents"] or (), self._separator(shared))
        question = shared.build_prompt(
            spoken, self.conversations and not settings["session_id"], settings["session_id"]
        )
        how = {**engine_arguments(settings), "deadline_s": self.timeout}
        how["stop"] = tuple(self.stop or () if stop is None else stop)
        session, answer = question.conversation.session if question.conversation else None, None
        try:
            for event in shared.engine.stream(question.question, question.chunks, session, cancel=cancel, **how):
                if isinstance(event, Answer):
                    answer = event  # handed on when the session is free again
                else:
                    yield event, question, model
        finally:
            if answer is None:
                shared.drop_turn(question)
        assert answer is not None
        shared.save_turn(question, answer.text)
        yield answer, question, model

    def _shared_for(self, model: str) -> registry.Shared:
        if model != self.model:
            return registry.shared(model, registry.other_model(self.config or EngineConfig.from_env(), model))
        if self._shared is None or self._shared.closed:
            if self.engine is not None:
                self._shared = registry.around(self.engine)
            else:
                self._shared = registry.shared(model, self.config or EngineConfig.from_env())
            self._shared.catalogue.register(map(given, self.corpus))
        return self._shared

    def _separator(self, shared: registry.Shared) -> str:
        return shared.separator if self.document_separator is None else self.document_separator


def _result(answer: TokenEvent | Answer, question: DialoguePrompt, model: str) -> ChatResult:
    assert isinstance(answer, Answer)
    message = AIMessage(
        content=answer.text,
        usage_metadata=reporting.usage(answer),
        response_metadata=reporting.metadata(answer, question, model),
    )
    return ChatResult(generations=[ChatGeneration(message=message)], llm_output={"model_name": model})


def _chunk(event: TokenEvent | Answer, question: DialoguePrompt, model: str) -> ChatGenerationChunk | None:
    """The piece of a streamed message that `event` is; `None` where it says nothing."""
    if isinstance(event, Answer):
        last = AIMessageChunk(
            content="",
            usage_metadata=reporting.usage(event),
            response_metadata=reporting.metadata(event, question, model),
            chunk_position="last",
        )
        return ChatGenerationChunk(message=last)
    return ChatGenerationChunk(message=AIMessageChunk(content=event.text)) if event.text else None
