"""Share a range of work among the CPU's cores.

Threads that live as long as the process, shared by all callers; the calling thread takes part. Work is cut into more
ranges than there are threads, and whoever is free takes the next: to wake a thread takes as long as a small tensor
does, so the caller begins at once and a thread that comes too late has nothing to do. No range depends on another, so
neither how many there are nor which thread does what shows in a result. Compiled loops run without the GIL.

Work and its outcomes travel through `SimpleQueue`, threads are started by `_thread`, ranges come from an iterator of a
list: all of it C code, which a KeyboardInterrupt finds done or not begun. `ThreadPoolExecutor`, `Future` and
`Thread.start` hold locks of Python code that an interrupt can leave locked for ever.
"""

import _thread
import atexit
import os
from itertools import pairwise
from queue import SimpleQueue

from refops.arguments import require_integer
from refops.tiles import require_subnormals

_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
#: Ranges that there are for each thread.
RANGES = 4


class _Workers:
    """Threads that take (ticket, work, ranges, outcomes) from `tasks`, and how many there are."""

    def __init__(self):
        self.tasks, self.started, self.ended = SimpleQueue(), [], False

    def start(self, wanted):
        """Have at least `wanted` threads; False where none can start, or the interpreter is ending."""
        try:
            while len(self.started) < wanted and not self.ended:
                self.started.append(_thread.start_new_thread(_serve, (self.tasks,)))
        except RuntimeError:
            return False
        return not self.ended

    def end(self):
        """Give no more work to threads: they stop when the interpreter does."""
        self.ended = True


def _serve(tasks):
    while True:
        ticket, work, ranges, outcomes = tasks.get()
        if ticket.acquire(False):  # else the caller has done everything by now
            try:
                require_subnormals()
                outcome = _take(work, ranges)
            except BaseException as error:
                outcome = error
            outcomes.put(outcome)
            del outcome
        del ticket, work, ranges, outcomes  # a caller's arrays are not kept until the next task


def _take(work, ranges):
    """Do ranges until none is left; return the first exception, which ends its own range alone."""
    found = None
    for first, last in ranges:
        try:
            work(first, last)
        except BaseException as error:
            found = found or error
    return found


_workers: _Workers


def _new_workers():
    """Start anew: at first, and in a forked process, which has no threads."""
    global _workers
    _workers = _Workers()


_new_workers()
atexit.register(lambda: _workers.end())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_workers)


def get_num_threads() -> int:
    """Return how many threads share the work of a call; at first the CPUs that the process may use."""
    return _threads


def set_num_threads(n: int) -> None:
    """Share the work of later calls among `n` threads; results do not depend on it. ValueError unless n >= 1."""
    global _threads
    _threads = require_integer(n, "n", low=1, high=1 << 16)


def share(work, count, *, inline=False):
    """Call `work(first, last)` so that the ranges cover range(count), on several threads unless `inline`.

    Raises the first exception that `work` raises, after all ranges have ended.
    """
    require_subnormals()  # threads that are started now inherit the caller's mode
    parts = 1 if inline else min(_threads, count)
    if parts <= 1 or not _workers.start(parts - 1):
        work(0, count)
        return
    pieces = min(count, RANGES * parts)
    cuts = [count * i // pieces for i in range(pieces + 1)]
    ranges, outcomes, tickets, errors = iter(list(pairwise(cuts))), SimpleQueue(), [], []
    try:
        for _ in range(1, parts):
            ticket = _thread.allocate_lock()
            tickets.append(ticket)
            _workers.tasks.put((ticket, work, ranges, outcomes))
        errors.append(_take(work, ranges))
    finally:
        errors.extend(outcomes.get() for ticket in tickets if not ticket.acquire(False))
    for error in filter(None, errors):
        raise error
