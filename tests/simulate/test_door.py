"""The simulator's door."""

import subprocess
import sys


def test_neither_the_simulator_nor_a_policy_loads_torch() -> None:
    code = "import sys, ragkv.simulate.command, ragkv.store.policies; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
