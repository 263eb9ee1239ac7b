"""OpenMP teams: what a thread that computed leaves behind, and how it gives that back.

torch on Linux computes with GNU OpenMP, which gives every thread that computes workers of its own and keeps them until
the thread ends. Between two operations workers spin a moment, so that the next one finds them awake; but once all
threads' workers together are more than the processors they sleep at once, and every operation of every thread waits for
them to wake. On two cores, one idle team of another thread makes a decode step of half a billion weights take 66 ms for
52. So only who has the model keeps a team, and threads that only help compute alone. A new team takes some 60 us.
"""

import ctypes
from functools import cache
from pathlib import Path

_SOFT = 1  # omp_pause_soft


def release_threads() -> None:
    """End the calling thread's workers, if it has any; its next operation makes new ones. Nothing to do elsewhere."""
    if (openmp := _gnu_openmp()) is not None:
        openmp.omp_pause_resource_all(_SOFT)


def use_one_thread() -> None:
    """Let the calling thread have no workers from now on: what it does runs beside the model."""
    import torch

    if (openmp := _gnu_openmp()) is not None:
        torch.get_num_threads()  # a thread's first question sets its number to the process's
        openmp.omp_set_num_threads(1)


@cache
def _gnu_openmp() -> ctypes.CDLL | None:
    """The library by which this torch computes, if it is GNU's: others have one pool of workers for all threads."""
    import torch  # here, so that packages without tensors can import `ragkv.runtime` without torch

    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"  # a symbol is looked for in what it needs, too
    try:
        found = ctypes.CDLL(str(path))
    except OSError:
        return None
    is_gnu = hasattr(found, "GOMP_parallel") and not hasattr(found, "__kmpc_fork_call")
    return found if is_gnu and hasattr(found, "omp_pause_resource_all") else None


__all__ = ["release_threads", "use_one_thread"]
