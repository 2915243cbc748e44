"""A scaling that one declaration adds works on the CPU: no loop knows it by name."""

import ml_dtypes
import numpy as np
import pytest

import refops
from arrays import assert_same_quantized
from cuda_kernels import host
from declared_scalings import CHECKED, SHAPES, WITHOUT_GPU_KERNELS, check_declared, declared
from tiers import sampled


@sampled("name", CHECKED, 12)
def test_every_call_has_the_reference_s_bits(name):
    check_declared(host, name, ml_dtypes.bfloat16, SHAPES[name])


@pytest.mark.full
@sampled("scaling", WITHOUT_GPU_KERNELS, 3, in_all=2, ids=["stochastic", "hadamard", "choice"])
def test_what_no_gpu_kernel_makes(scaling):
    x = (np.arange(48 * 80).reshape(48, 80) % 33 - 16).astype(ml_dtypes.bfloat16)
    with declared():
        for made in ({}, {"columnwise": True}, {"rowwise": False, "columnwise": True}):
            assert_same_quantized(host.quantize(x, scaling, **made), refops.quantize(x, scaling, **made))


@pytest.mark.full
@sampled("name", CHECKED, 7)
def test_float32_too(name):
    check_declared(host, name, np.float32, (256, 384))
