"""Speed of `cuda_kernels.host` at 4096 x 4096 bfloat16 beside `refops`, in the same run and with the same bits.

Asserted: the ratio to `refops`, with room for noise. Beside it, in `extra_info`, a copy of the input's bytes.
"""

import time

import ml_dtypes
import numpy as np
import pytest

import refops
from cuda_kernels import host

N = 4096
MXFP8, NVFP4 = refops.MXFP8Scaling(refops.E4M3), refops.NVFP4Scaling()
#: name -> (operation of a module on (x, square), least ratio to refops).
OPERATIONS = {
    "swiglu -> MXFP8": (lambda m, x, square: m.activation_quantize("swiglu", x, MXFP8), 4),
    "MXFP8 both directions": (lambda m, x, square: m.quantize(square, MXFP8, columnwise=True), 3),
    "MXFP8 rowwise": (lambda m, x, square: m.quantize(square, MXFP8), 3),
    "NVFP4 1x16": (lambda m, x, square: m.quantize(square, NVFP4), 3),
}


@pytest.fixture(scope="module")
def tensors():
    """(4096, 8192) for gated activations, and its left half, contiguous."""
    x = np.random.default_rng(0).standard_normal((N, 2 * N), np.float32).astype(ml_dtypes.bfloat16)
    return x, np.ascontiguousarray(x[:, :N])


def seconds(operation):
    start = time.perf_counter()
    operation()
    return time.perf_counter() - start


@pytest.mark.parametrize("name", OPERATIONS)
def test_speed(benchmark, tensors, name):
    operation, bound = OPERATIONS[name]
    mine, reference = operation(host, *tensors), operation(refops, *tensors)
    np.testing.assert_array_equal(mine.rowwise_scale_inv, reference.rowwise_scale_inv)
    if "swiglu" not in name:
        np.testing.assert_array_equal(mine.rowwise_data, reference.rowwise_data)
    benchmark.group, benchmark.name = "4096 x 4096 bfloat16, host", name
    benchmark.pedantic(operation, (host, *tensors), rounds=9)
    slow = min(seconds(lambda: operation(refops, *tensors)) for _ in range(3))
    benchmark.extra_info["ratio to refops"] = slow / benchmark.stats.stats.min
    benchmark.extra_info["copy, seconds"] = min(seconds(tensors[1].copy) for _ in range(5))
    assert slow / benchmark.stats.stats.min >= bound
