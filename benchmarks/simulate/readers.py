"""Conversations as published: ShareGPT's (no times) and WildChat's (a time for each answer), as JSON or JSON lines.

Both hold text, so tokens are estimated from characters. A prompt is everything said before, and all of it that was
stored is shared. ShareGPT has no times: conversations arrive as a Poisson process, and turns follow at a steady gap.
"""

import gzip
import json
import random
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from ragkv.errors import InputError

from .trace import Trace, TraceBuilder

TOKEN_CHARACTERS = 4  # A token of English text has about `TOKEN_CHARACTERS` characters.
ARRIVALS_PER_S, TURN_GAP_S = 1.0, 60.0  # These are the times of conversations that have none.


def read_chats(path: Path, block_tokens: int) -> Trace:
    """A trace of the conversations in `path` (.json or .jsonl, perhaps .gz). Raises `InputError`, which says why."""
    draw, start, requests, has_times = random.Random(0), 0.0, list[tuple[float, str, int, int]](), True
    for number, row in enumerate(_rows(path), 1):
        start += draw.expovariate(ARRIVALS_PER_S)
        try:
            spoken = row["conversations" if "conversations" in row else "conversation"]
            turns = [_turn(message) for message in spoken]
            group = str(row.get("id") or row.get("conversation_hash") or number)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InputError(
                f"{path}, conversation {number}: not of ShareGPT's or WildChat's form ({error})."
            ) from error
        prompt = asked = 0
        for is_answer, tokens, at in turns:
            if is_answer:
                has_times &= at is not None
                requests.append((start + asked * TURN_GAP_S if at is None else at, group, prompt, tokens))
                asked += 1
            prompt += tokens
    if not requests:
        raise InputError(f"The trace {path} has no answered turn.")
    builder, stored = TraceBuilder(block_tokens), dict[str, int]()
    first = min(at for at, *_ in requests)
    for at, group, prompt, answer in sorted(requests):
        builder.add(at - first, group, prompt, stored.get(group, 0), answer)
        stored[group] = prompt + answer
    notes = [f"tokens estimated: {TOKEN_CHARACTERS} characters each"]
    if not has_times:
        notes.append(
            f"times added: {ARRIVALS_PER_S:g} conversations/s (Poisson, seed 0), a turn every {TURN_GAP_S:g} s"
        )
    return builder.trace(path.name, *notes)


def _turn(message: dict[str, Any]) -> tuple[bool, int, float | None]:
    """Whether it is an answer, its tokens, and its time in seconds, if it has one."""
    speaker, text = message.get("from") or message["role"], message.get("value", message.get("content")) or ""
    time = message.get("timestamp")
    at = None if time is None else datetime.fromisoformat(time).timestamp()
    return speaker in ("gpt", "assistant", "chatgpt", "bing", "bard"), -(-len(text) // TOKEN_CHARACTERS), at


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON list, or of JSON lines."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            if ".jsonl" in path.suffixes:
                yield from map(json.loads, filter(str.strip, file))
            else:
                yield from json.load(file)
    except (OSError, ValueError, EOFError, TypeError) as error:
        raise InputError(f"The trace {path} cannot be read: {error}.") from error
