"""Mooncake's traces (FAST'25): requests with hashes of 512-token prefixes, from which conversations are recovered.

A hash identifies its block and everything before it. A request belongs to the conversation that first had the deepest
block it repeats; a block with more than `MOST_SUCCESSORS` different successors is a common preamble and identifies no
conversation. If the request repeats every full block of that conversation's last prompt and is long enough, we assume
that it contains the response too, which no hash can confirm; otherwise only the blocks with equal hashes are shared.
"""

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from ..trace import Trace, TraceBuilder, common_prefix
from .json_lines import json_lines

HASH_TOKENS = 512
MOST_SUCCESSORS = 64


class HashedRequest(NamedTuple):
    """A request by the hashes of its prefixes."""

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
    last: dict[str, HashedRequest] = {}
    builder = TraceBuilder(block_tokens)
    for number, request in enumerate(requests):
        now = HashedRequest(request["hash_ids"], request["input_length"], request["output_length"])
        group = next((owner[block] for block in reversed(now.hashes) if block in owner), f"m{number}")
        shared = shared_tokens(last[group], now, HASH_TOKENS) if group in last else 0
        builder.add(request["timestamp"] / 1000, group, now.prompt_tokens, shared, now.response_tokens)
        last[group] = now
        for block in now.hashes:
            if block not in preamble:
                owner.setdefault(block, group)
    return builder.trace("Mooncake conversation", "conversations recovered from prefix hashes")


def shared_tokens(before: HashedRequest, now: HashedRequest, hash_tokens: int) -> int:
    """Tokens of the prompt of `now` that are a prefix of what `before` stored, prompt and response."""
    blocks = common_prefix(before.hashes, now.hashes)
    stored = before.prompt_tokens + before.response_tokens
    if blocks >= before.prompt_tokens // hash_tokens and now.prompt_tokens >= stored:
        return stored
    return min(blocks * hash_tokens, now.prompt_tokens)
