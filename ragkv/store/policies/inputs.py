"""The inputs of policies: their settings, and the sizes of conversations' turns."""

from dataclasses import dataclass
from typing import NamedTuple


class NextRequest(NamedTuple):
    """A conversation's next request, which only the simulator knows."""

    position: int  # its index among all requests in order of time
    prompt: int  # its prompt, blocks rounded up
    shared: int  # blocks of that prompt that are a prefix of what the conversation stored


NEVER = NextRequest(1 << 62, 0, 0)  # This stands for a conversation that does not return.


class TurnSize(NamedTuple):
    """One turn of a conversation, as policies see it: sizes in blocks, and no token. In a live
    store the answer counts with its most tokens.
    """

    at: float  # seconds
    request: int  # its number in the trace; 0 in a live store
    group: str  # the conversation
    prompt: int  # `in`: its prompt, blocks rounded up
    # `sh`: blocks of the prompt that are a prefix of what the conversation stored; 0 at the first
    # turn
    shared: int
    length: int  # `L`: full blocks of prompt and response, all that can be stored
    number: int = 1  # of the turn in its conversation, from 1
    since: float | None = None  # seconds since the conversation's previous turn; None at the first
    # None where the future is unknown: everywhere except in the simulator
    next: NextRequest | None = None


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Settings of all policies; each policy reads those it needs. `check_settings` refuses what no
    policy can have.
    """

    xi_blocks: int = 0  # latency threshold: blocks that may be computed within the TTFT target
    block_tokens: int = 16  # B
    # Q^: blocks the next turn is expected to add; None: learned from the turns
    new_blocks: int | None = None
