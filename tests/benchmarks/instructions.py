"""How close the CPU kernels come to the limit of the core: instructions per element and per cycle.

The instructions of a call are counted by stepping through it (with Linux's ptrace; no hardware counters are needed), at
two sizes, so that the constant cost of a call cancels. Cycles come from a chain of dependent operations, whose latency
is known, timed beside the call. At best a core retires `WIDTH` instructions per cycle, and two on vectors of 512 bits.

    PYTHONPATH=.:tests python tests/benchmarks/instructions.py [FILE]   # a table, and into a result of compare.py

Without FILE it is the newest one that `make bench` wrote. Stepping takes some minutes.
"""

import argparse
import ctypes
import json
import os
import signal
import time
from pathlib import Path

import numba
import numpy as np

#: Instructions that a core of this kind can retire in a cycle: six since Golden Cove and Zen 5, four or five before.
WIDTH = 6
ROWS, COLUMNS = (128, 256), 512
SIZE, ROUNDS = (1024, 1024), 25
_LIBC = ctypes.CDLL(None, use_errno=True)
_TRACE_ME, _SINGLE_STEP, _CONTINUE = 0, 9, 7


def _ptrace(request, pid, data=0):
    if _LIBC.ptrace(request, pid, None, ctypes.c_void_p(data)) == -1:
        raise OSError(ctypes.get_errno(), "ptrace is not permitted here")


def instructions_of(run):
    """Instructions that a call executes, Python's included, in a process forked for it."""
    pid = os.fork()
    if pid == 0:
        _ptrace(_TRACE_ME, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        run()
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    os.waitpid(pid, 0)
    count = 0
    while True:
        _ptrace(_SINGLE_STEP, pid)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(status):
            raise RuntimeError(f"the process ended while it was stepped through: status {status}")
        if os.WSTOPSIG(status) == signal.SIGSTOP:
            break
        count += 1
    _ptrace(_CONTINUE, pid)
    os.waitpid(pid, 0)
    return count


@numba.njit
def _chain(rounds, x):
    """Six dependent operations of one cycle each in a round."""
    for _ in range(rounds):
        x ^= x << np.uint64(13)
        x ^= x >> np.uint64(7)
        x ^= x << np.uint64(17)
    return x


def cycles_a_second(rounds=1_000_000):
    """The clock of the core at work."""
    start = time.perf_counter()
    _chain(rounds, np.uint64(88172645463325252))
    return 6 * rounds / (time.perf_counter() - start)


def measured(call):
    """(instructions an element, instructions a cycle) of a call: a function of (rows, columns) that returns a call."""
    counts = [instructions_of(call(rows, COLUMNS)) for rows in ROWS]
    per_element = (counts[1] - counts[0]) / ((ROWS[1] - ROWS[0]) * COLUMNS)
    run, clocks, times = call(*SIZE), [], []
    run()
    for _ in range(ROUNDS):
        clocks.append(cycles_a_second(200_000))
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return per_element, per_element * SIZE[0] * SIZE[1] / (min(times) * max(clocks))


def every_operation():
    """Yield each operation and its (instructions an element, instructions a cycle)."""
    from compare import make_inputs

    from cuda_kernels import host
    from peers.subjects import SUBJECTS, TIMED

    host.set_num_threads(1)
    _chain(1, np.uint64(1))
    tensors = {}
    for operation, subjects in TIMED.items():
        subject = SUBJECTS[subjects[0]]

        def call(rows, columns, subject=subject):
            if (rows, columns) not in tensors:
                tensors[rows, columns] = make_inputs(rows, columns)
            arguments = [tensors[rows, columns][name] for name in subject.inputs]
            for _ in range(3):
                subject.call(host, *arguments)
            return lambda: subject.call(host, *arguments)

        yield operation, measured(call)


def main(arguments=None):
    """Print the table; add it to a file of results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, help="a JSON of compare.py; default: the newest one")
    options = parser.parse_args(arguments)
    path = options.file or max((Path(__file__).parent / "results").glob("cpu_*.json"), key=lambda p: p.stat().st_mtime)
    rows = {}
    for operation, (per_element, per_cycle) in every_operation():
        share = f"{per_cycle / WIDTH:6.0%}"
        print(f"{operation:28} {per_element:6.2f} an element {per_cycle:6.2f} a cycle {share}", flush=True)
        rows[operation] = {"per_element": round(per_element, 3), "per_cycle": round(per_cycle, 3)}
    document = json.loads(path.read_text())
    document["instructions"] = {"width": WIDTH, "size": list(SIZE), "operations": rows}
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
