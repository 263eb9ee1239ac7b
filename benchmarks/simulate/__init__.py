"""The simulator's door: real and generated traces, replayed through the policies the live store
runs. No torch here.
"""

from .conversation_model import TraceSettings
from .policies import ALL_POLICIES, SIMULATOR_ONLY, make_any_policy
from .replay import (
    Replay,
    ReplaySetting,
    Report,
    load_trace,
    policy_for,
    replay,
    simulate,
    xi_blocks,
)
from .trace import Trace, TraceRow, read_rows
from .workloads import BirthDeath, ShareGPTLike

__all__ = [
    "ALL_POLICIES",
    "SIMULATOR_ONLY",
    "make_any_policy",
    "BirthDeath",
    "Replay",
    "ReplaySetting",
    "Report",
    "ShareGPTLike",
    "Trace",
    "TraceRow",
    "TraceSettings",
    "load_trace",
    "policy_for",
    "read_rows",
    "replay",
    "simulate",
    "xi_blocks",
]
