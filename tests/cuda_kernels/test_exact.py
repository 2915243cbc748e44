"""`arithmetic="exact"` on the CPU: the bits of `refops`, for every bfloat16 and float16 and for many float32."""

from itertools import product

import numpy as np
import pytest

import refops
from arrays import same_bits
from cuda_kernels import host
from exactness import DTYPES, F, assert_exact, assert_exact_fused, tensors
from tiers import sampled

NAMES = tuple(refops.ACTIVATIONS)


@sampled(("name", "dtype"), product(NAMES, DTYPES), 10, ids=str)
def test_bits_are_the_reference_s(name, dtype):
    """Of float32 a million, of the others all."""
    assert_exact(host, name, dtype, count=1 << 20)


@sampled(("name", "dtype"), product(NAMES[::-1], DTYPES), 28, ids=str)
def test_bits_of_fused_calls(name, dtype):
    assert_exact_fused(host, name, dtype)


@pytest.mark.parametrize(
    ("name", "params"), [("clamped_swiglu", {"limit": 1.5, "alpha": 0.5}), ("situglu", {"beta1": 0.5})]
)
def test_parameters(name, params):
    dy, x = tensors(name, DTYPES[0])
    with np.errstate(all="ignore"):
        got = host.activation_grad(name, dy, x, arithmetic="exact", **params)
        assert same_bits(np.nan_to_num(got), np.nan_to_num(refops.activation_grad(name, dy, x, **params)))


def test_the_default_is_accurate():
    """TE's arithmetic, of which some results are others; a call in one arithmetic is no plan for the other."""
    _, x = tensors("gelu", np.dtype(F))
    expected = refops.activation("gelu", x)
    for _ in range(3):
        plain, accurate, exact = (
            host.activation("gelu", x, **options)
            for options in ({}, {"arithmetic": "accurate"}, {"arithmetic": "exact"})
        )
        assert same_bits(plain, accurate)
        assert 10 < np.count_nonzero((plain != expected) & ~np.isnan(expected)) < x.size / 10
        np.testing.assert_array_equal(exact, expected)


def test_activations_without_exponentials_are_exact_anyway():
    for name in ("relu", "sreglu"):
        dy, x = tensors(name, np.dtype(F))
        assert same_bits(host.activation_grad(name, dy, x), host.activation_grad(name, dy, x, arithmetic="exact"))


@pytest.mark.parametrize("wrong", ["fast", "Exact", None, True])
def test_other_arithmetic_is_refused(wrong):
    with pytest.raises((ValueError, TypeError), match=r"arithmetic must be .*'?accurate'?, '?exact'?; got"):
        host.activation("gelu", np.ones((2, 8), F), arithmetic=wrong)
