"""Statistics of a scheduler's queue."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueueStats:
    """The queue now, and counts of requests since the engine was built."""

    waiting: int  # now
    admitted: int  # now: planning or prefilling
    served: int  # requests whose prefill ended
    refused: int  # requests that a full queue refused
    expired: int  # their deadline passed while they waited, prefilled or decoded
    cancelled: int  # cancelled while they waited, prefilled or decoded
