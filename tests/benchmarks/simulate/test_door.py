"""Importing the simulator."""

import subprocess
import sys


def test_importing_the_simulator_or_a_policy_does_not_load_torch() -> None:
    code = "import sys, benchmarks.simulate.command, ragkv.store.policies; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
