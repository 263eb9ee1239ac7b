"""Mooncake's traces (FAST'25): requests with hashes of 512-token prefixes, from which conversations are recovered.

A hash names its block and everything before it. A request belongs to the conversation that brought the deepest block it
repeats; blocks with more than `MOST_SUCCESSORS` different successors are a common preamble and make nobody's
conversation. If it repeats every full block of that conversation's last prompt and is long enough, it is taken to hold
the response as well, which no hash can confirm; otherwise what the hashes confirm is shared.
"""

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from ..trace import Trace
from .growth import Growth, common
from .lines import json_lines

HASH_TOKENS = 512
MOST_SUCCESSORS = 64


class Last(NamedTuple):
    """A conversation's last request."""

    hashes: list[int]
    prompt_tokens: int
    response_tokens: int


def read_mooncake(path: Path, block_tokens: int) -> Trace:
    """The requests of a Mooncake trace as conversations."""
    requests = list(json_lines(path, "timestamp", "input_length", "output_length", "hash_ids"))
    successors: dict[int, set[int]] = defaultdict(set)
    for request in requests:
        for one, other in zip(request["hash_ids"], request["hash_ids"][1:], strict=False):
            successors[one].add(other)
    preamble = {block for block, after in successors.items() if len(after) > MOST_SUCCESSORS}
    owner: dict[int, str] = {}
    last: dict[str, Last] = {}
    growth = Growth(block_tokens)
    for number, request in enumerate(requests):
        now = Last(request["hash_ids"], request["input_length"], request["output_length"])
        group = next((owner[block] for block in reversed(now.hashes) if block in owner), f"m{number}")
        shared = shared_tokens(last[group], now, HASH_TOKENS) if group in last else 0
        growth.add(request["timestamp"] / 1000, group, now.prompt_tokens, shared, now.response_tokens)
        last[group] = now
        for block in now.hashes:
            if block not in preamble:
                owner.setdefault(block, group)
    return growth.trace("Mooncake conversation", "conversations recovered from prefix hashes")


def shared_tokens(before: Last, now: Last, hash_tokens: int) -> int:
    """Tokens of the prompt that are a prefix of what the request before stored, prompt and response."""
    blocks = common(before.hashes, now.hashes)
    stored = before.prompt_tokens + before.response_tokens
    if blocks >= before.prompt_tokens // hash_tokens and now.prompt_tokens >= stored:
        return stored
    return min(blocks * hash_tokens, now.prompt_tokens)
