"""Speed of the reference at 4096 x 4096 bfloat16, one thread, beside ml_dtypes' cast and a copy (`make bench`).

The bounds are the project's own: the reference must stay quick enough to judge real tensors. They are asserted.
"""

import ml_dtypes
import numpy as np
import pytest

import refops

N = 4096
MXFP8 = refops.MXFP8Scaling(refops.E4M3)


@pytest.fixture(scope="module")
def x():
    """(4096, 8192): all of it for gated activations, the left half (not contiguous) is not used elsewhere."""
    return np.random.default_rng(0).standard_normal((N, 2 * N), np.float32).astype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def square(x):
    """(4096, 4096), contiguous."""
    return np.ascontiguousarray(x[:, :N])


#: name -> (operation on (x, square), bound in seconds or None).
OPERATIONS = {
    "copy of the bytes": (lambda x, square: square.copy(), None),
    "ml_dtypes cast to E4M3, no scale": (lambda x, square: square.astype(ml_dtypes.float8_e4m3fn), None),
    "MXFP8 rowwise": (lambda x, square: refops.quantize(square, MXFP8), None),
    "MXFP8 both directions": (lambda x, square: refops.quantize(square, MXFP8, columnwise=True), 0.5),
    "NVFP4 1x16": (lambda x, square: refops.quantize(square, refops.NVFP4Scaling()), 0.5),
    "NVFP4 1x16 both, RHT": (
        lambda x, square: refops.quantize(square, refops.NVFP4Scaling(rht=True), columnwise=True),
        None,
    ),
    "FP8 current": (lambda x, square: refops.quantize(square, refops.CurrentScaling(refops.E4M3)), None),
    "FP8 block 1x128": (lambda x, square: refops.quantize(square, refops.BlockScaling(refops.E4M3, 1)), None),
    "gelu": (lambda x, square: refops.activation("gelu", square), None),
    "swiglu -> MXFP8": (lambda x, square: refops.activation_quantize("swiglu", x, MXFP8), 0.4),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_speed(benchmark, x, square, name):
    operation, bound = OPERATIONS[name]
    benchmark.group = "4096 x 4096 bfloat16"
    benchmark.name = name
    benchmark.pedantic(operation, (x, square), rounds=5, warmup_rounds=1)
    if bound is not None:
        assert benchmark.stats.stats.median <= bound
