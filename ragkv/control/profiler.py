"""Decides when a profile is used. A saved one is used when the engine opens. A new one is measured
on demand or, in an engine without one, once while no request runs.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ragkv.config import EngineConfig
from ragkv.errors import ProfileError, RagKVError
from ragkv.fusion import Fusor
from ragkv.runtime import Closing, begun, openmp
from ragkv.scheduling import IdleTime
from ragkv.store.store import Store

from .controller import Controller
from .decision import belongs_in_memory
from .measuring import Measuring
from .profile import Profile, save
from .profile_in_use import ProfileInUse
from .token_counts import TokenCounts

log = logging.getLogger(__name__)

QUIET_S = 3.0  # without a request, before an engine measures by itself


@dataclass(eq=False)
class Profiler(Closing):
    """Brings a profile into use in one engine: the saved one, or one that it measures."""

    in_use: ProfileInUse
    controller: Controller
    fusor: Fusor
    idle_time: IdleTime
    config: EngineConfig
    history: Store  # of the blocks of conversations: that of chunks, or their own
    _closing: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def use(self, profile: Profile) -> None:
        """Use `profile` from now on: for decisions, for what is kept in memory, and for how much of
        a history is worth keeping. Raises `ProfileError` if it is of another model or machine.
        """
        self.in_use.use(profile)
        target_ms = self.config.store.ttft_target_ms
        if target_ms is not None:
            self.history.limits.retarget(
                profile.xi_blocks(target_ms, self.config.session.block_tokens)
            )
        if self.config.controller.limit_memory:
            self.in_use.store.limits.limit_memory(self._in_memory)

    def measure(
        self, *, quick: bool = False, on_progress: Callable[[int, int], None] | None = None
    ) -> Profile:
        """Measure, and use the profile from now on; half a billion weights take a minute or two on
        a laptop.

        It is saved for later engines like this one. `quick` uses shorter prompts and fewer rounds.
        `on_progress(done, total)` is called after each measurement.
        """
        report = on_progress or (lambda _done, _total: None)
        measuring = Measuring(self.in_use, self.fusor, self.idle_time.scheduler, quick, report)
        profile = measuring.profile()
        self.use(profile)
        save(profile, self.in_use.folder)
        return profile

    def start(self) -> None:
        """Measure in the background while no request runs, unless a profile is in use."""
        if self.in_use.profile is None:
            log.info(
                "The loading controller measures this machine while no request runs. %s",
                self.in_use.refusal,
            )
            later = "the controller goes on without a profile; `ragkv profile` measures one"
            self._thread = begun(self._run, "ragkv-profiler", later)

    def close(self) -> None:
        """Stop measuring; what is under way is dropped."""
        self._closing.set()
        self.idle_time.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _in_memory(self, tokens: int, used: bool, room: bool) -> bool:
        """Whether an entry of so many tokens belongs in memory, if a request `used` it, or if there
        is `room`.
        """
        assert self.in_use.profile is not None
        profile, _ = self.in_use.corrected(self.in_use.profile)
        method = self.controller.methods.of({})
        selector = method.selector
        asked = selector.asked_layers(self.in_use.adapter.layer_count)
        like = TokenCounts(0, 0, 0, selection=selector.selection, asked_layers=asked.stop)
        return belongs_in_memory(profile, tokens, like, method.ratio, used, room)

    def _run(self) -> None:
        try:
            while not self._closing.wait(QUIET_S) and self.idle_time.busy:
                self._wait_idle()
            self._wait_idle()  # which ends it here if the engine was closed meanwhile
            profile = self.measure(quick=True, on_progress=lambda _done, _total: self._wait_idle())
            log.info("The loading controller has measured this machine: %s.", profile.subject.cpu)
        except (RagKVError, OSError) as error:  # also a disk that is full
            if not self._closing.is_set():
                log.warning("The loading controller has no profile: %s", error)
        openmp.release_threads()

    def _wait_idle(self) -> None:
        """Return when no request runs; raises `ProfileError` once this is closed."""
        while self.idle_time.busy and not self._closing.is_set():
            self.idle_time.wait_idle(QUIET_S, self._closing.is_set)
        if self._closing.is_set():
            raise ProfileError("The engine was closed while its profile was measured.")
