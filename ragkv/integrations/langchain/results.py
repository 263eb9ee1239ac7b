"""An answer as LangChain's messages, with token counts and the engine's report.

`cache_read` counts the reused tokens, exact and fused, as the REST service does; `kv_cache` tells them apart, with the
rest of the engine's report. `cache_creation` counts the chunks that were missed; their entries are stored afterwards.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic_core import to_jsonable_python

from ragkv.api.chat import DialoguePrompt
from ragkv.model.decode.token_text import TokenText
from ragkv.prompt import cite
from ragkv.types import Answer, TokenEvent, TokenLogprob

from .tools import calls_of, tool_names


def chat_result(event: TokenEvent | Answer, prompt: DialoguePrompt, model: str, tokens: TokenText) -> ChatResult:
    """The result of a call whose last event is `event`, an `Answer`."""
    assert isinstance(event, Answer)
    content, calls = calls_of(event.text, tool_names(prompt.tools))
    message = AIMessage(content=content, tool_calls=calls, **_reports(event, prompt, model, bool(calls)))
    info = _logprobs(event.logprobs, tokens)
    generation = ChatGeneration(message=message, generation_info=info)
    return ChatResult(generations=[generation], llm_output={"model_name": model})


def chat_chunk(
    event: TokenEvent | Answer, prompt: DialoguePrompt, model: str, tokens: TokenText
) -> ChatGenerationChunk | None:
    """The piece of a streamed message for `event`; `None` for an event without text and log probability."""
    if isinstance(event, Answer):
        _, calls = calls_of(event.text, tool_names(prompt.tools))
        pieces = [
            tool_call_chunk(name=call["name"], args=json.dumps(call["args"]), id=call["id"], index=number)
            for number, call in enumerate(calls)
        ]
        reports = _reports(event, prompt, model, bool(calls))
        last = AIMessageChunk(content="", tool_call_chunks=pieces, chunk_position="last", **reports)
        return ChatGenerationChunk(message=last)
    info = _logprobs([event.logprob] if event.logprob else [], tokens)
    if not event.text and info is None:
        return None
    return ChatGenerationChunk(message=AIMessageChunk(content=event.text), generation_info=info)


def _logprobs(logprobs: Sequence[TokenLogprob], tokens: TokenText) -> dict[str, Any] | None:
    """Log probabilities where `ChatOpenAI` gives them: LangChain puts them into `response_metadata`."""
    return {"logprobs": {"content": tokens.entries(logprobs), "refusal": None}} if logprobs else None


def _reports(answer: Answer, prompt: DialoguePrompt, model: str, has_calls: bool) -> dict[str, Any]:
    """The metadata of a message."""
    reuse, output = answer.reuse, len(answer.token_ids)
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
            "finish_reason": "tool_calls" if has_calls and answer.finish_reason == "stop" else answer.finish_reason,
            "kv_cache": _kv_cache(answer, prompt),
        },
    }


def _kv_cache(answer: Answer, prompt: DialoguePrompt) -> dict[str, Any]:
    """The engine's report as plain JSON."""
    mode, reason = _mode(answer, prompt)
    conversation = prompt.conversation
    recognition = {"recognition_s": prompt.recognition_s, "layout_s": prompt.layout_s}
    report = {
        "mode": mode,
        "reason": reason,
        "reuse": asdict(answer.reuse),
        "timing": {**asdict(answer.timing), **recognition},
        "documents": [dict(chunk.metadata) for chunk in prompt.documents],
        "citations": [asdict(citation) for citation in cite(answer.text, prompt.documents)],
        "conversation": {
            "session": None if conversation is None or conversation.by_content else conversation.session.session_id,
            "turns": conversation.turns if conversation else 0,
            "tokens": conversation.tokens if conversation else 0,
        },
    }
    return dict(to_jsonable_python(report, bytes_mode="base64", fallback=str))  # metadata holds any type


def _mode(answer: Answer, prompt: DialoguePrompt) -> tuple[str, str]:
    """How the prompt was reused, and why so."""
    reuse = answer.reuse
    if reuse.fused or reuse.recomputed:
        return "fused", f"{len(prompt.documents)} chunks in the prompt"
    if not prompt.documents:
        reason = "no known chunks in the prompt"
    elif reuse.missed_chunks:
        reason = f"{reuse.missed_chunks} of {len(prompt.documents)} chunks had no stored entry yet"
    else:
        reason = "; ".join(reuse.notes) or "as the settings ask"
    return ("exact" if reuse.exact else "full_prefill"), reason
