"""`--avx2`: a benchmark plays a processor with AVX2 alone, as most laptops and cheap servers have, on one with more.

The switches hold for torch, oneDNN, FBGEMM and MKL (MKL obeys its own on processors by Intel). Libraries read them
once, when they are loaded, so the benchmark starts again with them.
"""

import argparse
import os
import sys

SWITCHES = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
}


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add `--avx2` to a benchmark's options."""
    parser.add_argument("--avx2", action="store_true", help="play a processor with AVX2 alone")


def play(options: argparse.Namespace) -> None:
    """Start the benchmark again with the switches, if they are wanted and not set."""
    if options.avx2 and any(os.environ.get(name) != value for name, value in SWITCHES.items()):
        benchmark = sys.modules["__main__"].__spec__
        assert benchmark is not None, "benchmarks are run by python -m"
        os.execve(sys.executable, [sys.executable, "-m", benchmark.name, *sys.argv[1:]], {**os.environ, **SWITCHES})
