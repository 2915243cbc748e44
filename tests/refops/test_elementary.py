"""exp and tanh of float32: the nearest float32, monotone, the limits of IEEE 754-2019 (9.2.1).

`test_correct_rounding` compares with the nearest float32 itself; `make exhaustive` does so for all values.
"""

import numpy as np
import pytest
from independent import BF16, FP16, F, all_values, bits

from refops.elementary import exp, tanh

FUNCTIONS = {"exp": (exp, np.exp), "tanh": (tanh, np.tanh)}
INF, NAN = np.inf, np.nan


def ordered(x):
    """float32 bit patterns as integers in the order of the values; the zeros are neighbours."""
    pattern = x.view(np.int32).astype(np.int64)
    return np.where(pattern < 0, -(pattern & 0x7FFFFFFF), pattern)


def random_float32(count, seed):
    """Any bit pattern but NaN, and as many more where the functions are neither 0, 1 nor inf."""
    rng = np.random.default_rng(seed)
    anything = rng.integers(0, 1 << 32, count // 2, dtype=np.uint32).view(F)
    curved = rng.uniform(-110, 95, count // 4)
    small = np.exp2(rng.uniform(-30, 5, count // 4)) * rng.choice([-1, 1], count // 4)
    x = np.concatenate([anything, curved.astype(F), small.astype(F)])
    return x[~np.isnan(x)]


def compare(function, truth, x):
    """(values that differ from the float64 function rounded once, largest difference in ulp)."""
    with np.errstate(all="ignore"):
        distance = np.abs(ordered(function(x)) - ordered(truth(x.astype(np.float64)).astype(F)))
    return int((distance > 0).sum()), int(distance.max(initial=0))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nearest_float32_of_ten_million(name):
    """NumPy's float64 functions err by up to 1 ulp, 2^-52: rounded once, they may be wrong in 2^-27 of the values."""
    function, truth = FUNCTIONS[name]
    differ = checked = 0
    for seed in range(10):
        x = random_float32(1_000_000, seed)
        count, largest = compare(function, truth, x)
        differ, checked = differ + count, checked + x.size
        assert largest <= 1
    assert checked > 9_900_000
    assert differ <= 2, f"{differ} of {checked}"


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nearest_float32_of_every_16_bit_value(name, dtype):
    function, truth = FUNCTIONS[name]
    x = all_values(dtype).astype(F)
    differ, largest = compare(function, truth, x[~np.isnan(x)])
    assert (differ, largest) == (0, 0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_monotone(name):
    """Rounding of a monotone function is monotone; a polynomial's seams must not show.

    Seams: every half-integer multiple of ln 2, for tanh half as much; there every float32 around, elsewhere samples.
    """
    function, _ = FUNCTIONS[name]
    seams = (np.arange(-151, 130) + 0.5) * np.log(2)
    around = np.arange(-2000, 2001)
    clusters = []
    for center in [2.0**-5, -(2.0**-5), 1.0, 9.0, -9.0, 88.72, -103.97, *seams, *(seams / 2)]:
        start = np.array([center], F).view(np.int32)
        clusters.append((start + around).astype(np.int32).view(F))
    x = np.sort(np.concatenate([*clusters, random_float32(400_000, 99)]))
    with np.errstate(all="ignore"):
        y = function(x)
    assert (np.diff(ordered(y)) >= 0).all()


@pytest.mark.parametrize(
    ("function", "x", "expected"),
    [
        (exp, 0.0, 1.0),
        (exp, -0.0, 1.0),
        (exp, 2.0**-149, 1.0),
        (exp, -(2.0**-149), 1.0),
        (exp, INF, INF),
        (exp, -INF, 0.0),
        (exp, 88.72283, 3.4027985e38),  # the largest argument with a finite result
        (exp, 88.72284, INF),
        (exp, 3e38, INF),
        (exp, -3e38, 0.0),
        (exp, -103.97208, 2.0**-149),  # the least result that is not 0
        (exp, -103.97209, 0.0),
        (exp, 1.0, 2.7182817),
        (tanh, 0.0, 0.0),
        (tanh, -0.0, -0.0),
        (tanh, INF, 1.0),
        (tanh, -INF, -1.0),
        (tanh, 3e38, 1.0),
        (tanh, 2.0**-149, 2.0**-149),
        (tanh, -(2.0**-149), -(2.0**-149)),
        (tanh, 2.0**-13, 2.0**-13),  # x - x^3/3 lies less than half an ulp below
        (tanh, 9.010913, 0.99999994),
        (tanh, 9.010914, 1.0),
        (tanh, 0.5, 0.46211717),
    ],
)
def test_special_values(function, x, expected):
    with np.errstate(all="ignore"):
        assert bits(function(np.array([x], F))) == bits(expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nan_stays_nan(name):
    patterns = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(F)
    with np.errstate(all="ignore"):
        assert np.isnan(FUNCTIONS[name][0](patterns)).all()


def test_tanh_is_odd():
    x = random_float32(200_000, 5)
    with np.errstate(all="ignore"):
        assert np.array_equal(tanh(-x).view(np.uint32), (-tanh(x)).view(np.uint32))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_result_does_not_depend_on_position_or_layout(name):
    """The bits of one value are the same alone, among others, and in a strided array."""
    function, _ = FUNCTIONS[name]
    x = random_float32(4096, 17)[:1021]
    with np.errstate(all="ignore"):
        together = function(x)
        for step in (2, 3, -1):
            assert np.array_equal(function(x[::step]).view(np.uint32), together[::step].view(np.uint32))
        for i in range(0, 1021, 37):
            assert bits(function(x[i : i + 1])) == bits(together[i])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_many_bfloat16_numbers_have_the_bits_of_few(name):
    """Of many a table is read; one number that is not bfloat16's among them, and none is."""
    (function, _), x = FUNCTIONS[name], all_values(BF16).astype(F)
    with np.errstate(all="ignore"):
        few = np.concatenate([function(part) for part in np.array_split(x, 3)])
        assert function(x).tobytes() == few.tobytes()
        assert function(np.tile(x, 3)[::-1]).tobytes() == np.tile(few, 3)[::-1].tobytes()
        mixed = np.append(x, F(0.1))
        assert function(mixed).tobytes() == np.append(few, function(mixed[-1:])).tobytes()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_against_mpmath(name):
    """The exact function, rounded once from 80 digits: no double rounding hides in the comparison with float64."""
    mpmath = pytest.importorskip("mpmath")
    function, _ = FUNCTIONS[name]
    x = random_float32(1600, 23)
    x = x[np.isfinite(x) & (np.abs(x) > 2.0**-30)]
    with mpmath.workdps(80), np.errstate(all="ignore"):
        y = function(x)
        for value, result in zip(x, y, strict=True):
            if not 0 < abs(float(result)) < INF:
                continue
            exact = getattr(mpmath, name)(mpmath.mpf(float(value)))
            below, above = np.nextafter(result, F(-INF)), np.nextafter(result, F(INF))
            error = abs(exact - float(result))
            assert error <= abs(exact - float(below)) and error <= abs(exact - float(above)), value
