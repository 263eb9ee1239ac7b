"""Runs ragkv and vLLM in a process of their own: vLLM keeps global state and emits warnings.

`run("tokens", family)` runs the function `tokens` of `scenarios.py` in a new process and returns
what it returned.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT),
}

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)


def run(scenario: str, *arguments: str, module: str = "scenarios") -> Any:
    """What the scenario of `module` returned. Fails the test if its process fails."""
    command = [sys.executable, "-m", f"tests.vllm.{module}", scenario, *arguments]
    ran = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
    assert ran.returncode == 0 and lines, ran.stdout[-4000:] + ran.stderr[-14_000:]
    return json.loads(lines[-1].removeprefix("RESULT "))
