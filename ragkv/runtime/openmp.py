"""OpenMP thread pools: how a thread ends the pool that its computing started.

torch on Linux computes with GNU OpenMP. Every thread that computes gets its own pool of worker
threads, which lasts until that thread ends. Between two operations the workers spin for a moment,
so that the next operation finds them awake. But once all pools together have more workers than
there are processors, workers sleep at once, and every operation of every thread waits until they
wake up. On two cores, one idle pool of another thread slows a decode step of half a billion weights
from 52 ms to 66 ms. So only the thread that holds the compute lock keeps a pool, and helper threads
compute without one. A new pool takes about 60 us to start.
"""

import ctypes
from functools import cache
from pathlib import Path

_SOFT = 1  # OpenMP's omp_pause_soft


def release_threads() -> None:
    """End the calling thread's pool, if it has one; its next operation starts a new one. No-op
    without GNU OpenMP.
    """
    if (openmp := _gnu_openmp()) is not None:
        openmp.omp_pause_resource_all(_SOFT)


def use_one_thread() -> None:
    """Compute without a pool on the calling thread from now on: it runs while the model
    computes.
    """
    if (openmp := _gnu_openmp()) is not None:
        import torch  # here, so that importing ragkv.runtime stays light

        # torch sets a thread's number of workers at its first call, so this must come first
        torch.get_num_threads()
        openmp.omp_set_num_threads(1)


def use_threads(count: int) -> None:
    """Compute on so many threads, the calling one included, from now on."""
    import torch

    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


@cache
def _gnu_openmp() -> ctypes.CDLL | None:
    """The OpenMP library of this torch, if it is GNU's: others have one pool for all threads."""
    import torch

    # its dependencies are searched for symbols, too
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        found = ctypes.CDLL(str(path))
    except OSError:
        return None
    is_gnu = hasattr(found, "GOMP_parallel") and not hasattr(found, "__kmpc_fork_call")
    return found if is_gnu and hasattr(found, "omp_pause_resource_all") else None
