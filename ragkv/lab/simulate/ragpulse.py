"""RAGPulse: a week of real RAG requests, each a list of parts (system text, passages, history, web, user) by id.

`read_rag_requests` keeps the parts, for chunk entries. `read_ragpulse` treats sessions as conversations, whose prompts
share the parts that their lists have in common from the start.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ragkv.errors import InputError

from .trace import Trace, TraceBuilder, common_prefix

PARTS = {  # By kind of part: its file and its id field. Prompts are laid out in this order.
    "sys_prompt": ("1_sys_prompt.jsonl", "sys_prompt_id"),
    "passages_ids": ("2_passages.jsonl", "passage_id"),
    "history": ("3_history.jsonl", "history_id"),
    "web_search": ("5_web_search.jsonl", "web_search_id"),
    "user_input": ("4_user_input.jsonl", "user_input_id"),
}


class PromptPart(NamedTuple):
    """A run of tokens of a prompt."""

    kind: str  # a key of PARTS
    number: int
    tokens: int


class RagRequest(NamedTuple):
    """One request, as its parts in order."""

    at: float  # seconds
    session: str
    parts: tuple[PromptPart, ...]
    response_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens of the prompt."""
        return sum(part.tokens for part in self.parts)


def read_rag_requests(folder: Path) -> list[RagRequest]:
    """RAGPulse's requests in order of time."""
    lengths = {
        (kind, entry[field]): int(entry["token_length"])
        for kind, (name, field) in PARTS.items()
        for entry in json_lines(folder / name, field, "token_length")
    }
    requests = []
    for entry in json_lines(folder / "0_trace.jsonl", "timestamp", "session_id", "hash_ids", "output_length"):
        try:
            parts = tuple(
                PromptPart(kind, n, lengths[kind, n]) for kind in PARTS for n in entry["hash_ids"].get(kind, ())
            )
        except KeyError as error:
            raise InputError(f"{folder}: request at {entry['timestamp']} names an unknown part {error}.") from error
        requests.append(RagRequest(float(entry["timestamp"]), entry["session_id"], parts, int(entry["output_length"])))
    return sorted(requests, key=lambda request: request.at)


def read_ragpulse(folder: Path, block_tokens: int) -> Trace:
    """RAGPulse's sessions as conversations."""
    builder, last = TraceBuilder(block_tokens), dict[str, RagRequest]()
    for request in read_rag_requests(folder):
        before = last.get(request.session)
        same = common_prefix((p.number for p in before.parts), (p.number for p in request.parts)) if before else 0
        shared = sum(part.tokens for part in request.parts[:same])
        builder.add(request.at, request.session, request.tokens, shared, request.response_tokens)
        last[request.session] = request
    return builder.trace(
        "RAGPulse sessions", "sessions as conversations; equal parts from the prompt's start are shared"
    )


def json_lines(path: Path, *needed: str) -> Iterator[dict[str, Any]]:
    """The objects of a file, each with the `needed` fields; raises `InputError` naming file and line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The trace {path} cannot be read: {error}.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            missing = [name for name in needed if name not in value]
        except (ValueError, TypeError) as error:
            raise InputError(f"{path}, line {number}: no JSON object ({error}).") from error
        if missing:
            raise InputError(f"{path}, line {number}: lacks {', '.join(missing)}.")
        yield value
