"""`arithmetic="exact"` by compiled kernels: the bits of `refops`, for every bfloat16 and float16 and for many float32.

The bits are the same on units that err as far as the ISA allows, because exact arithmetic uses none, and where a linker
would contract.
"""

import re
from dataclasses import replace

import numpy as np
import pytest

import cuda_kernels
import refops
from cuda_kernels import launch
from cuda_kernels.emulator import emulated
from cuda_kernels.families import elementwise
from exactness import DTYPES, F, assert_exact, assert_exact_fused, tensors
from tiers import sampled

NAMES = tuple(refops.ACTIVATIONS)
FLOAT32 = np.dtype(F)


@sampled("name", NAMES, 12)
def test_bits_are_the_reference_s(name):
    with emulated(target="sm_90"):
        for dtype in DTYPES:
            assert_exact(cuda_kernels, name, dtype, sums=False)


@sampled("name", ("swiglu", "gelu", "srelu", "clamped_swiglu", "situglu"), 12)
def test_bits_of_fused_calls(name):
    with emulated(target="sm_90"):
        assert_exact_fused(cuda_kernels, name, DTYPES[0], count=1 << 14, sums=False)


@sampled("target", ("sm_100a", "sm_80", "sm_120a"), 12)
def test_every_target_has_the_same_bits(target):
    with emulated(target=target):
        assert_exact(cuda_kernels, "swiglu", FLOAT32, count=1 << 14, sums=False)


@sampled("name", ("gelu", "situglu"), 12)
def test_neither_units_nor_linkers_change_a_bit(name):
    with emulated(target="sm_90", perturb=1, contract=True):
        assert_exact(cuda_kernels, name, FLOAT32, count=1 << 14, sums=False)


def test_fast_math_is_another_arithmetic():
    _, x = tensors("silu", FLOAT32, 1 << 12)
    with emulated(target="sm_90"):
        fast = cuda_kernels.activation("silu", x, arithmetic="fast")
        np.testing.assert_array_equal(fast, cuda_kernels.activation("silu", x, fast_math=True))
        assert np.count_nonzero(fast != cuda_kernels.activation("silu", x, arithmetic="exact")) > 10
        with pytest.raises(ValueError, match="fast_math must be False with arithmetic='exact'; got True"):
            cuda_kernels.activation("silu", x, arithmetic="exact", fast_math=True)
        with pytest.raises(ValueError, match="arithmetic must be one of 'accurate', 'fast', 'exact'; got 'best'"):
            cuda_kernels.activation("silu", x, arithmetic="best")


def test_exact_kernels_have_no_multiply_add_that_a_compiler_made():
    """Of float32 or float64; one that may contract makes some of the same kernel."""
    spec = next(cost.spec for cost in elementwise.costs() if cost.spec.values.activation == "gelu")
    spec = replace(spec, values=replace(spec.values, arithmetic="exact"))
    exact = launch.ptx_of(spec, (9, 0))
    assert "mul.rn.f64" in exact and "div.rn.f64" in exact
    assert not re.search(r"\bfma|approx|\.local\b", exact)
    contracted = launch.compile_ptx(spec.function((9, 0)), launch.signature_of(spec), (9, 0))
    assert "fma.rn.f64" in contracted and "fma.rn.f32" in contracted
