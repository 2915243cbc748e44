"""Speed of the oracle on a 2048 x 2048 swiglu -> MXFP8 dump, right and wrong (`make bench`).

Its time is asserted as a multiple of the time in which `refops` computes the tensor: both follow the machine's clock.
"""

import timeit

import ml_dtypes
import numpy as np
import pytest

import refops
from refops import oracle

MXFP8 = refops.MXFP8Scaling(refops.E4M3)
N = 2048


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(0).standard_normal((N, 2 * N), np.float32).astype(ml_dtypes.bfloat16)


def right(x):
    return refops.activation_quantize("swiglu", x, MXFP8)


def a_code_of_each_tile(x):
    """No 128 x 128 tile equals the reference: intervals are computed everywhere."""
    q = right(x)
    data = q.rowwise_data.copy()
    data[::128, ::128] ^= 1
    return {"rowwise_data": data, "rowwise_scale_inv": q.rowwise_scale_inv}


def wrong_scales(x):
    return refops.activation_quantize("swiglu", x, refops.MXFP8Scaling(refops.E4M3, scale_rounding="floor"))


def two_faults(x):
    halves = np.concatenate([x[:, N:], x[:, :N]], axis=1)
    return refops.activation_quantize("swiglu", halves, refops.MXFP8Scaling(refops.E4M3, scale_rounding="floor"))


def garbage(x):
    rng = np.random.default_rng(1)
    return {
        "rowwise_data": rng.integers(0, 256, (N, N), np.uint8),
        "rowwise_scale_inv": rng.integers(100, 140, (N, N // 32), np.uint8),
    }


#: name -> (dump, whether it is right, first diagnosis, times the seconds of `right` that it may take: half above what
#: was measured).
DUMPS = {
    "right": (right, True, (), 2),
    "wrong: OCP floor rule": (wrong_scales, False, ("scale-floor",), 16),
    "wrong: floor rule and gate order": (two_faults, False, ("gate-order", "scale-floor"), 20),
    "wrong: one code of each tile": (a_code_of_each_tile, False, (), 16),
    "wrong: garbage": (garbage, False, (), 18),
}


@pytest.fixture(scope="module")
def reference_seconds(x):
    """The best time in which `refops` computes as much from float32 numbers, whose exp is read from no table."""
    numbers = x.astype(np.float32) * np.float32(1.1)
    return min(timeit.repeat(lambda: right(numbers), number=1, repeat=3))


@pytest.mark.parametrize("name", DUMPS)
def test_speed(benchmark, x, reference_seconds, allowance, name):
    make, ok, names, bound = DUMPS[name]
    dump = make(x)
    benchmark.group = f"oracle, swiglu -> MXFP8, {N} x {N} bfloat16"
    benchmark.name = name
    report = benchmark.pedantic(
        oracle.check, ("swiglu", x, dump), {"scaling": MXFP8}, rounds=3 if ok else 1, warmup_rounds=0
    )
    assert report.ok is ok
    assert [set(e.names) for e in report.diagnosis[:1]] == [set(names)] * bool(names)
    assert benchmark.stats.stats.min <= bound * allowance * reference_seconds
