"""Memory and time of the kernels that oneDNN compiles for prompts of many lengths (`ragkv/runtime/memory.py`).

    python -m benchmarks.kernel_caches [--questions 400]

The bundled reader answers questions of random length over random passages without a store, on eight threads in turns.
Each process has other capacities of the two caches: 1,024, as oneDNN and torch have them, and smaller ones.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks import report
from ragkv import Engine, EngineConfig, StoreConfig
from ragkv.runtime import release_memory
from ragkv.runtime.memory import KERNEL_CACHES

CAPACITIES = ((1024, 1024), (128, 128), (1024, 1), (256, 1), (128, 1))  # of the process, of each thread
THREADS = 8
WORDS = ["harbour", "mill", "orchard", "lantern", "glacier", "copper", "sparrow", "thunder", "velvet", "compass"]


def main() -> None:
    """Measure every capacity in a process of its own, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(*_measure(options.questions))
        return
    rows = []
    for capacities in CAPACITIES:
        environment = os.environ | dict(zip(KERNEL_CACHES, map(str, capacities), strict=True))
        command = [sys.executable, "-m", "benchmarks.kernel_caches", "--child", "--questions", str(options.questions)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        before, after, seconds = map(float, done.stdout.split()[-3:])
        rows.append((*map(str, capacities), f"{before:.0f}", f"{after:.0f}", f"{seconds:.1f}"))
    head = ("kernels of the process", "of each thread", "MiB at the first answer", "MiB at the last", "processor s")
    report.table(head, rows)
    print("written:", report.save("kernel-caches", {"head": head, "rows": rows}))


def _measure(questions: int) -> tuple[float, float, float]:
    """Anonymous memory in MiB after the first and the last answer, and the processor seconds between them."""
    torch.set_num_threads(1)
    generator = random.Random(1)

    def text(least: int, most: int) -> str:
        return " ".join(generator.choices(WORDS, k=generator.randint(least, most)))

    with Engine.from_pretrained("reader", EngineConfig(store=StoreConfig(memory_bytes=0))) as engine:
        engine.answer(text(1, 30), [text(3, 20)], max_new_tokens=6)
        before, began = _memory(), time.process_time()
        threads = [ThreadPoolExecutor(1) for _ in range(THREADS)]
        for number in range(questions):
            chunks = [text(3, 20) for _ in range(generator.randint(1, 6))]
            threads[number % THREADS].submit(engine.answer, text(1, 30), chunks, max_new_tokens=6).result()
        return before, _memory(), time.process_time() - began


def _memory() -> float:
    release_memory()
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024


if __name__ == "__main__":
    main()
