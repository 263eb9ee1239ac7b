"""`ragkv ingest --watch` ends at a signal even if the exception that the signal raises is lost."""

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ragkv.cli.ingest import ended_by_signal, follow


class SignalledWhenDeleted:
    """Python reports and drops an exception that a signal raises in a finalizer."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


class FakeRuns:
    """Runs that find nothing; the first one after a change gets a signal in a finalizer."""

    def __init__(self, folder: Path) -> None:
        self.paths = [folder]
        self.repeated = 0

    def first(self, _: bool) -> Any:
        threading.Thread(target=self._change, daemon=True).start()
        return SimpleNamespace(files=())

    def _change(self) -> None:
        """Change a file until it is noticed: on a busy machine the watching begins late."""
        for number in range(150):
            time.sleep(0.3)
            if self.repeated:
                return
            (self.paths[0] / "new.txt").write_text(f"Mill {number} is new.")

    def again(self) -> Any:
        self.repeated += 1
        SignalledWhenDeleted()
        return SimpleNamespace(files=())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.timeout(60)
def test_a_signal_during_a_finalizer_ends_thefollowing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("watchfiles", reason="needs watchfiles (extra watch)")
    folder = tmp_path / "docs"
    folder.mkdir()
    runs: Any = FakeRuns(folder)
    before = signal.getsignal(signal.SIGINT)  # ignored, where a shell started the tests in the background
    with ended_by_signal() as ended:
        follow(runs, tmp_path / "home", False, ended)
    assert runs.repeated == 1
    assert "no longer following changes" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before
