"""Translates LangChain's messages into turns of text with documents and tools, and answers into
LangChain's messages.

Documents come as content blocks, as artifacts of tool messages, or with the call. The text of a
block replaces the block. A document whose text is in no message is put before the text of the last
user turn. In both cases the text is recognised afterwards like any other known text, so there is
one code path. Content that is not text is refused.

In an answer's token counts, `cache_read` counts the reused tokens, exact and fused, as in the REST
service. `kv_cache` has both numbers, and the rest of the engine's report. `cache_creation` counts
the chunks that were missed; their entries are stored afterwards.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic_core import to_jsonable_python

from ragkv.chat import (
    ChatAnswer,
    ChatDocument,
    ChatInput,
    ChatPrompt,
    PlainMessage,
    Tool,
    ToolCall,
    insert_documents,
)
from ragkv.errors import InputError, UnsupportedError
from ragkv.model.decode.token_text import TokenText
from ragkv.types import Answer, TokenEvent, TokenLogprob

_IGNORED_BLOCKS = (
    "reasoning",
    "thinking",
    "tool_call",
    "tool_use",
    "invalid_tool_call",
    "non_standard",
)


def chat_input(
    messages: Sequence[BaseMessage],
    documents: Iterable[Any],
    separator: str,
    tools: Sequence[Tool] = (),
) -> ChatInput:
    """The turns and documents of a call. `separator` follows each document that a block or the call
    gives.
    """
    turns: list[PlainMessage] = []
    carried: list[ChatDocument] = []
    for message in messages:
        text, found = _content(message, separator)
        carried += found
        if isinstance(message, ToolMessage):
            turns.append(
                PlainMessage("tool", text, call_id=message.tool_call_id, name=message.name or "")
            )
        elif isinstance(message, AIMessage):
            turns.append(PlainMessage("assistant", text, chat_calls(message.tool_calls)))
        else:
            turns.append(PlainMessage(_role(message), text))
    of_call = [to_document(item) for item in documents]
    inserted = insert_documents(turns, of_call, separator)
    return ChatInput(inserted, (*carried, *of_call), tuple(tools))


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        roles = {"human": "user", "ai": "assistant"}
        return roles.get(message.role, message.role)
    if isinstance(message, SystemMessage):
        return "system"
    return "user"


def _content(message: BaseMessage, separator: str) -> tuple[str, list[ChatDocument]]:
    """The text of a message, and the documents in it."""
    blocks: list[Any] = [message.content] if isinstance(message.content, str) else message.content
    parts: list[str] = []
    documents: list[ChatDocument] = []
    for number, block in enumerate(blocks):
        found = _block(block)
        if isinstance(found, ChatDocument):
            documents.append(found)
            parts.append(found.text + (separator if number + 1 < len(blocks) else ""))
        else:
            parts.append(found)
    text = "".join(parts)
    if isinstance(message, ToolMessage):
        items = (
            message.artifact if isinstance(message.artifact, list | tuple) else [message.artifact]
        )
        carried = [to_document(item) for item in items if isinstance(item, Document)]
        missing = [document for document in carried if document.text not in text]
        text = "".join(document.text + separator for document in missing) + text
        documents += carried
    return text, documents


def _block(block: Any) -> str | ChatDocument:
    """The text of a content block, or the document that it holds."""
    if isinstance(block, str):
        return block
    kind = block.get("type")
    if kind == "text" and "metadata" not in block:
        return str(block.get("text", ""))
    if kind in ("text", "text-plain", "document") and (text := _text_of(block)) is not None:
        named = {name: block[name] for name in ("id", "title", "context") if block.get(name)}
        return ChatDocument(text, {**named, **(block.get("metadata") or {})})
    if kind in _IGNORED_BLOCKS:
        return ""
    raise UnsupportedError(
        f"A message has a block of type {kind!r}, but this model reads only text. Leave it out."
    )


def _text_of(block: Mapping[str, Any]) -> str | None:
    """The text of a document block in LangChain's form or, with a `source`, in Anthropic's."""
    source = block.get("source")
    text = (
        source.get("data")
        if isinstance(source, Mapping) and source.get("type") == "text"
        else block.get("text")
    )
    return text if isinstance(text, str) else None


def to_document(item: Any) -> ChatDocument:
    """The document of a `Document`, a text, or a mapping such as `{"text": ..., "title": ...}`."""
    if isinstance(item, Document):
        named = {"id": item.id} if item.id else {}
        return ChatDocument(item.page_content, {**named, **item.metadata})
    if isinstance(item, str):
        return ChatDocument(item, {})
    if isinstance(item, Mapping):
        for name in ("text", "page_content", "content"):
            if isinstance(item.get(name), str):
                others = {
                    key: value for key, value in item.items() if key not in (name, "metadata")
                }
                return ChatDocument(item[name], {**others, **(item.get("metadata") or {})})
    raise InputError(
        f"A document must be a Document, a text or a mapping with 'text', not {item!r:.80}."
    )


# Tools


def bound_tools(tools: Sequence[Any], choice: Any, strict: bool | None) -> dict[str, Any]:
    """The call settings of `bind_tools`. Raises `InputError` for a choice that names none of the
    tools.
    """
    converted = [_plain(convert_to_openai_tool(tool, strict=strict)) for tool in tools]
    names = tool_names(converted)
    if isinstance(choice, Mapping):
        choice = choice.get("function", {}).get("name")
    choice = {None: "auto", True: "required", False: "none", "any": "required"}.get(choice, choice)
    if choice not in ("auto", "none", "required", *names):
        raise InputError(
            f"tool_choice is {choice!r}; it must be auto, any, none or one of {', '.join(names)}."
        )
    return {"tools": converted, "tool_choice": choice}


def _plain(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "description": "",
        "parameters": {"type": "object", "properties": {}},
        **tool["function"],
    }
    function.pop("strict", None)
    return {"type": "function", "function": function}


def tool_names(tools: Sequence[Tool]) -> list[str]:
    """The names of the tools."""
    return [tool["function"]["name"] for tool in tools]


def chat_calls(calls: Sequence[Any]) -> tuple[ToolCall, ...]:
    """LangChain's calls of an earlier answer."""
    return tuple(
        ToolCall(
            call["name"],
            json.dumps(call["args"], ensure_ascii=False, default=str),
            call["id"] or "",
        )
        for call in calls
    )


# Answers


def chat_result(
    step: TokenEvent | ChatAnswer, prompt: ChatPrompt, model: str, tokens: TokenText
) -> ChatResult:
    """The result of a call whose last step is `step`, a `ChatAnswer`."""
    assert isinstance(step, ChatAnswer)
    found = step.found
    calls = [
        tool_call(name=call.name, args=json.loads(call.arguments), id=call.id)
        for call in found.calls
    ]
    message = AIMessage(
        content=found.text, tool_calls=calls, **_reports(step.answer, prompt, model, bool(calls))
    )
    info = _logprobs(step.answer.logprobs, tokens)
    generation = ChatGeneration(message=message, generation_info=info)
    return ChatResult(generations=[generation], llm_output={"model_name": model})


def chat_chunk(
    step: TokenEvent | ChatAnswer, prompt: ChatPrompt, model: str, tokens: TokenText
) -> ChatGenerationChunk | None:
    """The piece of a streamed message for `step`; `None` without text and log probability."""
    if isinstance(step, ChatAnswer):
        pieces = [
            tool_call_chunk(name=call.name, args=call.arguments, id=call.id, index=number)
            for number, call in enumerate(step.found.calls)
        ]
        reports = _reports(step.answer, prompt, model, bool(pieces))
        last = AIMessageChunk(content="", tool_call_chunks=pieces, chunk_position="last", **reports)
        return ChatGenerationChunk(message=last)
    info = _logprobs([step.logprob] if step.logprob else [], tokens)
    if not step.text and info is None:
        return None
    return ChatGenerationChunk(message=AIMessageChunk(content=step.text), generation_info=info)


def _logprobs(logprobs: Sequence[TokenLogprob], tokens: TokenText) -> dict[str, Any] | None:
    """Log probabilities where `ChatOpenAI` gives them: LangChain puts them into
    `response_metadata`.
    """
    return (
        {"logprobs": {"content": tokens.entries(logprobs), "refusal": None}} if logprobs else None
    )


def _reports(answer: Answer, prompt: ChatPrompt, model: str, has_calls: bool) -> dict[str, Any]:
    """The metadata of a message."""
    reuse = answer.reuse
    output = len(answer.token_ids)
    return {
        "usage_metadata": UsageMetadata(
            input_tokens=reuse.tokens,
            output_tokens=output,
            total_tokens=reuse.tokens + output,
            input_token_details=InputTokenDetails(
                cache_read=reuse.exact + reuse.fused, cache_creation=reuse.missed_tokens
            ),
        ),
        "response_metadata": {
            "model_name": model,
            "finish_reason": "tool_calls"
            if has_calls and answer.finish_reason == "stop"
            else answer.finish_reason,
            "kv_cache": _kv_cache(answer, prompt),
        },
    }


def _kv_cache(answer: Answer, prompt: ChatPrompt) -> dict[str, Any]:
    """The engine's report as plain JSON."""
    reuse = answer.reuse
    conversation = prompt.conversation
    report = {
        "mode": "fused"
        if reuse.fused or reuse.recomputed
        else "exact"
        if reuse.exact
        else "full_prefill",
        "reuse": asdict(reuse),
        "timing": asdict(answer.timing),
        "documents": [dict(chunk.metadata) for chunk in prompt.documents],
        "citations": [asdict(citation) for citation in answer.citations],
        "conversation": {
            "session": None
            if conversation is None or conversation.by_content
            else conversation.session.session_id,
            "turns": conversation.turns if conversation else 0,
            "tokens": conversation.tokens if conversation else 0,
        },
    }
    # metadata holds any type
    return dict(to_jsonable_python(report, bytes_mode="base64", fallback=str))
