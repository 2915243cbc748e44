"""Fast values and gradients as kernels compute them, for single numbers and both halves of pairs, on the worst units.

The oracle accepts them at ulp=8 for every bfloat16 and float16, dense float32 and gates and gradients of any size, and
at the special values they equal the accurate formulas.
"""

from functools import cache

import ml_dtypes
import numba
import numpy as np
import pytest
import units
from formula_cases import P, flushed
from scalars import F, over_arrays

import refops.oracle
from cuda_kernels import pairs
from cuda_kernels.formulas import accurate_forms, fast_forms, fast_gradients, fast_product, functions_of
from refops.activations import ACTIVATIONS
from tiers import sampled

#: Those that have fast forms of their own.
SMOOTH = [name for name, row in ACTIVATIONS.items() if row.act.fast]
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
    return np.isfinite(x) & ~flushed(name, x)


def functions(name, words, lift, drop):
    """(value(x, g), (dx(x, g, dy), dgate(x, g, dy))) of an activation; `lift` makes what `words` are for."""
    row = ACTIVATIONS[name]
    value, derivative, _ = fast_forms(row.act, words)
    if not row.gated:
        return (lambda x, g: drop(value(lift(x), P))), (lambda x, g, dy: drop(derivative(lift(x), P)) * dy,)
    gradients, product, gate = fast_gradients(name, words), fast_product(name, words), fast_forms(row.gate, words)
    parts = (
        lambda x, g, dy: drop(gradients(lift(x), lift(g), lift(dy), P)[0]),
        lambda x, g, dy: drop(gradients(lift(x), lift(g), lift(dy), P)[1]),
    )
    if product:
        return (lambda x, g: drop(product(lift(x), lift(g), P))), parts
    if gate:
        gate_value = gate.value
        return (lambda x, g: drop(value(lift(x), P)) * drop(gate_value(lift(g), P))), parts
    accurate = accurate_forms(row.gate).value
    return (lambda x, g: drop(value(lift(x), P)) * accurate(g, P)), parts


def compiled(name, words, lift, drop):
    """The functions of an activation, over arrays: (value, [dx, dgate])."""
    value, parts = functions(name, words, lift, drop)
    over = [over_arrays(numba.njit(function, error_model="numpy")) for function in (value, *parts)]
    return over[0], over[1:]


def results(name, functions, x, g, dy):
    """[(op, inputs, output)] of an activation and its gradient, by what `compiled` returns."""
    value, parts = functions
    with np.errstate(all="ignore"):
        y = value(x, g)[:, None]
        slopes = [part(x, g, dy) for part in parts]
    x = np.stack([x, g], axis=1) if ACTIVATIONS[name].gated else x[:, None]
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
    yield compiled(name, units.varying_words(), SAME, SAME)
    for which in (0, 1):
        yield compiled(name, units.varying_pairs(), *halves(which))


def special_values(name):
    """(x, gate, dy): special values, each with each, but those where both formulas are 0 times infinity."""
    x, g, dy = (v.ravel() for v in np.meshgrid(SPECIAL, SPECIAL, SPECIAL))
    wanted = kept(name, x) | ~np.isfinite(x)
    return x[wanted], g[wanted], dy[wanted]


@sampled("name", SMOOTH, 9, in_all=8)
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
    of_numbers = compiled("swiglu", units.varying_words(), SAME, SAME)
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
    """Scaled kernels and those without pairs call the functions for every GPU: others' have the same values."""
    x, _, _ = inputs()
    own, value = fast_forms(ACTIVATIONS[name].act, pairs.FAST_NATIVE).value, functions_of(name, "fast").value
    got = over_arrays(numba.njit(lambda x: value(x, P), error_model="numpy"))(x)
    np.testing.assert_array_equal(got, over_arrays(numba.njit(lambda x: own(x, P), error_model="numpy"))(x))
