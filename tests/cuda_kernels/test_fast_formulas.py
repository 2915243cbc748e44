"""Fast values and gradients as kernels compute them, of numbers and in both halves of pairs, on the worst units.

The oracle accepts them at ulp=8 for every bfloat16 and float16, dense float32 and gates and gradients of any size, and
at the special values they are what the accurate formulas are.
"""

from collections import namedtuple
from functools import cache

import ml_dtypes
import numba
import numpy as np
import pytest
import units
from scalars import F, over_arrays

import refops.oracle
from cuda_kernels import pairs
from cuda_kernels.activations import ACTIVATIONS, FAST, functions_of, with_parameters
from tiers import sampled

PARAMETERS = {"limit": F(7), "alpha": F(1.702), "glu_linear_offset": F(1), "beta1": F(4), "beta2": F(25)}
Parameters = namedtuple("Parameters", list(PARAMETERS))
P = Parameters(**PARAMETERS)
#: How many times x the argument of the sigmoid is; it is 0 where that is below -87.33.
SLOPES = {"qgelu": 1.702, "qgeglu": 1.702, "clamped_swiglu": 1.702, "silu": 1, "glu": 1, "swiglu": 1, "situglu": 1}
#: Those that have fast formulas of their own.
SMOOTH = [name for name, row in ACTIVATIONS.items() if row.value not in ("relu", "srelu")]
SPECIAL = F([np.nan, np.inf, -np.inf, 0, -0.0, 1e-45, -1e-42, 1e-38, 3e38, -3.4e38, 3e19, -5e19, 88.8, -104, 0.5, -7.5])


@cache
def inputs():
    """(x, gate, dy): bfloat16, float16 and float32; gates near 0, near limits and beyond; gradients of any size."""
    rng = np.random.default_rng(0)
    every = np.arange(1 << 16, dtype=np.uint16)
    x = np.concatenate(
        [
            every.view(ml_dtypes.bfloat16).astype(F),
            every.view(np.float16).astype(F),
            (rng.standard_normal(60_000) * 3).astype(F),
            rng.uniform(-90, 90, 60_000).astype(F),
            (2.0 ** rng.uniform(-20, 3, 40_000) * rng.choice([-1, 1], 40_000)).astype(F),
        ]
    )
    gate = (rng.choice([-1, 1], x.size) * 2.0 ** rng.uniform(-12, 9, x.size)).astype(F)
    dy = (rng.standard_normal(x.size) * 2.0 ** rng.integers(-12, 4, x.size)).astype(F)
    return x, gate, dy


def kept(name, x):
    """Where x is finite and the sigmoid, accurately no 0, is not flushed to 0."""
    with np.errstate(invalid="ignore"):
        argument = SLOPES.get(name, 0) * x.astype(np.float64)
    return np.isfinite(x) & ~((argument < -87.33) & (argument > -88.73))


def functions(name, formulas, lift, drop):
    """(value(x, g), (dx(x, g, dy), dgate(x, g, dy))) of an activation; `lift` makes what `formulas` take."""
    row = ACTIVATIONS[name]
    if row.gate is None:
        value, derivative = formulas[row.value], formulas[f"{row.value}_derivative"]
        return (lambda x, g: drop(value(lift(x)))), (lambda x, g, dy: drop(derivative(lift(x))) * dy,)
    gradients = formulas[f"{name}_gradients"]
    parts = (
        lambda x, g, dy: drop(gradients(lift(x), lift(g), lift(dy), P)[0]),
        lambda x, g, dy: drop(gradients(lift(x), lift(g), lift(dy), P)[1]),
    )
    if f"{name}_product" in formulas:
        product = formulas[f"{name}_product"]
        return (lambda x, g: drop(product(lift(x), lift(g), P))), parts
    act = with_parameters(formulas[row.value], row.parameters)
    gate = with_parameters(formulas.get(row.gate) or FAST[row.gate], row.gate_parameters)
    if row.gate in formulas:
        return (lambda x, g: drop(act(lift(x), P)) * drop(gate(lift(g), P))), parts
    return (lambda x, g: drop(act(lift(x), P)) * gate(g, P)), parts


def compiled(name, formulas, lift, drop):
    """The functions of an activation, over arrays: (value, [dx, dgate])."""
    value, parts = functions(name, formulas, lift, drop)
    over = [over_arrays(numba.njit(function, error_model="numpy")) for function in (value, *parts)]
    return over[0], over[1:]


def results(name, functions, x, g, dy):
    """[(op, inputs, output)] of an activation and its gradient, by what `compiled` returns."""
    value, parts = functions
    with np.errstate(all="ignore"):
        y = value(x, g)[:, None]
        slopes = [part(x, g, dy) for part in parts]
    gated = ACTIVATIONS[name].gate is not None
    x = np.stack([x, g], axis=1) if gated else x[:, None]
    return [(name, x, y), (f"d{name}", {"x": x, "dy": dy[:, None]}, np.stack(slopes, axis=1))]


def same(x):
    return x


@cache
def halves(which):
    """(lift, drop) of a number in one half of a pair, whose other half is its negative."""
    pair, half = pairs.pair, (pairs.first, pairs.second)[which]
    lift = numba.njit((lambda x: pair(-x, x)) if which else (lambda x: pair(x, -x)), error_model="numpy")
    return lift, numba.njit(lambda p: half(p), error_model="numpy")


SAME = numba.njit(same)


def kinds(name):
    """What `compiled` returns for numbers, for first and for second halves."""
    yield compiled(name, units.fast_varying_numbers(), SAME, SAME)
    for which in (0, 1):
        yield compiled(name, units.fast_varying_pairs(), *halves(which))


def special_values(name):
    """(x, gate, dy): special values, each with each, but those where both formulas are 0 times infinity."""
    x, g, dy = (v.ravel() for v in np.meshgrid(SPECIAL, SPECIAL, SPECIAL))
    wanted = kept(name, x) | ~np.isfinite(x)
    return x[wanted], g[wanted], dy[wanted]


@sampled("name", SMOOTH, 9)
def test_the_oracle_accepts_them_at_8_ulp(name):
    """On units with each of the errors; what numbers and both halves of pairs agree on is judged once."""
    dense, special = [v[kept(name, inputs()[0])] for v in inputs()], special_values(name)
    accepted = set()
    for of_kind in kinds(name):
        for errors in units.ERRORS:
            with units.errors(*errors):
                found = results(name, of_kind, *dense) + results(name, of_kind, *special)
            print("units off by", errors)
            for op, given, output in found:
                bits = op, output.tobytes()
                if bits not in accepted:
                    refops.oracle.check(op, given, output, ulp=8, diagnose=False).raise_for_mismatch()
                    accepted.add(bits)


def test_the_errors_count():
    """Other errors, other results of the same compiled function."""
    x, g, dy = (v[kept("swiglu", inputs()[0])] for v in inputs())
    of_numbers = compiled("swiglu", units.fast_varying_numbers(), SAME, SAME)
    found = set()
    for errors in units.ERRORS:
        with units.errors(*errors):
            found.add(results("swiglu", of_numbers, x, g, dy)[0][2].tobytes())
    assert len(found) == len(units.ERRORS)


@sampled("name", ["silu", "swiglu", "glu", "situglu"], 4)
def test_far_left_everything_is_0(name):
    """Also where the correction of e^-x is -1 but for a rounding: first found at -24711794."""
    x = np.concatenate([np.linspace(-1000, -88.8, 10_000), -(2.0 ** np.linspace(10, 127.9, 10_000)), [-24711794.0]])
    x = x.astype(F)
    one = np.ones_like(x)
    for of_kind in kinds(name):
        for _, _, output in results(name, of_kind, x, one, one):
            assert np.all(output == 0)


@pytest.mark.parametrize("name", ["swiglu", "geglu", "qgeglu"])
def test_activations_have_the_same_values(name):
    """`activations.FAST` has the values of `fast`: what scaled kernels and kernels without pairs call."""
    x, _, _ = inputs()
    own = pairs.FAST_NATIVE[ACTIVATIONS[name].value]
    value = functions_of(name, fast_math=True).value
    got = over_arrays(numba.njit(lambda x: value(x, P), error_model="numpy"))(x)
    np.testing.assert_array_equal(got, over_arrays(numba.njit(lambda x: own(x), error_model="numpy"))(x))
