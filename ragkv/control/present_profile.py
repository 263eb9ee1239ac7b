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
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

import torch

from ragkv.errors import ProfileError
from ragkv.model import Adapter
from ragkv.runtime import cache_folder, cpu_model
from ragkv.store import Identity

from .decision import Steady
from .profile import FILE_NAME, Profile, Subject, TierSpeed, load

OUTCOMES = 8  # requests whose median corrects a speed
# After so long without a read a tier has the profile's speed again. Otherwise a tier that was slow
# once would never be read again.
FORGET_S = 600.0
COMPUTE = "compute"  # the key of computing among the outcomes of tiers


class PresentProfile:
    """The profile of one model on this machine, with the present speeds."""

    def __init__(
        self,
        adapter: Adapter,
        identity: Identity,
        directory: str | Path | None,
        speeds: Callable[[], Mapping[str, float]],
        on_profile: Callable[[Profile], object],
    ) -> None:
        """Use the profile of this model, and of entries of `identity`, that is saved in
        `directory`, if there is one.

        `speeds` has those of remote tiers; `on_profile` is called with every profile that is used
        from then on.
        """
        self._adapter = adapter
        self.identity = identity
        self.directory = directory
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
