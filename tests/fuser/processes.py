"""Checks that several gloo processes run together, as tests: the side that starts them, and theirs.

A worker is a script of functions of (rank, size) decorated with `check`, which ends in `main()`. Starting processes
takes longest, so they start once, run every check in order and report. After a failure the rest is not run: a process
that left a check early would answer its peers' next collectives wrongly.
"""

import ast
import datetime
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TIME_LIMIT = 120

CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def checks_in(worker):
    """The names of the checks of a script, which is not imported."""
    functions = (node for node in ast.parse(worker.read_text()).body if isinstance(node, ast.FunctionDef))
    return [f.name for f in functions if any(getattr(d, "id", "") == "check" for d in f.decorator_list)]


def run(worker, size, folder):
    """Start `size` processes of a script; what each of them reports: `[{check: {"error": ..., ...}}]`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(worker.parent)])}
    environment.update(OMP_NUM_THREADS="1", NUMBA_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(size), str(folder / "rendezvous"), str(folder / f"{rank}")],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    deadline = time.monotonic() + TIME_LIMIT
    try:
        errors = [process.communicate(timeout=max(1, deadline - time.monotonic()))[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, error in enumerate(errors):
        if not (folder / f"{rank}").exists():
            raise AssertionError(f"process {rank} of {size} ended without a report:\n{error}")
    return [json.loads((folder / f"{rank}").read_text()) for rank in range(size)]


def assert_no_errors(reports, name):
    """Fail with what each process says of a check."""
    problems = [
        f"process {rank}: {report[name]['error'] if name in report else 'not run, an earlier check failed'}"
        for rank, report in enumerate(reports)
        if name not in report or report[name]["error"]
    ]
    assert not problems, f"{name}\n" + "\n".join(problems)


def main():
    """A process: `python WORKER RANK WORLD_SIZE RENDEZVOUS_FILE RESULT_FILE` runs the checks and writes its report."""
    import torch
    import torch.distributed as dist

    from fuser.quantization.state import FP8GlobalStateManager

    rank, size = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{sys.argv[3]}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=30),
    )
    results = {}
    for name, function in CHECKS.items():
        start = time.perf_counter()
        FP8GlobalStateManager.reset()
        try:
            function(rank, size)
            results[name] = {"error": None, "seconds": time.perf_counter() - start}
        except Exception:
            results[name] = {"error": traceback.format_exc(), "seconds": time.perf_counter() - start}
            break
    with open(sys.argv[4], "w") as file:
        json.dump(results, file)
    if all(result["error"] is None for result in results.values()):
        dist.destroy_process_group()
