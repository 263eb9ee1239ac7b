"""The profile in use, and how fast the machine is now.

The profile is read when the engine opens. What requests took is compared with the profile's
estimate, and corrects the speeds once it is clearly another. Of remote tiers the speed of the
latest reads counts, and not the speed when the profile was made.
"""

import os
import platform
import statistics
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import torch

from ragkv.config import EngineConfig
from ragkv.errors import ProfileError
from ragkv.model import Adapter
from ragkv.runtime import cache_folder, cpu_model, is_missing
from ragkv.store import Identity, Store

from .decision import Steady
from .profile import FILE_NAME, NO_PROFILE, Profile, Subject, TierSpeed, load

OUTCOMES = 8  # requests whose median corrects a speed
# After so long without a read a tier has the profile's speed again. Otherwise a tier that was slow
# once would never be read again.
FORGET_S = 600.0
COMPUTE = "compute"  # the key of computing among the outcomes of tiers


@dataclass(eq=False)
class PresentProfile:
    """The profile of one model on this machine, with the present speeds."""

    adapter: Adapter
    identity: Identity  # of the entries of chunks
    config: EngineConfig
    store: Store  # of chunks
    history: Store  # of the blocks of conversations: the same one, or their own
    _profile: Profile | None = field(default=None, init=False)
    _refusal: str = field(default="", init=False)  # why there is none
    # by tier or COMPUTE: what the latest requests took, over the profile's estimate
    _outcomes: defaultdict[str, deque[float]] = field(
        default_factory=lambda: defaultdict(partial(deque, maxlen=OUTCOMES)), init=False
    )
    _seen_at: defaultdict[str, float] = field(
        default_factory=lambda: defaultdict(time.monotonic), init=False
    )
    _steady: Steady = field(default_factory=Steady, init=False)

    @cached_property
    def subject(self) -> Subject:
        """The model and machine that a profile is saved for."""
        adapter = self.adapter
        identity = self.identity
        device = adapter.device
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

    def read_profile(self) -> None:
        """Use the saved profile, or note why it is not used.

        Read once, when the engine opens: no other process measures this store while it is open.
        """
        self._refusal = NO_PROFILE.format(self.profile_directory)
        if is_missing(self.profile_file):
            return
        try:
            self.apply_profile(load(self.profile_directory, self.subject))
        except ProfileError as error:
            self._refusal = str(error)

    def in_memory(self, tokens: int, used: bool, room: bool) -> bool:
        """Whether an entry of so many tokens belongs in memory, if a request `used` it, or if there
        is `room`.
        """
        raise NotImplementedError

    @property
    def directory(self) -> str | None:
        """The store's."""
        return self.config.store.directory

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
        # what requests took was compared with another profile
        self._outcomes.clear()
        self._seen_at.clear()
        self._steady = Steady()
        target_ms = self.config.store.ttft_target_ms
        if target_ms is not None:
            self.history.retarget(profile.xi_blocks(target_ms, self.config.session.block_tokens))
        if self.config.controller.place:
            self.store.place_by(self.in_memory)

    def _compare(self, name: str, took_s: float, expected_s: float) -> None:
        if took_s > 0.0 and expected_s > 0.0:
            forgotten = self._forgotten(name)
            self._seen_at[name] = time.monotonic()
            # The first tier that is seen again counts for all: it is the one that was tried.
            self._outcomes[name].extend([took_s / expected_s] * (OUTCOMES if forgotten else 1))

    def _forgotten(self, name: str) -> bool:
        return name != COMPUTE and time.monotonic() - self._seen_at[name] > FORGET_S

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
        for kind, speed in self.store.speeds().items():
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
