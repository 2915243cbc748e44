"""Share a range of work among the CPU's cores.

A pool of threads that lives as long as the process, shared by all callers; the calling thread takes part. Work is cut
into equal ranges, so which thread does what never shows in a result. Compiled loops run without the GIL.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from refops.arguments import require_integer
from refops.tiles import for_each

_lock = Lock()
_pool = None
_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def get_num_threads():
    """Return how many threads share the work of a call; at first the CPUs that the process may use."""
    return _threads


def set_num_threads(n):
    """Share the work of later calls among `n` threads; results do not depend on it. ValueError unless n >= 1."""
    global _threads
    _threads = require_integer(n, "n", low=1, high=1 << 16)
    _forget_pool()


def _forget_pool():
    """Start anew with the next call: another number of threads, or a forked process, which has no threads."""
    global _pool, _lock
    _lock, _pool = Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def _shared_pool():
    global _pool
    with _lock:
        pool = _pool
        if pool is None:
            pool = _pool = ThreadPoolExecutor(_threads, thread_name_prefix="cuda_kernels")
        return pool


def require_subnormals():
    """Raise RuntimeError if this thread flushes float32 subnormals to zero: the check that refops makes."""
    for_each([], None)


def _submitted(futures, work, cut):
    """Hand a range to the pool; False where it takes no more: the interpreter is ending, or no thread can start."""
    try:
        futures.append(_shared_pool().submit(work, *cut))
    except RuntimeError:
        return False
    return True


def share(work, count, *, inline=False):
    """Call `work(first, last)` so that the ranges cover range(count), on several threads unless `inline`.

    Raises the first exception that `work` raises, after all ranges have ended.
    """

    def checked(first, last):
        require_subnormals()
        work(first, last)

    parts = 1 if inline else min(_threads, count)
    if parts <= 1:
        checked(0, count)
        return
    cuts = [count * i // parts for i in range(parts + 1)]
    futures = []
    try:
        for i in range(1, parts):
            if not _submitted(futures, checked, cuts[i : i + 2]):
                checked(*cuts[i : i + 2])
        checked(*cuts[:2])
    finally:
        errors = [future.exception() for future in futures]
    for error in filter(None, errors):
        raise error
