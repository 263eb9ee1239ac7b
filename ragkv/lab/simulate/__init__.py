"""The simulator's door: real and generated traces, replayed through the policies the live store runs. No torch here."""

from .cluster import Bounds, RagLoad, Routed, Shape, TurnLoad, poisson, serve_replicas
from .policies import ALL_POLICIES, SIMULATOR_ONLY, make_any_policy
from .profile import Profile
from .readers import RagRequest, read_rag_requests, read_trace
from .replay import Replay, replay
from .report import Measure, Report
from .run import Setting, load_trace, policy_for, simulate
from .trace import Row, Trace, read_rows, write_rows
from .workloads import BirthDeath, ShareGPTLike

__all__ = [
    "ALL_POLICIES",
    "SIMULATOR_ONLY",
    "make_any_policy",
    "BirthDeath",
    "Bounds",
    "Measure",
    "Profile",
    "RagLoad",
    "RagRequest",
    "Replay",
    "Report",
    "Routed",
    "Row",
    "Setting",
    "Shape",
    "ShareGPTLike",
    "Trace",
    "TurnLoad",
    "load_trace",
    "poisson",
    "policy_for",
    "read_rag_requests",
    "read_rows",
    "read_trace",
    "replay",
    "serve_replicas",
    "simulate",
    "write_rows",
]
