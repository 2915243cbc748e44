"""exp, tanh and 1 / x: the bounds that `cuda_kernels.elementary` claims, off the GPU and for the GPU's instructions.

tests/exhaustive/elementary_all_float32.py does exp and tanh at all 2^32 float32 values.
"""

import platform
import re

import numba
import numpy as np
import pytest
import units
from scalars import (
    F,
    all_16_bit_values,
    error_in_ulp,
    exact_fma,
    moved,
    ordered,
    over_arrays,
    ulp_of,
    with_instructions,
)

from cuda_kernels import elementary
from cuda_kernels.elementary import LN_2, LOG2_E
from cuda_kernels.fast import ALMOST_ONE
from tiers import sampled

INF, NAN = np.inf, np.nan
#: Where float64 results round to infinity.
OVERFLOW = 2.0**128 - 2.0**103
MANTISSAS = np.arange(1 << 23, dtype=np.uint32)
FUNCTIONS = {
    "exp": (over_arrays(elementary.exp), np.exp),
    "tanh": (over_arrays(elementary.tanh), np.tanh),
}


def sweep(seed=0):
    """Two million values: any pattern, and many where the functions are neither flat nor linear. No NaN."""
    rng = np.random.default_rng(seed)
    anything = rng.integers(0, 1 << 32, 500_000, dtype=np.uint32).view(F)
    curved = np.concatenate([rng.uniform(-104, 89, 600_000), rng.uniform(-10, 10, 600_000)]).astype(F)
    small = (np.exp2(rng.uniform(-30, 3, 300_000)) * rng.choice([-1, 1], 300_000)).astype(F)
    x = np.concatenate([anything, curved, small, all_16_bit_values()])
    return x[~np.isnan(x)]


# --- off the GPU ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "bound"), [("exp", 0.99), ("tanh", 1.07)])
def test_error_over_two_million_values_and_every_16_bit_value(name, bound):
    """Bounds are the exhaustive scan's largest errors, rounded up; the module promises 1 and 1.5 ulp."""
    function, truth = FUNCTIONS[name]
    x = sweep()
    with np.errstate(all="ignore"):
        true = truth(x.astype(np.float64))
    got, finite = function(x), true < OVERFLOW
    assert error_in_ulp(got[finite], true[finite]).max() <= bound
    assert np.all(np.isinf(got[~finite]))


def test_ends_of_exp():
    x = np.array([NAN, INF, -INF, 0.0, -0.0, 88.72284, -103.97207, -104.0, -3.4e38, 3.4e38], F)
    expected = np.array([NAN, INF, 0, 1, 1, INF, 2.0**-149, 0, 0, INF], F)
    np.testing.assert_array_equal(FUNCTIONS["exp"][0](x), expected)


def test_ends_of_tanh():
    x = np.array([NAN, INF, -INF, 0.0, -0.0, 2.0**-149, -(2.0**-149), 9.1, -9.1, 3.4e38], F)
    expected = np.array([NAN, 1, -1, 0, -0.0, 2.0**-149, -(2.0**-149), 1, -1, 1], F)
    got = FUNCTIONS["tanh"][0](x)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got[1:]), np.signbit(expected[1:]))


def test_tanh_is_odd():
    x, tanh = sweep(1), FUNCTIONS["tanh"][0]
    np.testing.assert_array_equal(tanh(-x).view(np.uint32), tanh(x).view(np.uint32) ^ np.uint32(0x80000000))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_larger_x_never_gives_less(name):
    """The exhaustive scan found both monotone."""
    function, _ = FUNCTIONS[name]
    x = np.sort(sweep(2))
    assert np.diff(ordered(function(x))).min() >= 0


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="looks for x86 instructions")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_loop_over_arrays_is_vectorised(name):
    """Packed multiplications and no call: scalar code would be 4 to 16 times slower."""
    function = getattr(elementary, name)

    @numba.njit("void(float32[::1], float32[::1])", error_model="numpy")
    def loop(x, out):
        for i in range(x.size):
            out[i] = function(x[i])

    text = loop.inspect_asm(loop.signatures[0])
    assert len(re.findall(r"\bv?mulps\b", text)) >= 8
    assert not re.search(r"call\w*\s.*\b(expf?|tanhf?)\b", text)


# --- 1 / x on a GPU ---------------------------------------------------------------------------------


def seed_off_by(places):
    """`reciprocal_seed` that gives the float32 `places` from the nearest to 1 / x."""
    return numba.njit(lambda x: moved(F(1) / x, places), inline="always", error_model="numpy")


def with_seed(places):
    return over_arrays(
        with_instructions(elementary.newton_reciprocal, reciprocal_seed=seed_off_by(places), fma=exact_fma)
    )


def plain_step(places):
    """One Newton step as CUDA's own rcp.rn makes it where 1 / x is normal."""
    seed = seed_off_by(places)

    @numba.njit(error_model="numpy")
    def step(x):
        start = seed(x)
        return exact_fma(start, exact_fma(-x, start, F(1)), start)

    return over_arrays(step)


@pytest.mark.parametrize("places", [-1, 0, 1])
def test_newton_reciprocal_rounds_correctly_for_every_mantissa_and_seed(places):
    """The result depends on x's exponent only where 1 / x is subnormal (the next test), so one binade stands for all.

    A seed within 1 ulp is the nearest float32 or a neighbour of it. Neighbours further off than 1 ulp are tried too;
    they may fail, and 3 do. The one failure within 1 ulp, the all-ones mantissa with a seed below 1 / x, is rcp.rn's.
    """
    x = (MANTISSAS | np.uint32(127 << 23)).view(F)
    got = with_seed(places)(x)
    wrong = np.flatnonzero(got != F(1) / x)
    seeds = (F(1) / x[wrong]).view(np.uint32).astype(np.int64) + places
    true = 1.0 / x[wrong].astype(np.float64)
    far = np.abs(seeds.astype(np.uint32).view(F).astype(np.float64) - true) / ulp_of(true) > 1
    assert far.sum() == (3 if places == 1 else 0)
    assert list(wrong[~far]) == ([(1 << 23) - 1] if places == -1 else [])
    np.testing.assert_array_equal(got[wrong[~far]], plain_step(places)(x[wrong[~far]]))


@sampled("exponent", [125, 126, 127], 3)
@pytest.mark.parametrize("places", [-1, 0, 1])
def test_newton_reciprocal_where_the_result_is_subnormal(places, exponent):
    """x from 2^126 on; 2^125 is the last binade of normal results."""
    x = (MANTISSAS | np.uint32(127 + exponent << 23)).view(F)
    wrong = np.flatnonzero(with_seed(places)(x) != F(1) / x)
    assert len(wrong) == (0 if exponent > 125 else {-1: 1, 0: 0, 1: 3}[places])


def test_every_binade_scales_alike():
    """One thousand mantissas in every binade from 1 on."""
    mantissas = np.random.default_rng(3).integers(0, 1 << 23, 1000, dtype=np.uint32)
    x = (mantissas | (np.arange(127, 255, dtype=np.uint32) << np.uint32(23))[:, None]).view(F)
    np.testing.assert_array_equal(with_seed(0)(x), F(1) / x)


@pytest.mark.parametrize("places", [-1, 0, 1])
def test_reciprocal_to_scale_is_the_division_s(places):
    """Every exponent below 2^126 with random mantissas, and every mantissa above 2^-128, where subnormal x begin.

    The seeds tried and what fails are those of the test of every mantissa above.
    """
    seed = seed_off_by(places)
    got_of = over_arrays(with_instructions(elementary.reciprocal_of_small, reciprocal_seed=seed, fma=exact_fma))
    mantissas = np.random.default_rng(5).integers(0, (1 << 23) - 4, 1000, dtype=np.uint32)
    binades = (mantissas | (np.arange(0, 253, dtype=np.uint32) << np.uint32(23))[:, None]).ravel()
    x = np.concatenate([binades, np.arange(0, 1 << 23, 7, dtype=np.uint32)]).view(F)
    x = np.concatenate([x, F([0, 2.0**-149, 2.0**-128, 2.0**-126, 1, 2.0**125, np.nan])])
    with np.errstate(all="ignore"):
        expected = np.minimum(F(1) / x, np.finfo(F).max)
    np.testing.assert_array_equal(got_of(x), expected)


def test_ends_of_newton_reciprocal():
    """What 1 + e^x can be besides."""
    np.testing.assert_array_equal(
        with_seed(0)(np.array([1, INF, NAN, 2.0**126, 2.0**127], F)), [1, 0, NAN, 2**-126, 2**-127]
    )


# --- the approximate units --------------------------------------------------------------------------


def normal_exponentials():
    """x with e^x a normal float32, and e^x in float64."""
    x = sweep(4)
    x = np.concatenate([x, np.linspace(-87.3, 88.7, 1_000_000).astype(F)])
    x = x[(x > -87.33) & (x < 88.72)]
    return x, np.exp(x.astype(np.float64))


@pytest.mark.parametrize(("errors", "bound"), [((0, 0), 4), ((2, -1), 7), ((-2, 1), 7)])
def test_fast_sigmoid_within_seven_units(errors, bound):
    """Relative error in units of 2^-23, for units as far off as allowed."""
    x, exp = normal_exponentials()
    x, exp = x[x < 87.3], exp[x < 87.3]  # beyond it may be 0
    with units.errors(*errors):
        got = over_arrays(units.varying_words().sigmoid)(-x).astype(np.float64)
    assert np.max(np.abs(got * (1 + exp) - 1)) * 2**23 <= bound


def test_the_factor_of_fast_exponentials_is_never_0():
    """e^-x is 2^y (1 - r); where 2^y is infinite the factor must not be 0. Each x of these binades."""
    zeros = 0
    for exponent in range(22, 34):
        x = -(np.arange(1 << 23, dtype=np.uint32) + np.uint32(127 + exponent << 23)).view(F)
        y = x * F(-LOG2_E)
        r = (y.astype(np.float64) * np.float64(LN_2) + x.astype(np.float64)).astype(F)
        assert not np.any(r == F(ALMOST_ONE))
        zeros += np.count_nonzero(r == 1)
    assert zeros > 0  # 1 itself would not do
