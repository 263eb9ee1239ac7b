"""Runs many policies over one trace, as `ragkv simulate` does."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ragkv.config import at_least
from ragkv.store.policies import Policy, PolicySettings

from .policies import make_any_policy
from .readers import read_trace
from .report import Measure, Report, replay
from .token_times import TokenTimes
from .trace import Trace
from .workloads import BirthDeath, ShareGPTLike

GENERATED: dict[str, type[BirthDeath] | type[ShareGPTLike]] = {"birth-death": BirthDeath, "sharegpt-like": ShareGPTLike}


@dataclass(frozen=True)
class ReplaySetting:
    """How a trace is replayed."""

    capacity_blocks: int  # of memory
    disk_blocks: int = 0  # of the tier below; 0: none
    xi_blocks: int = 0
    xi_ms: float | None = None  # None: the time of xi_blocks computed blocks
    slo_ms: float = 200.0
    forced: bool = False  # forced caching: the conversation just served is not evicted
    profile: TokenTimes = field(default_factory=TokenTimes)

    def __post_init__(self) -> None:
        at_least(self, capacity_blocks=0, disk_blocks=0, xi_blocks=0)


def load_trace(where: str, block_tokens: int) -> Trace:
    """A trace file or folder, or a generated load by its name; raises `InputError`."""
    if where in GENERATED:
        return GENERATED[where]().trace(block_tokens)
    return read_trace(Path(where), block_tokens)


def policy_for(name: str, trace: Trace, setting: ReplaySetting, *, load_share: float = 1.0) -> Policy:
    """A policy with the knowledge of the trace that the papers give it: Q^, Q's distribution, the model's rates."""
    turns, ends = trace.rates
    settings = PolicySettings(
        xi_blocks=setting.xi_blocks,
        block_tokens=trace.block_tokens,
        new_blocks=trace.expected_new_blocks,
        new_blocks_seen=tuple(trace.new_blocks),
        turn_rate_per_s=turns,
        end_rate_per_s=ends,
        capacity_blocks=setting.capacity_blocks,
        load_share=load_share,
    )
    return make_any_policy(name, settings)


def simulate(trace: Trace, names: Sequence[str], setting: ReplaySetting) -> list[Report]:
    """Every policy over the trace, one report each; raises `ConfigError` for an unknown policy."""
    xi_ms = setting.profile.xi_ms(setting.xi_blocks, trace.block_tokens) if setting.xi_ms is None else setting.xi_ms
    measure = Measure(setting.profile, setting.xi_blocks, xi_ms, setting.slo_ms)
    for name in names:
        policy_for(name, trace, setting)  # checks every name before anything runs
    return [_one(trace, name, setting, measure) for name in names]


def _one(trace: Trace, name: str, setting: ReplaySetting, measure: Measure) -> Report:
    share = 1.0
    if setting.disk_blocks:  # a block that memory drops costs loading, not computing
        share = min(1.0, setting.profile.load_token_ms / setting.profile.token_ms)
    memory = replay(
        trace, policy_for(name, trace, setting, load_share=share), setting.capacity_blocks, forced=setting.forced
    )
    if not setting.disk_blocks:
        return measure.report(trace, memory)
    disk = replay(trace, policy_for(name, trace, setting), setting.disk_blocks, forced=setting.forced)
    return measure.report(trace, memory, disk)
