"""When a profile is measured: when someone asks for it, and once by itself, in an engine that has
none, while no request runs.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ragkv.errors import ProfileError, RagKVError
from ragkv.fusion import Fusor
from ragkv.runtime import Closing, openmp
from ragkv.scheduling import BackgroundTurns

from .controller import Controller
from .profile import Profile, save
from .profiling import Measuring

log = logging.getLogger(__name__)

QUIET_S = 3.0  # without a request, before an engine measures by itself


@dataclass(eq=False)
class Profiler(Closing):
    """Measures the profile of one engine: when it is asked to, and once by itself if there
    is none.
    """

    controller: Controller
    fusor: Fusor
    turns: BackgroundTurns
    _closing: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def measure(
        self, *, quick: bool = False, on_progress: Callable[[int, int], None] | None = None
    ) -> Profile:
        """Measure, and use the profile from now on; half a billion weights take a minute or two on
        a laptop.

        It is saved for later engines like this one. `quick` uses shorter prompts and fewer rounds.
        `on_progress(done, total)` is called after each measurement.
        """
        control = self.controller
        report = on_progress or (lambda _done, _total: None)
        profile = Measuring(control, self.fusor, self.turns.scheduler, quick, report).profile()
        control.apply_profile(profile)
        save(profile, control.profile_directory)
        return profile

    def start(self) -> None:
        """Measure in the background while no request runs, unless a valid profile is saved."""
        try:
            _ = self.controller.profile
        except ProfileError as error:
            log.info(
                "The loading controller measures this machine while no request runs. %s", error
            )
            self._thread = threading.Thread(target=self._run, name="ragkv-profiler", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop measuring; what is under way is dropped."""
        self._closing.set()
        self.turns.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing.wait(QUIET_S) and self.turns.busy:
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
        while self.turns.busy and not self._closing.is_set():
            self.turns.wait_idle(QUIET_S, self._closing.is_set)
        if self._closing.is_set():
            raise ProfileError("The engine was closed while its profile was measured.")
