"""kv-cache-tester's agent conversations: their times count from each conversation's start, so we add arrivals.

Conversations arrive as a Poisson process (seed 0), one every `ARRIVAL_GAP_S` on average: 120 conversations of a median
34 minutes then overlap as on a busy server. A sub-agent is a separate conversation.
"""

import random
from pathlib import Path
from typing import Any

from ragkv.errors import InputError

from ..trace import Trace, TraceBuilder
from .json_lines import json_lines
from .mooncake import HashedRequest, shared_tokens

ARRIVAL_GAP_S = 60.0


def read_agents(path: Path, block_tokens: int, arrival_gap_s: float = ARRIVAL_GAP_S) -> Trace:
    """The conversations of a kv-cache-tester sample, arriving one after another."""
    draw, start = random.Random(0), 0.0
    requests: list[tuple[float, str, int, dict[str, Any]]] = []
    for conversation in json_lines(path, "id", "block_size", "requests"):
        start += draw.expovariate(1 / arrival_gap_s)
        _flatten(conversation, start, str(conversation["id"]), int(conversation["block_size"]), requests)
    builder, last = TraceBuilder(block_tokens), dict[str, HashedRequest]()
    for at, group, hash_tokens, request in sorted(requests, key=lambda entry: entry[0]):
        try:
            now = HashedRequest(request["hash_ids"], int(request["in"]), int(request["out"]))
        except KeyError as error:
            raise InputError(f"{path}, conversation {group}: a request lacks {error}.") from error
        shared = shared_tokens(last[group], now, hash_tokens) if group in last else 0
        builder.add(at, group, now.prompt_tokens, shared, now.response_tokens)
        last[group] = now
    return builder.trace(
        "kv-cache-tester", f"arrivals added: Poisson, one conversation every {arrival_gap_s:g} s, seed 0"
    )


def _flatten(
    parent: dict[str, Any],
    start: float,
    group: str,
    hash_tokens: int,
    into: list[tuple[float, str, int, dict[str, Any]]],
) -> None:
    for number, request in enumerate(parent["requests"]):
        at = start + float(request["t"])
        if "requests" in request:
            _flatten(request, at, f"{group}/{number}", hash_tokens, into)
        else:
            into.append((at, group, hash_tokens, request))
