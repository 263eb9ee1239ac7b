"""The simulator's door: real and generated traces, replayed through the policies the live store runs. No torch here."""

from .profile import Profile
from .readers import RagRequest, read_rag_requests, read_trace
from .replay import Replay, replay
from .report import Measure, Report
from .run import Setting, load_trace, policy_for, simulate
from .trace import Row, Trace, read_rows, write_rows
from .workloads import BirthDeath, ShareGPTLike

__all__ = [
    "BirthDeath",
    "Measure",
    "Profile",
    "RagRequest",
    "Replay",
    "Report",
    "Row",
    "Setting",
    "ShareGPTLike",
    "Trace",
    "load_trace",
    "policy_for",
    "read_rag_requests",
    "read_rows",
    "read_trace",
    "replay",
    "simulate",
    "write_rows",
]
