"""The profile in use, and how fast the machine is now.

The times of requests are compared with the profile's estimates. If they clearly differ, they
correct the speeds. For remote tiers the speed of the latest reads counts, not that of the profile.
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

from ragkv.errors import ProfileError
from ragkv.model import Adapter
from ragkv.runtime import cache_folder, cpu_model, is_missing
from ragkv.store.entry import Identity
from ragkv.store.store import Store

from .decision import Steady
from .profile import FILE_NAME, NO_PROFILE, Profile, Subject, TierSpeed, load
from .reasons import Reason

OUTCOMES = 8  # requests whose median corrects a speed
# After so long without a read a tier has the profile's speed again. Otherwise a tier that was slow
# once would never be read again.
FORGET_S = 600.0
COMPUTE = "compute"  # the key of computing among the outcomes of tiers


@dataclass(eq=False)
class ProfileInUse:
    """The profile of one model on this machine, with the present speeds."""

    adapter: Adapter
    identity: Identity  # of the entries of chunks
    store: Store  # of chunks
    directory: str | None  # the store's
    profile: Profile | None = field(default=None, init=False)  # the one in use
    refusal: str = field(default="", init=False)  # why there is none
    # by tier or COMPUTE: the time of the latest requests, divided by the profile's estimate
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
            rope=identity.rope_parameters,
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
    def folder(self) -> Path:
        """Where the profile is saved: next to the store, or in the user's cache folder."""
        return cache_folder("profiles") if self.directory is None else Path(self.directory)

    @property
    def file(self) -> Path:
        """The file in that folder."""
        return self.folder / FILE_NAME

    def saved(self) -> Profile | None:
        """The profile saved for this model and machine; without one, `refusal` says why."""
        self.refusal = NO_PROFILE.format(self.folder)
        if is_missing(self.file):
            return None
        try:
            return load(self.folder, self.subject)
        except ProfileError as error:
            self.refusal = str(error)
            return None

    def use(self, profile: Profile) -> None:
        """Use `profile` from now on. Raises `ProfileError` if it is of another model or machine."""
        profile.check(self.subject)
        self.profile = profile
        # what requests took was compared with another profile
        self._outcomes.clear()
        self._seen_at.clear()
        self._steady = Steady()

    def note_outcome(self, name: str, took_s: float, expected_s: float) -> None:
        """Note what a request took of tier or `COMPUTE`, and what the profile had estimated."""
        if took_s > 0.0 and expected_s > 0.0:
            forgotten = self._forgotten(name)
            self._seen_at[name] = time.monotonic()
            # The first tier that is seen again counts for all: it is the one that was tried.
            self._outcomes[name].extend([took_s / expected_s] * (OUTCOMES if forgotten else 1))

    def _forgotten(self, name: str) -> bool:
        return name != COMPUTE and time.monotonic() - self._seen_at[name] > FORGET_S

    def corrected(self, profile: Profile) -> tuple[Profile, tuple[str, ...]]:
        """`profile`, the one in use, with the present speeds of tiers, and a sentence if they
        differ clearly from the profile's.
        """
        factors = {
            name: self._steady.of(name, statistics.median(seen))
            for name, seen in list(self._outcomes.items())
            if len(seen) == OUTCOMES and not self._forgotten(name)
        }
        tiers = {kind: speed.times(factors.get(kind, 1.0)) for kind, speed in profile.tiers.items()}
        checked_s = max((tier.hindered_s_per_byte for tier in tiers.values()), default=0.0)
        # The present speeds of remote tiers include round trips, so a slice adds no latency.
        for kind, speed in self.store.speeds().items():
            byte_s = 1.0 / self._steady.of(f"{kind} speed", speed)
            tiers[kind] = TierSpeed(0.0, byte_s, hindered_s_per_byte=checked_s)
        changed = [f"{name} {factor:.2g}" for name, factor in factors.items() if factor != 1.0]
        reasons = (Reason.CORRECTED.format(factors=", ".join(changed)),) if changed else ()
        return profile.corrected(factors.get(COMPUTE, 1.0), tiers), reasons


def _file_system(directory: str | Path | None) -> str:
    """The file system of the entries, by its id and size; "" without a directory."""
    if directory is None:
        return ""
    found = os.statvfs(directory)
    return f"{found.f_fsid:x}-{found.f_blocks * found.f_frsize}"
