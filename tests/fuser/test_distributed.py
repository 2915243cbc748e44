"""Collectives, tensor and sequence parallelism, amax reduction, data parallelism: 2 and 4 gloo processes on CPU.

The checks are in `distributed_worker.py`. Starting processes takes longest, so each number of processes starts once,
runs every check and reports; each check is a test here.
"""

import ast
import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fuser.ops as te_ops
from fuser import distributed

WORKER = Path(__file__).with_name("distributed_worker.py")
REPOSITORY = WORKER.parents[2]
TIME_LIMIT = 120

CHECKS = [
    node.name
    for node in ast.parse(WORKER.read_text()).body
    if isinstance(node, ast.FunctionDef) and any(getattr(d, "id", "") == "check" for d in node.decorator_list)
]


@pytest.fixture(scope="module")
def run_workers(tmp_path_factory):
    """A function from a number of processes to what each of them reports: `[{check: {"error": ..., ...}}]`."""

    @functools.cache
    def run(size):
        folder = tmp_path_factory.mktemp(f"{size}_processes")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(WORKER.parent)])}
        environment.update(OMP_NUM_THREADS="1", NUMBA_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    str(WORKER),
                    str(rank),
                    str(size),
                    str(folder / "rendezvous"),
                    str(folder / f"{rank}"),
                ],
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
                pytest.fail(f"process {rank} of {size} ended without a report:\n{error}")
        return [json.loads((folder / f"{rank}").read_text()) for rank in range(size)]

    return run


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("size", [2, 4])
def test_with_processes(run_workers, size, name):
    reports = run_workers(size)
    problems = [
        f"process {rank}: {report[name]['error'] if name in report else 'not run, an earlier check failed'}"
        for rank, report in enumerate(reports)
        if name not in report or report[name]["error"]
    ]
    assert not problems, "\n".join(problems)


# --- without processes ------------------------------------------------------------------------------


def test_one_process_without_a_group():
    x = torch.ones(3, 2, requires_grad=True)
    assert not distributed.is_initialized()
    assert distributed.get_distributed_world_size() == 1
    assert distributed.get_distributed_rank() == 0
    for function in (distributed.gather_along_first_dim, distributed.reduce_scatter_along_first_dim):
        same = function(x)
        assert same.data_ptr() == x.data_ptr()
        assert not same.requires_grad
    assert distributed.all_reduce(x) is x
    assert distributed.reduce_amax(x) is x
    assert te_ops.AllReduce()(x.detach()).data_ptr() == x.data_ptr()


@pytest.mark.parametrize("op_class", [te_ops.AllGather, te_ops.ReduceScatter])
def test_gathering_ops_need_a_process_group(op_class):
    with pytest.raises(ValueError, match="process group"):
        op_class()
