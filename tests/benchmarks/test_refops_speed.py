"""Speed of the reference at 4096 x 4096 bfloat16, one thread, beside ml_dtypes' cast and a copy (`make bench`).

The reference must stay quick enough to judge real tensors. Its time is asserted as a multiple of that cast's, the best
round of each: the machine's clock and its other work change both alike.
"""

import timeit

import ml_dtypes
import numpy as np
import pytest

import refops

N, ROUNDS = 4096, 5
MXFP8 = refops.MXFP8Scaling(refops.E4M3)


@pytest.fixture(scope="module")
def x():
    """(4096, 8192): all of it for gated activations, the left half (not contiguous) is not used elsewhere."""
    return np.random.default_rng(0).standard_normal((N, 2 * N), np.float32).astype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def square(x):
    """(4096, 4096), contiguous."""
    return np.ascontiguousarray(x[:, :N])


def cast(square):
    """ml_dtypes' cast to E4M3, of each element by itself and without a scale."""
    return square.astype(ml_dtypes.float8_e4m3fn)


@pytest.fixture(scope="module")
def cast_seconds(square):
    """The best time of `cast`."""
    return min(timeit.repeat(lambda: cast(square), number=1, repeat=ROUNDS))


#: name -> (operation on (x, square), times the cast's time that it may take, half above what was measured, or None).
OPERATIONS = {
    "copy of the bytes": (lambda x, square: square.copy(), None),
    "ml_dtypes cast to E4M3, no scale": (lambda x, square: cast(square), None),
    "MXFP8 rowwise": (lambda x, square: refops.quantize(square, MXFP8), 1.3),
    "MXFP8 both directions": (lambda x, square: refops.quantize(square, MXFP8, columnwise=True), 2.3),
    "NVFP4 1x16": (lambda x, square: refops.quantize(square, refops.NVFP4Scaling()), 1.7),
    "NVFP4 1x16 both, RHT": (
        lambda x, square: refops.quantize(square, refops.NVFP4Scaling(rht=True), columnwise=True),
        11,
    ),
    "FP8 current": (lambda x, square: refops.quantize(square, refops.CurrentScaling(refops.E4M3)), 1.1),
    "FP8 block 1x128": (lambda x, square: refops.quantize(square, refops.BlockScaling(refops.E4M3, 1)), 1.1),
    "gelu": (lambda x, square: refops.activation("gelu", square), 7),
    "swiglu -> MXFP8": (lambda x, square: refops.activation_quantize("swiglu", x, MXFP8), 5.2),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_speed(benchmark, cast_seconds, x, square, allowance, name):
    operation, bound = OPERATIONS[name]
    benchmark.group = "4096 x 4096 bfloat16"
    benchmark.name = name
    benchmark.pedantic(operation, (x, square), rounds=ROUNDS, warmup_rounds=1)
    if bound is not None:
        assert benchmark.stats.stats.min <= bound * allowance * cast_seconds
