"""Collectives, tensor and sequence parallelism, amax reduction, data parallelism: 2 and 4 gloo processes on CPU.

The checks are in `distributed_worker.py`, which `processes.py` runs.
"""

import functools
from pathlib import Path

import processes
import pytest
import torch

import fuser.ops as te_ops
from fuser import distributed
from tiers import SWEEP

WORKER = Path(__file__).with_name("distributed_worker.py")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """A function from a number of processes to what they report."""
    return functools.cache(lambda size: processes.run(WORKER, size, tmp_path_factory.mktemp(f"{size}_processes")))


@pytest.mark.parametrize("name", processes.checks_in(WORKER))
@pytest.mark.full
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=SWEEP)])
def test_with_processes(reports, size, name):
    processes.assert_no_errors(reports(size), name)


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
