"""`oracle.acceptable` says what `oracle.check` does: the ends of its intervals pass, what lies beyond them does not."""

import ml_dtypes
import numpy as np
import pytest
from reference_calls import ALL_SCALINGS, call, every_call

import refops
from refops import oracle

pytestmark = pytest.mark.check

F = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)
VALUES = [(op, name) for op, name in every_call() if op == "dequantize" or (name is None and op != "quantize")]
VALUES = [(op, name) for op, name in VALUES if op != "update_delayed_scale"]


@pytest.mark.parametrize("dtype", [F, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("op", "name"), VALUES)
def test_the_ends_are_accepted_and_what_lies_beyond_is_not(op, name, dtype):
    inputs, _, options = call(op, ALL_SCALINGS.get(name))
    params = options["params"]
    found = oracle.acceptable(op, inputs, params=params, dtype=dtype)
    output = oracle.OPERATIONS[op].outputs[0]

    def wrong(values):
        report = oracle.check(op, inputs, {output: values}, params=params, diagnose=False)
        return report.arrays[0].wrong

    assert found.lower.dtype == found.upper.dtype == dtype
    assert wrong(found.lower) == wrong(found.upper) == 0
    numbers = np.isfinite(found.lower) & np.isfinite(found.upper)
    assert numbers.any()
    for end, beyond in ((found.lower, -np.inf), (found.upper, np.inf)):
        outside = np.where(numbers, np.nextafter(end, end.dtype.type(beyond)), end)
        assert wrong(outside) == np.count_nonzero(numbers)


@pytest.mark.parametrize("ulp", [2, 8])
def test_the_reference_lies_inside_and_a_larger_ulp_permits_more(ulp):
    x = np.random.default_rng(0).standard_normal((3, 5, 64)).astype(F)
    found, exact = oracle.acceptable("swiglu", x, ulp=ulp), oracle.acceptable("relu", x, ulp=ulp)
    y = refops.activation("swiglu", x)
    assert found.lower.shape == y.shape
    assert ((found.lower <= y) & (y <= found.upper)).all() and not found.nan.any()
    assert (exact.lower == exact.upper).all(), "relu has neither exp nor tanh"
    wider = oracle.acceptable("swiglu", x, ulp=2 * ulp)
    assert (wider.upper - wider.lower > found.upper - found.lower).mean() > 0.9


def test_nan():
    """gelu(-inf) is NaN (infinity times 0); relu(NaN) is 0."""
    x = np.array([[-np.inf, np.nan, 1]], F)
    assert oracle.acceptable("gelu", x).nan.tolist() == [[True, True, False]]
    relu = oracle.acceptable("relu", x)
    assert not relu.nan.any() and relu.upper[0, 1] == 0


@pytest.mark.parametrize("op", ["quantize", "update_delayed_scale"])
def test_operations_that_write_no_values_are_refused(op):
    with pytest.raises(ValueError, match=f"^op must be an activation, .*; got '{op}'"):
        oracle.acceptable(op, np.zeros((32, 32), F))


@pytest.mark.parametrize(("options", "message"), [({"ulp": 0}, "ulp"), ({"dtype": np.float64}, "dtype")])
def test_bad_arguments(options, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message} must be"):
        oracle.acceptable("silu", np.zeros((1, 4), F), **options)
