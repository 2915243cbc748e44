"""Activation formulas: their order of operations, their instructions on a GPU, their accuracy with approximate units.

Order: with exp and tanh rounded as `refops` rounds them, results are `refops`' bits. Instructions: the float32 ones in
PTX are those that were measured (`tests/measured/activations.json`), multiply-adds included; of TE's rows these are
the ones of TE's header (docs/spec/activations.md, 1.2 and 1.3). Accuracy: the oracle accepts the CPU's values at ulp=2
and, at ulp=8, fast formulas on the worst units that their documentation allows.
"""

from collections import Counter
from functools import cache
from itertools import product

import ml_dtypes
import numba
import numpy as np
import pytest
import units
from formula_cases import DISTINCT, P, flushed, functions_with, of_p
from instructions import float_instructions, ptx_of_formulas
from scalars import F, over_arrays

import measured
import refops.oracle
from cuda_kernels import formulas, operands
from refops.activations import ACTIVATIONS, bind_activation
from refops.activations.declaration import RESERVED
from tiers import sampled

#: "FUNCTION.value" and "FUNCTION.slope" of each function of the table.
NAMES = [f"{function.name}.{which}" for function in DISTINCT for which in ("value", "slope")]
FAST_NAMES = [f"{function.name}.{which}" for function in DISTINCT if function.fast for which in ("value", "slope")]


@cache
def bfloat16_and_random():
    """(x, gate): every finite bfloat16 and 40,000 random float32; gates of ordinary size."""
    rng = np.random.default_rng(0)
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(F)
    random = np.concatenate([rng.standard_normal(20_000) * 3, rng.uniform(-90, 90, 20_000)]).astype(F)
    x = np.concatenate([every[np.isfinite(every)], random])
    return x, (rng.standard_normal(x.size) * 4).astype(F)


def evaluate(name, functions, x, gate):
    """(op, inputs, output) of an activation and of its gradient for dy = 1, from scalar `Functions`."""
    one = np.ones((x.size, 1), F)
    value, slope = of_p(functions.value)(x), of_p(functions.derivative)(x)
    if functions.gate is None:
        column = x[:, None]
        return [(name, column, value[:, None]), (f"d{name}", {"x": column, "dy": one}, slope[:, None])]
    pair = np.stack([x, gate], axis=1)
    with np.errstate(all="ignore"):
        gate_value = of_p(functions.gate)(gate)
        d = np.stack([slope * gate_value, of_p(functions.gate_slope)(gate) * value], axis=1)
        return [(name, pair, (value * gate_value)[:, None]), (f"d{name}", {"x": pair, "dy": one}, d)]


def raise_unless_accepted(results, ulp):
    for op, inputs, output in results:
        refops.oracle.check(op, inputs, output, ulp=ulp, diagnose=False).raise_for_mismatch()


# --- order of operations ----------------------------------------------------------------------------


@sampled("function", DISTINCT, 3)
def test_exact_formulas_are_the_reference_s_bit_for_bit(function):
    name, half = next((n, i) for n, row in ACTIVATIONS.items() for i, f in enumerate(row.functions) if f is function)
    bound, made = bind_activation(name, {}), formulas.forms_of(function, "exact")
    x, _ = bfloat16_and_random()
    for which, form in zip((("value", "derivative"), ("gate", "gate_slope"))[half], made, strict=False):
        np.testing.assert_array_equal(of_p(form)(x), getattr(bound, which)(x), err_msg=which)


@pytest.mark.parametrize("function", [f for f in DISTINCT if formulas.accurate_forms(f).both], ids=repr)
def test_both_are_value_and_slope(function):
    made = formulas.accurate_forms(function)
    x, _ = bfloat16_and_random()
    both, value, slope = made.both, made.value, made.slope
    for part, form in ((numba.njit(lambda x: both(x, P)[0]), value), (numba.njit(lambda x: both(x, P)[1]), slope)):
        np.testing.assert_array_equal(over_arrays(part)(x), of_p(form)(x))


# --- instructions on a GPU --------------------------------------------------------------------------

#: CUDA's expf; its tanhf; the correctly rounded reciprocal of `elementary`.
EXP = Counter({"fma.rn": 3, "cvt.sat": 1, "fma.rm": 1, "add": 1, "neg": 1, "ex2.approx.ftz": 1, "mul": 1})
TANH = Counter(
    {"abs": 1, "mul": 2, "ex2.approx.ftz": 1, "add": 1, "rcp.approx.ftz": 1, "fma.rn": 6, "setp": 2, "selp": 2}
) + Counter({"copysign": 1})
RECIPROCAL = Counter({"mul": 3, "rcp.approx.ftz": 1, "fma.rn": 3, "setp": 1, "selp": 1})


@pytest.fixture(scope="module")
def ptx():
    """{"accurate", "fast" or "elementary": {name: PTX}}."""
    cuda = pytest.importorskip("numba.cuda")
    if getattr(cuda, "implementation", "") != "NVIDIA":
        pytest.skip("needs numba-cuda")
    return ptx_of_formulas()


@pytest.mark.parametrize("name", NAMES)
def test_instructions_are_those_measured(ptx, name):
    assert float_instructions(ptx["accurate"][name]) == measured.activations("instructions")[name], measured.COMMAND
    assert ".f64" not in ptx["accurate"][name]


@pytest.mark.parametrize(("name", "expected"), [("exp", EXP), ("tanh", TANH), ("reciprocal", RECIPROCAL)])
def test_instructions_of_elementary_functions(ptx, name, expected):
    assert float_instructions(ptx["elementary"][name]) == expected


@pytest.mark.parametrize("name", FAST_NAMES)
def test_fast_formulas_use_the_approximate_units(ptx, name):
    """No more reciprocals and exponentials than the accurate formula has; only parameters are divided by."""
    accurate, found = float_instructions(ptx["accurate"][name]), float_instructions(ptx["fast"][name])
    assert ".f64" not in ptx["fast"][name]
    assert found["ex2.approx.ftz"] <= accurate["ex2.approx.ftz"]
    assert found["rcp.approx.ftz"] == accurate["rcp.approx.ftz"]
    assert found["div.rn"] + found["rcp.rn"] == 0
    assert found["div.full"] == accurate["div.rn"]


# --- accuracy ---------------------------------------------------------------------------------------


@sampled("name", ACTIVATIONS, 5)
def test_the_oracle_accepts_accurate_formulas_at_2_ulp(name):
    raise_unless_accepted(evaluate(name, formulas.functions_of(name), *bfloat16_and_random()), ulp=2)


@sampled("name", ACTIVATIONS, 5)
def test_fast_formulas_off_the_gpu_at_8_ulp(name):
    x, gate = bfloat16_and_random()
    keep = ~flushed(name, x)
    functions = formulas.functions_of(name, "fast")
    raise_unless_accepted(evaluate(name, functions, x[keep], gate[keep]), ulp=8)


@sampled(("name", "errors"), product(ACTIVATIONS, units.ERRORS), 11)
def test_fast_formulas_on_the_worst_units_at_8_ulp(name, errors):
    x, gate = bfloat16_and_random()
    keep = ~flushed(name, x)
    with units.errors(*errors):
        raise_unless_accepted(evaluate(name, functions_with(name), x[keep], gate[keep]), ulp=8)


@pytest.mark.parametrize("name", ["silu", "qgelu", "glu", "situglu"])
def test_what_fast_formulas_flush_is_tiny_and_becomes_0(name):
    x = np.linspace(-88.72, -50, 100_000).astype(F)
    x = x[flushed(name, x, below=-87.34)]
    assert x.size > 1000
    assert np.all(of_p(functions_with(name).value)(x) == 0)
    assert 0 < np.abs(bind_activation(name, {}).value(x)).max() < 2.0**-119


@pytest.mark.parametrize("function", [function for function in DISTINCT if function.fast], ids=repr)
def test_fast_formulas_treat_nan_and_infinity_as_accurate_ones(function):
    """But where the accurate formula is NaN by a cancellation at infinity, the fast one may have the limit."""
    x = np.array([np.nan, np.inf, -np.inf], F)
    accurate, fast = formulas.accurate_forms(function), formulas.fast_forms(function, units.varying_words())
    for a, f in zip(accurate[:2], fast[:2], strict=True):
        a, f = of_p(a)(x), of_p(f)(x)
        free = np.isnan(a) & np.isinf(x)
        np.testing.assert_allclose(f[~free], a[~free], rtol=8 * 2.0**-24)


def test_what_kernels_read_beside_parameters_is_reserved():
    """Parameters are fields of the tuple that has all of it."""
    assert set(operands.Inputs._fields) - set(operands.PARAMETERS) <= RESERVED
