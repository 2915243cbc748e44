"""Activation formulas: their order of operations, their instructions on a GPU, their accuracy with approximate units.

Order: with exp and tanh rounded as `refops` rounds them, results are `refops`' bits. Instructions: the float32 ones in
PTX are those of TE's header (docs/spec/activations.md, 1.2 and 1.3), multiply-adds included. Accuracy: the oracle
accepts the CPU's values at ulp=2 and, at ulp=8, fast formulas on the worst units that their documentation allows.
"""

import inspect
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import ml_dtypes
import numba
import numpy as np
import pytest
import units
from scalars import F, body_of, over_arrays, with_instructions

import refops.oracle
from cuda_kernels import activations
from cuda_kernels.activations import ACCURATE, ACTIVATIONS, FAST
from refops.activations import bind_activation
from tiers import sampled

PARAMETERS = {"limit": F(7), "alpha": F(1.702), "glu_linear_offset": F(1), "beta1": F(4), "beta2": F(25)}
NAMES = [name for name in ACCURATE if name != "sigmoid_pair" and not name.endswith("_both")]  # pairs
NAMES.remove("tanh")  # by itself in "elementary"


@cache
def bfloat16_and_random():
    """(x, gate): every finite bfloat16 and 40,000 random float32; gates of ordinary size."""
    rng = np.random.default_rng(0)
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(F)
    random = np.concatenate([rng.standard_normal(20_000) * 3, rng.uniform(-90, 90, 20_000)]).astype(F)
    x = np.concatenate([every[np.isfinite(every)], random])
    return x, (rng.standard_normal(x.size) * 4).astype(F)


def evaluate(formulas, name, x, gate):
    """(op, inputs, output) of an activation and of its gradient for dy = 1, from scalar formulas."""

    def call(function, names, v):
        return over_arrays(formulas[function])(v, *[PARAMETERS[p] for p in names])

    row, one = ACTIVATIONS[name], np.ones((x.size, 1), F)
    value, slope = call(row.value, row.parameters, x), call(row.derivative, row.parameters, x)
    if row.gate is None:
        column = x[:, None]
        return [(name, column, value[:, None]), (f"d{name}", {"x": column, "dy": one}, slope[:, None])]
    pair = np.stack([x, gate], axis=1)
    with np.errstate(all="ignore"):
        gate_value = call(row.gate, row.gate_parameters, gate)
        d = np.stack([slope * gate_value, call(row.gate_slope, row.slope_parameters, gate) * value], axis=1)
        return [(name, pair, (value * gate_value)[:, None]), (f"d{name}", {"x": pair, "dy": one}, d)]


def raise_unless_accepted(results, ulp):
    for op, inputs, output in results:
        refops.oracle.check(op, inputs, output, ulp=ulp, diagnose=False).raise_for_mismatch()


# --- order of operations ----------------------------------------------------------------------------


@cache
def formulas_with_rounded_functions():
    """`ACCURATE` with the nearest float32 to e^x and tanh(x), and 1 / x."""
    exp = numba.njit(lambda x: F(math.exp(min(np.float64(x), 200.0))) if x == x else x, inline="always")
    tanh = numba.njit(lambda x: F(math.tanh(np.float64(x))), inline="always")
    sigmoid = with_instructions(activations.sigmoid, exp=exp)
    return activations.make_formulas(
        sigmoid,
        with_instructions(activations.sigmoid_pair, sigmoid=sigmoid),
        tanh,
        with_instructions(activations.gelu, tanh=tanh),
        with_instructions(activations.dgelu, tanh=tanh),
        activations.quotient,
    )


@sampled("name", ACTIVATIONS, 3)
def test_order_of_operations_is_the_reference_s_bit_for_bit(name):
    row, bound, formulas = ACTIVATIONS[name], bind_activation(name, {}), formulas_with_rounded_functions()
    x, _ = bfloat16_and_random()
    pairs = [("value", row.value, row.parameters, x), ("derivative", row.derivative, row.parameters, x)]
    if row.gate is not None:
        pairs += [("gate", row.gate, row.gate_parameters, x), ("gate_slope", row.gate_slope, row.slope_parameters, x)]
    for which, function, names, v in pairs:
        got = over_arrays(formulas[function])(v, *[PARAMETERS[p] for p in names])
        expected = getattr(bound, which)(v)
        np.testing.assert_array_equal(got, expected, err_msg=which)


# --- instructions on a GPU --------------------------------------------------------------------------

#: CUDA's expf; its tanhf; the correctly rounded reciprocal of `elementary`.
EXP = Counter({"fma.rn": 3, "cvt.sat": 1, "fma.rm": 1, "add": 1, "neg": 1, "ex2.approx.ftz": 1, "mul": 1})
TANH = Counter(
    {"abs": 1, "mul": 2, "ex2.approx.ftz": 1, "add": 1, "rcp.approx.ftz": 1, "fma.rn": 6, "setp": 2, "selp": 2}
) + Counter({"copysign": 1})
RECIPROCAL = Counter({"mul": 3, "rcp.approx.ftz": 1, "fma.rn": 3, "setp": 1, "selp": 1})
#: 1 / (1 + e^-z): the last product of expf and the 1 become one multiply-add. -z is an instruction, or the sign of a
#: constant.
SIGMOID_OF_MINUS = EXP - Counter({"mul": 1}) + Counter({"fma.rn": 1}) + RECIPROCAL
SIGMOID = SIGMOID_OF_MINUS + Counter({"neg": 1})
NONE = Counter()

#: Formula -> (what it calls, its own instructions and where they stand in TE's expression).
EXPECTED = {
    "sigmoid": (SIGMOID, {}),
    "dsigmoid": (SIGMOID, {"sub": 1, "mul": 1}),  # s * (1 - s)
    # mul: 0.0357 x, x (...), x (...); fma: 0.798 + (0.0357 x) x, 0.5 + 0.5 t
    "gelu": (TANH, {"mul": 3, "fma.rn": 2}),
    # mul: 0.798 x, 0.0447 x, their product, 0.107 x, t t, (1 - t t) (...), 0.5 x, (0.5 x) (...)
    # fma: 1 + (0.0447 x) x, 0.798 + (0.107 x) x, (...) + 0.5 (1 + t); 1 - t t is not contracted: the square is shared
    "dgelu": (TANH, {"mul": 8, "fma.rn": 3, "sub": 1, "add": 1}),
    "qgelu": (SIGMOID_OF_MINUS, {"mul": 2}),  # -1.702 x, x s
    "dqgelu": (SIGMOID_OF_MINUS, {"mul": 3, "sub": 1, "fma.rn": 1}),  # -1.702 x, 1.702 x, s (1 - s); z (...) + s
    "silu": (SIGMOID, {"mul": 1}),
    "dsilu": (SIGMOID, {"mul": 1, "sub": 1, "fma.rn": 1}),  # s (1 - s); x (...) + s
    "relu": (NONE, {"max": 1}),
    "drelu": (NONE, {"setp": 1, "selp": 1}),
    "srelu": (NONE, {"setp": 1, "mul": 1, "selp": 1}),
    "dsrelu": (NONE, {"add": 1, "max": 1}),  # 2 x as x + x
    "clamped_silu": (SIGMOID, {"min": 1, "mul": 2}),  # alpha c, c s
    "dclamped_silu": (SIGMOID, {"min": 1, "setp": 1, "selp": 1, "mul": 2, "sub": 1, "fma.rn": 1}),
    "situ": (TANH + SIGMOID, {"div.rn": 1, "mul": 2}),  # (beta1 t) s
    # mul: t t, beta1 t, (beta1 t) s, one of the two terms of the sum; fma: the other
    "dsitu": (TANH + SIGMOID, {"div.rn": 1, "mul": 4, "sub": 2, "fma.rn": 1}),
    "identity": (NONE, {}),
    "one": (NONE, {}),
    "clamped_gate": (NONE, {"neg": 1, "max": 1, "min": 1, "add": 1}),
    "clamped_gate_slope": (NONE, {"neg": 1, "setp": 2, "selp": 1}),
    "situ_gate": (TANH, {"div.rn": 1, "mul": 1}),
    "situ_gate_slope": (TANH, {"div.rn": 1, "mul": 1, "sub": 1}),
    "quotient": (NONE, {"div.rn": 1}),
}
#: Parts of the names of formulas whose fast tanh is a quotient of polynomials, without an exponential.
TANH_OF_POLYNOMIALS = ("situ",)
#: What has no float32 arithmetic of its own in PTX.
MOVES = ("ld", "st", "mov")


@pytest.fixture(scope="module")
def ptx():
    """{"accurate", "fast" or "elementary": {name: PTX}}."""
    cuda = pytest.importorskip("numba.cuda")
    if getattr(cuda, "implementation", "") != "NVIDIA":
        pytest.skip("needs numba-cuda")
    run = subprocess.run(
        [sys.executable, Path(__file__).parent / "formulas_to_ptx.py"],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "0", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def float_instructions(ptx):
    """Counter of the float32 instructions, without their type; comparisons of every kind are one."""
    found = re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z]\w*(?:\.[a-z]\w*)*?)(?:\.f32)+\s", ptx, re.MULTILINE)
    return Counter("setp" if name.startswith("setp") else name for name in found if not name.startswith(MOVES))


@pytest.mark.parametrize("name", NAMES)
def test_instructions_are_those_of_te_s_header(ptx, name):
    called, own = EXPECTED[name]
    assert float_instructions(ptx["accurate"][name]) == called + Counter(own)
    assert ".f64" not in ptx["accurate"][name]


@pytest.mark.parametrize(("name", "expected"), [("exp", EXP), ("tanh", TANH), ("reciprocal", RECIPROCAL)])
def test_instructions_of_elementary_functions(ptx, name, expected):
    assert float_instructions(ptx["elementary"][name]) == expected


def test_every_formula_has_a_row():
    assert set(NAMES) == set(EXPECTED)


@pytest.mark.parametrize("name", NAMES)
def test_fast_formulas_use_the_approximate_units(ptx, name):
    """As many reciprocals as the formula has and exponentials as it has sigmoids; only parameters are divided by."""
    accurate = EXPECTED[name][0]
    found = float_instructions(ptx["fast"][name])
    assert ".f64" not in ptx["fast"][name]
    assert found["ex2.approx.ftz"] == accurate["ex2.approx.ftz"] - any(part in name for part in TANH_OF_POLYNOMIALS)
    assert found["rcp.approx.ftz"] == accurate["rcp.approx.ftz"]
    assert found["div.rn"] + found["rcp.rn"] == 0
    assert found["div.full"] == ("situ" in name or name == "quotient")


# --- accuracy ---------------------------------------------------------------------------------------


@sampled("name", ACTIVATIONS, 4)
def test_the_oracle_accepts_accurate_formulas_at_2_ulp(name):
    raise_unless_accepted(evaluate(ACCURATE, name, *bfloat16_and_random()), ulp=2)


@sampled("name", ACTIVATIONS, 4)
def test_fast_formulas_off_the_gpu_at_8_ulp(name):
    x, gate = bfloat16_and_random()
    keep = ~flushed(name, x)
    raise_unless_accepted(evaluate(FAST, name, x[keep], gate[keep]), ulp=8)


def slope_of(name):
    """What sigmoid's argument is divided by x; None where there is no sigmoid that the unit flushes to 0."""
    return {"qgelu": 1.702, "qgeglu": 1.702, "clamped_swiglu": 1.702}.get(
        name, 1.0 if name in ("silu", "glu", "swiglu", "situglu") else None
    )


def flushed(name, x):
    """Where sigmoid is below 2^-126, so 0 as a fast reciprocal, but not 0 as an accurate one."""
    slope = slope_of(name)
    if slope is None:
        return np.zeros(x.shape, bool)
    argument = slope * x.astype(np.float64)
    return (argument < -87.33) & (argument > -88.73)


@sampled("name", ACTIVATIONS, 4)
def test_fast_formulas_on_the_worst_units_at_8_ulp(name):
    x, gate = bfloat16_and_random()
    keep = ~flushed(name, x)
    for errors in units.ERRORS:
        print("units off by", errors)
        with units.errors(*errors):
            raise_unless_accepted(evaluate(units.fast_varying_formulas(), name, x[keep], gate[keep]), ulp=8)


@pytest.mark.parametrize("name", ["silu", "qgelu", "glu", "situglu"])
def test_what_fast_formulas_flush_is_tiny_and_becomes_0(name):
    x = np.linspace(-88.72, -87.34, 1000).astype(F) / F(slope_of(name))
    row, bound = ACTIVATIONS[name], bind_activation(name, {})
    got = over_arrays(units.fast_varying_formulas()[row.value])(x, *[PARAMETERS[p] for p in row.parameters])
    assert np.all(got == 0)
    assert 0 < np.abs(bound.value(x)).max() < 2.0**-119


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"quotient"}))
def test_fast_formulas_treat_nan_and_infinity_as_accurate_ones(name):
    """But where the accurate formula is NaN by a cancellation at infinity, the fast one may have the limit."""
    arguments = [PARAMETERS[p] for p in list(inspect.signature(body_of(ACCURATE[name])).parameters)[1:]]
    x = np.array([np.nan, np.inf, -np.inf], F)
    accurate = over_arrays(ACCURATE[name])(x, *arguments)
    fast = over_arrays(units.fast_varying_formulas()[name])(x, *arguments)
    free = np.isnan(accurate) & np.isinf(x)
    np.testing.assert_allclose(fast[~free], accurate[~free], rtol=8 * 2.0**-24)
