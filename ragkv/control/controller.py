"""The loading controller: one decision for each request (CacheBlend section 5.2).

Holds the engine's profile, which is read when the engine opens.
Without a profile a request is served at r*, and its report says why; a prompt of which fusing would
compute most rows is computed whole. A tier that was not measured counts as no profile. What requests
took is compared with the profile's estimate, and corrects the speeds once it is clearly another.
With a profile, a chunk is computed if shared storage would load it slower, also when the caller
gave the ratio. The speed of the latest reads counts there, and not the speed when the profile was
made.
"""

import os
import platform
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from ragkv.config import PricesConfig
from ragkv.errors import ProfileError, RagKVError
from ragkv.fusion import Passed, Plan, Selector, SpanState, budget, with_floor
from ragkv.model import Adapter
from ragkv.runtime import cache_folder, cpu_model
from ragkv.store import Identity

from .decision import Steady, belongs_in_memory, choose_computed, decide
from .estimators import load_s, ttft_s
from .method import Method, Methods
from .profile import FILE_NAME, Profile, Subject, TierSpeed, load
from .shape import Shape, loads_of, rows_share

OUTCOMES = 8  # requests whose median corrects a speed
# After so long without a read a tier has the profile's speed again. Otherwise a tier that was slow
# once would never be read again.
FORGET_S = 600.0
COMPUTE = "compute"  # the key of computing among the outcomes of tiers
SLOWER = "computing is quicker than loading the stored KV"  # why a chunk is not reused
NO_GAIN = "reuse would bring the first token no sooner"  # why no chunk is
# Without a profile, a prompt is computed whole if fusing computes so much of it: small passes
# take longer for each row, and placing comes on top.
MOST_ROWS = 0.8


@dataclass(frozen=True, slots=True)
class Decided:
    """The controller's decision for one prompt."""

    plan: Plan
    selector: Selector
    ratio: float  # of the candidates that are recomputed in each layer
    why: tuple[str, ...] = ()  # the decision in words; empty if there was none
    notes: tuple[str, ...] = ()  # what else the report says about it
    expected_s: float | None = None  # what the pass should take; None if that was not estimated


class Controller:
    """The controller with the engine's profile. Holds no request's state."""

    def __init__(
        self,
        adapter: Adapter,
        identity: Identity,
        directory: str | Path | None,
        prices: PricesConfig,
        methods: Methods,
        speeds: Callable[[], Mapping[str, float]] = dict,
        on_profile: Callable[[Profile], object] = lambda _: None,
    ) -> None:
        """Use the profile of this model, and of entries of `identity`, that is saved in
        `directory`, if there is one.

        `methods` has that of requests which name none, `speeds` those of remote tiers;
        `on_profile` is called with every profile that is used from then on.
        """
        self._adapter = adapter
        self.identity = identity
        self.directory = directory
        self.prices = prices
        self.methods = methods
        self._speeds = speeds
        self._on_profile = on_profile
        self._profile: Profile | None = None
        self._refusal = ""  # why there is none
        self._forget_outcomes()
        self._read_profile()

    @cached_property
    def subject(self) -> Subject:
        """The model and machine that a profile is saved for."""
        adapter = self._adapter
        identity = self.identity
        device = self._adapter.device
        return Subject(
            weights=identity.weights,
            architecture=identity.architecture,
            rope=identity.rope,
            dtype=identity.dtype,
            codec=identity.codec,
            machine=platform.node(),
            cpu=cpu_model(),
            threads=torch.get_num_threads(),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            packed_bytes=adapter.packed_bytes,
            torch=torch.__version__,
            storage=_file_system(self.directory),
        )

    @property
    def profile(self) -> Profile:
        """The profile in use. Raises `ProfileError`, which says why there is none."""
        if self._profile is None:
            raise ProfileError(self._refusal)
        return self._profile

    def _read_profile(self) -> None:
        """Use the saved profile, or note why it is not used.

        Read once: no other process measures this store while it is open.
        """
        try:
            self.apply_profile(load(self.profile_directory, self.subject))
        except ProfileError as error:
            self._refusal = str(error)

    @property
    def profile_directory(self) -> Path:
        """Where the profile is saved: next to the store, or in the user's cache folder."""
        return cache_folder("profiles") if self.directory is None else Path(self.directory)

    @property
    def profile_file(self) -> Path:
        """The file in that directory."""
        return self.profile_directory / FILE_NAME

    def apply_profile(self, profile: Profile) -> None:
        """Use `profile` from now on. Raises `ProfileError` if it is of another model or machine."""
        profile.check(self.subject)
        self._profile = profile
        self._forget_outcomes()
        self._on_profile(profile)

    def _forget_outcomes(self) -> None:
        """Begin without corrections: what requests took was compared with another profile."""
        self._steady = Steady()
        # By tier or COMPUTE: what the latest requests took, over the profile's estimate.
        self._outcomes: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=OUTCOMES))
        self._seen_at: defaultdict[str, float] = defaultdict(time.monotonic)

    def decide(self, plan: Plan, method: Method) -> Decided:
        """Choose the spans to compute instead of load and, if `method` leaves it open, the ratio.

        The ratio is at least that of `method`. At a given ratio only chunks of shared storage are
        computed.
        """
        decided = self._chosen(plan, method)
        count = len(decided.plan.candidates)
        raised = decided.ratio
        if method.selector.uses_ratio:
            raised = with_floor(raised, count, method.floor_tokens)
        floor = () if raised == decided.ratio else (_floor_note(count, decided.ratio, raised),)
        return replace(decided, ratio=raised, notes=(*method.notes, *floor))

    def _chosen(self, plan: Plan, method: Method) -> Decided:
        """The plan with some spans computed, the ratio, and why."""
        spans, loads = loads_of(plan)
        shape = Shape.of(plan, method.selector, self._adapter.layer_count)
        ratio = method.ratio
        try:
            profile, corrected = self._corrected()
            if method.controlled:
                decision = decide(profile, shape, loads, ratio)
            else:
                speeds = self._speeds()
                loads = [replace(one, fixed=one.fixed or one.tier not in speeds) for one in loads]
                decision = choose_computed(profile, shape, loads, ratio)
        except RagKVError as error:  # there is no profile, or a tier was not measured
            if not method.controlled:
                return Decided(plan, method.selector, ratio)
            return self._unprofiled(plan, shape, method, str(error))
        computed = [spans[index] for index in decision.computed]
        plan = plan.computing(computed, SLOWER if decision.pays else NO_GAIN)
        why = (*decision.why, *(corrected if decision.why else ()))
        return Decided(plan, method.selector, decision.ratio, why, expected_s=decision.ttft_s)

    def _unprofiled(self, plan: Plan, shape: Shape, method: Method, error: str) -> Decided:
        """The decision by counting rows: r*, or all computed."""
        fused = [span for span in plan.spans if span.state is SpanState.FUSED]
        share = rows_share(shape, method.ratio, self._adapter.layer_count)
        why = f"ratio {method.ratio:.0%} = r*: {error}"
        if fused and share > MOST_ROWS:
            plan = plan.computing(fused, NO_GAIN)
            why = (
                f"all is computed: of {shape.prompt_tokens} tokens reuse would still compute "
                f"{share:.0%} ({error})"
            )
        return Decided(plan, method.selector, method.ratio, (why,))

    def learn(self, decided: Decided, passed: Passed) -> None:
        """Compare what a pass took, without steps of other requests, with the profile's
        estimate.
        """
        if (profile := self._profile) is None:
            return
        spans, loads = loads_of(decided.plan)
        tiers = {kind: speed.times(0.0) for kind, speed in profile.tiers.items()}
        tiers |= {load.tier: TierSpeed(0.0, 0.0) for load in loads if load.tier not in tiers}
        at_once = replace(profile, tiers=tiers, copy_bytes_per_s=None)
        if passed.prompts == 1:  # else the time is that of all
            shape = Shape.of(decided.plan, decided.selector, self._adapter.layer_count)
            computing_s = ttft_s(at_once, shape, decided.ratio, loads)
            self._compare(COMPUTE, passed.pass_s - passed.load_s - passed.others_s, computing_s)
        leases = [span.lease for span in spans if span.lease and not span.lease.in_place]
        kinds = {lease.kind.value for lease in leases}
        if len(kinds) == 1 and (tier := kinds.pop()) in profile.tiers:
            # the rest is computed
            share = passed.bytes_by_tier.get(tier, 0) / sum(one.stored_bytes for one in leases)
            loading_s = (
                load_s(profile, [load for load in loads if load.tier == tier]) * profile.layers
            )
            self._compare(tier, passed.read_s, share * loading_s)

    def _compare(self, name: str, took_s: float, expected_s: float) -> None:
        if took_s > 0.0 and expected_s > 0.0:
            forgotten = self._forgotten(name)
            self._seen_at[name] = time.monotonic()
            # The first tier that is seen again counts for all: it is the one that was tried.
            self._outcomes[name].extend([took_s / expected_s] * (OUTCOMES if forgotten else 1))

    def _forgotten(self, name: str) -> bool:
        return name != COMPUTE and time.monotonic() - self._seen_at[name] > FORGET_S

    def in_memory(self, tokens: int, used: bool, room: bool) -> bool:
        """Whether an entry belongs in memory; without a profile every entry does."""
        method = self.methods.of({})
        try:
            profile, _ = self._corrected()
        except RagKVError:
            return True
        like = Shape(0, 0, 0, *Shape.kind(method.selector, self._adapter.layer_count))
        return belongs_in_memory(profile, tokens, like, method.ratio, self.prices, used, room)

    def _corrected(self) -> tuple[Profile, tuple[str, ...]]:
        """The profile with the present speeds of tiers, and a sentence if they differ clearly from
        the profile's.
        """
        factors = {
            name: self._steady.of(name, statistics.median(seen))
            for name, seen in list(self._outcomes.items())
            if len(seen) == OUTCOMES and not self._forgotten(name)
        }
        tiers = {
            kind: speed.times(factors.get(kind, 1.0)) for kind, speed in self.profile.tiers.items()
        }
        checked_s = max((tier.hindered_s_per_byte for tier in tiers.values()), default=0.0)
        # The present speeds of remote tiers include round trips, so a slice adds no latency.
        for kind, speed in self._speeds().items():
            byte_s = 1.0 / self._steady.of(f"{kind} speed", speed)
            tiers[kind] = TierSpeed(0.0, byte_s, hindered_s_per_byte=checked_s)
        changed = [f"{name} {factor:.2g}" for name, factor in factors.items() if factor != 1.0]
        why = (
            (f"corrected: lately times were those of the profile by {', '.join(changed)}",)
            if changed
            else ()
        )
        return self.profile.corrected(factors.get(COMPUTE, 1.0), tiers), why


def _file_system(directory: str | Path | None) -> str:
    """The file system of the entries, by its id and size; "" without a directory."""
    if directory is None:
        return ""
    found = os.statvfs(directory)
    return f"{found.f_fsid:x}-{found.f_blocks * found.f_frsize}"


def _floor_note(count: int, ratio: float, raised: float) -> str:
    return (
        f"floor: {budget(raised, count)} of {count} fused tokens were recomputed; "
        f"ratio {ratio:.3g} would be {budget(ratio, count)} (fusion.floor_tokens)"
    )
