"""The simulator's door: real and generated traces, replayed through the policies the live store runs. No torch here."""

from .policies import ALL_POLICIES, SIMULATOR_ONLY, make_any_policy
from .readers import RagRequest, read_rag_requests, read_trace
from .report import Measure, Replay, Report, replay
from .run import ReplaySetting, load_trace, policy_for, simulate
from .token_times import TokenTimes
from .trace import Trace, TraceRow, read_rows
from .workloads import BirthDeath, ShareGPTLike

__all__ = [
    "ALL_POLICIES",
    "SIMULATOR_ONLY",
    "make_any_policy",
    "BirthDeath",
    "Measure",
    "TokenTimes",
    "RagRequest",
    "Replay",
    "Report",
    "TraceRow",
    "ReplaySetting",
    "ShareGPTLike",
    "Trace",
    "load_trace",
    "policy_for",
    "read_rag_requests",
    "read_rows",
    "read_trace",
    "replay",
    "simulate",
]
