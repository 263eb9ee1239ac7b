"""Traces as published: ShareGPT's, WildChat's, Mooncake's, kv-cache-tester's (agents), and
RAGPulse's folder.

The first two hold text, so tokens are estimated from characters. A prompt is everything said
before, and all of it that was stored is shared. The others hold token counts, and ids of equal
parts. What a trace leaves open is chosen here, and its notes say so.
"""

import gzip
import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from ragkv.errors import InputError

from .trace import Trace, TraceBuilder

TOKEN_CHARACTERS = 4  # A token of English text has about `TOKEN_CHARACTERS` characters.
# These are the times of conversations that have none.
ARRIVALS_PER_S = 1.0
TURN_GAP_S = 60.0
# Agents' times count from their conversation's start: conversations start so far apart.
AGENT_GAP_S = 60.0
MOONCAKE_TOKENS = 512  # A hash of Mooncake's names so many tokens and all before them.
# A block that more different blocks follow is a common preamble, and nobody's conversation.
MOST_SUCCESSORS = 64
# This is the order of a prompt.
RAGPULSE = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")


class Asked(NamedTuple):
    """A conversation's request: its prompt as parts with ids, its tokens, and its answer's."""

    ids: list[int]
    prompt: int
    answer: int

    def shared_with(self, before: "Asked", tokens: int) -> int:
        """Tokens of the prompt that `before` stored, prompt and answer, if an id names so many
        `tokens`.

        A prompt that repeats every full part of the last one and is long enough is taken to hold
        its answer as well, which no id can confirm.
        """
        same = common_prefix(before.ids, self.ids)
        stored = before.prompt + before.answer
        whole = same >= before.prompt // tokens and self.prompt >= stored
        return stored if whole else min(same * tokens, self.prompt)


def read_published(path: Path, block_tokens: int) -> Trace:
    """The trace at `path`; JSON lines are told apart by their first. Raises `InputError`, which
    says why it is none.
    """
    try:
        first = next(_rows(path), {}) if ".jsonl" in path.suffixes else {}
        read = (
            read_agents
            if "requests" in first
            else read_mooncake
            if "hash_ids" in first
            else read_chats
        )
        return (read_ragpulse if path.is_dir() else read)(path, block_tokens)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"The trace {path} has a request of another form ({error!r}).") from error


def read_chats(path: Path, block_tokens: int) -> Trace:
    """A trace of the conversations in `path` (.json or .jsonl, perhaps .gz). Raises `InputError`,
    which says why.
    """
    draw = random.Random(0)
    start = 0.0
    requests = list[tuple[float, str, int, int]]()
    has_times = True
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
                requests.append(
                    (start + asked * TURN_GAP_S if at is None else at, group, prompt, tokens)
                )
                asked += 1
            prompt += tokens
    if not requests:
        raise InputError(f"The trace {path} has no answered turn.")
    builder = TraceBuilder(block_tokens)
    stored = dict[str, int]()
    first = min(at for at, *_ in requests)
    for at, group, prompt, answer in sorted(requests):
        builder.add(at - first, group, prompt, stored.get(group, 0), answer)
        stored[group] = prompt + answer
    notes = [f"tokens estimated: {TOKEN_CHARACTERS} characters each"]
    if not has_times:
        notes.append(
            f"times added: {ARRIVALS_PER_S:g} conversations/s (Poisson, seed 0), a turn every "
            f"{TURN_GAP_S:g} s"
        )
    return builder.trace(path.name, *notes)


def read_mooncake(path: Path, block_tokens: int) -> Trace:
    """A request continues the conversation that brought the blocks it repeats."""
    requests = list(_rows(path))
    followed = defaultdict[int, set[int]](set)
    for request in requests:
        for block, after in zip(request["hash_ids"], request["hash_ids"][1:], strict=False):
            followed[block].add(after)
    builder = TraceBuilder(block_tokens)
    owner = dict[int, str]()
    last = dict[str, Asked]()
    for number, request in enumerate(requests):
        now = Asked(request["hash_ids"], request["input_length"], request["output_length"])
        group = next((owner[block] for block in now.ids if block in owner), f"m{number}")
        shared = now.shared_with(last[group], MOONCAKE_TOKENS) if group in last else 0
        builder.add(request["timestamp"] / 1000, group, now.prompt, shared, now.answer)
        last[group] = now
        for block in now.ids:
            if len(followed[block]) <= MOST_SUCCESSORS:
                owner.setdefault(block, group)
    return builder.trace(path.name, "conversations recovered from hashes of prefixes")


def read_agents(path: Path, block_tokens: int) -> Trace:
    """A sub-agent is a conversation of its own."""
    draw = random.Random(0)
    start = 0.0
    requests = list[tuple[float, str, int, Asked]]()

    def flatten(parent: dict[str, Any], start: float, group: str, tokens: int) -> None:
        for number, request in enumerate(parent["requests"]):
            at = start + float(request["t"])
            if "requests" in request:
                flatten(request, at, f"{group}/{number}", tokens)
            else:
                requests.append(
                    (at, group, tokens, Asked(request["hash_ids"], request["in"], request["out"]))
                )

    for conversation in _rows(path):
        start += draw.expovariate(1 / AGENT_GAP_S)
        flatten(conversation, start, str(conversation["id"]), conversation["block_size"])
    builder = TraceBuilder(block_tokens)
    last = dict[str, Asked]()
    for at, group, tokens, now in sorted(requests, key=lambda request: request[0]):
        builder.add(
            at,
            group,
            now.prompt,
            now.shared_with(last[group], tokens) if group in last else 0,
            now.answer,
        )
        last[group] = now
    return builder.trace(
        path.name, f"arrivals added: Poisson, a conversation each {AGENT_GAP_S:g} s, seed 0"
    )


def read_ragpulse(folder: Path, block_tokens: int) -> Trace:
    """A session is a conversation; equal parts from a prompt's start are shared."""
    parts = chain.from_iterable(_rows(path) for path in folder.glob("[1-5]_*.jsonl"))
    size = {
        next(row[key] for key in row if key.endswith("_id")): row["token_length"] for row in parts
    }
    builder = TraceBuilder(block_tokens)
    last = dict[str, list[int]]()
    for row in sorted(_rows(folder / "0_trace.jsonl"), key=lambda row: float(row["timestamp"])):
        ids = list(chain.from_iterable(row["hash_ids"].get(kind, ()) for kind in RAGPULSE))
        group = row["session_id"]
        sizes = [size[part] for part in ids]
        shared = sum(islice(sizes, common_prefix(last.get(group, ()), ids)))
        builder.add(float(row["timestamp"]), group, sum(sizes), shared, row["output_length"])
        last[group] = ids
    return builder.trace(
        folder.name, "sessions as conversations; equal parts from the prompt's start are shared"
    )


def common_prefix(one: Iterable[int], other: Iterable[int]) -> int:
    """How many ids two lists have in common from the start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _turn(message: dict[str, Any]) -> tuple[bool, int, float | None]:
    """Whether it is an answer, its tokens, and its time in seconds, if it has one."""
    speaker = message.get("from") or message["role"]
    text = message.get("value", message.get("content")) or ""
    time = message.get("timestamp")
    at = None if time is None else datetime.fromisoformat(time).timestamp()
    return (
        speaker in ("gpt", "assistant", "chatgpt", "bing", "bard"),
        -(-len(text) // TOKEN_CHARACTERS),
        at,
    )


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON list, or of JSON lines."""
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8") as file
        ):
            if ".jsonl" in path.suffixes:
                yield from map(json.loads, filter(str.strip, file))
            else:
                yield from json.load(file)
    except (OSError, ValueError, EOFError, TypeError) as error:
        raise InputError(f"The trace {path} cannot be read: {error}.") from error
