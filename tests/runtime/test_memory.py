"""Freed memory, and what keeps a process from growing."""

import os
import subprocess
import sys

import pytest

from ragkv.runtime.memory import KERNEL_CACHES, limit_kernel_caches

SCRIPT = """
import gc
from ragkv.runtime import freeze_objects

class Node: pass

gc.disable()
old = Node()
freeze_objects()
assert old not in [one for one in gc.get_objects() if isinstance(one, Node)]
new = Node()
new.itself = new
del new
assert gc.collect() >= 1
print(gc.get_freeze_count() > 1000)
"""


def test_frozen_objects_are_left_out_of_collections_and_later_cycles_are_still_collected() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"


LOADING = """
import gc
from ragkv.runtime import loading_objects

class Node: pass

gc.set_threshold(10)
before = [one["collections"] for one in gc.get_stats()]
with loading_objects():
    made = [Node() for _ in range(1000)]
    assert [one["collections"] for one in gc.get_stats()] == before
assert made[0] not in [one for one in gc.get_objects() if isinstance(one, Node)]
try:
    with loading_objects():
        raise ValueError
except ValueError:
    print(gc.isenabled())
"""


def test_nothing_is_collected_while_objects_are_loaded_and_collections_go_on_after_an_error() -> (
    None
):
    done = subprocess.run(
        [sys.executable, "-c", LOADING], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"


ROWS = """
import ctypes, threading, torch
from ragkv.runtime import limit_kernel_caches

limit_kernel_caches()
torch.set_num_threads(1)
weights = torch.ones((512, 160), dtype=torch.bfloat16)

def memory():
    ctypes.CDLL(None).malloc_trim(0)
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) // 1024

def multiply(lengths, done):
    with torch.no_grad():
        for rows in lengths:
            torch.nn.functional.linear(torch.ones((rows, 160), dtype=torch.bfloat16), weights)
    done.set()
    threading.Event().wait()  # a thread keeps its kernels until it ends

def multiply_in_threads(threads, *lengths):
    for _ in range(threads):
        done = threading.Event()
        threading.Thread(target=multiply, args=(range(*lengths), done), daemon=True).start()
        done.wait()

multiply_in_threads(1, 1, 150)
before = memory()
multiply_in_threads(6, 150, 350)
print(memory() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_products_of_many_shapes_in_many_threads_do_not_let_the_process_grow() -> None:
    """With the caches as they are by default, it is more than 100 MiB where bfloat16 is fast."""
    done = subprocess.run([sys.executable, "-c", ROWS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 60


def test_capacities_that_the_environment_has_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = KERNEL_CACHES
    monkeypatch.setenv(first, "7")
    monkeypatch.setenv(second, "1")  # so that its value is as before afterwards
    del os.environ[second]
    limit_kernel_caches()
    assert (os.environ[first], os.environ[second]) == ("7", str(KERNEL_CACHES[second]))
