"""What came of a request, as LangChain and plain JSON have it.

`cache_read` is only what was reused and equals what a full prefill computes. Fused reuse is never counted there: it
is in `kv_cache`, beside everything else the engine reports. `cache_creation` is the chunks that were missed, whose
entries are made afterwards.
"""

from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum
from typing import Any

from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

from ragkv.dialogue import DialoguePrompt
from ragkv.inference import cite
from ragkv.types import Answer


def usage(answer: Answer) -> UsageMetadata:
    """Token counts; the two details are disjoint."""
    reuse, output = answer.reuse, len(answer.token_ids)
    return UsageMetadata(
        input_tokens=reuse.tokens,
        output_tokens=output,
        total_tokens=reuse.tokens + output,
        input_token_details=InputTokenDetails(cache_read=reuse.exact, cache_creation=reuse.missed_tokens),
    )


def metadata(answer: Answer, asked: DialoguePrompt, model: str) -> dict[str, Any]:
    """The response's metadata, with the full report under `kv_cache`."""
    return {"model_name": model, "finish_reason": answer.finish_reason, "kv_cache": report(answer, asked)}


def report(answer: Answer, asked: DialoguePrompt) -> dict[str, Any]:
    """The engine's report as plain JSON."""
    mode, reason = _mode(answer, asked)
    conversation = asked.conversation
    return {
        "mode": mode,
        "reason": reason,
        "reuse": _plain(asdict(answer.reuse)),
        "timing": {**_plain(asdict(answer.timing)), "recognition_s": asked.recognition_s, "layout_s": asked.layout_s},
        "documents": [_plain(chunk.metadata) for chunk in asked.documents],
        "citations": [_plain(asdict(found)) for found in cite(answer.text, asked.documents)],
        "conversation": {
            "session": None if conversation is None or conversation.by_content else conversation.session.session_id,
            "turns": conversation.turns if conversation else 0,
            "tokens": conversation.tokens if conversation else 0,
        },
    }


def _mode(answer: Answer, asked: DialoguePrompt) -> tuple[str, str]:
    reuse = answer.reuse
    if reuse.fused or reuse.recomputed:
        return "fused", f"{len(asked.documents)} chunks in the prompt"
    if not asked.documents:
        reason = "no known chunks in the prompt"
    elif reuse.missed_chunks:
        reason = f"{reuse.missed_chunks} of {len(asked.documents)} chunks had no stored entry yet"
    else:
        reason = "; ".join(reuse.notes) or "as asked for"
    return ("exact" if reuse.exact else "full_prefill"), reason


def _plain(value: Any) -> Any:
    """`value` in JSON's own types; what JSON has none for becomes its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return _plain(value.value)
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
