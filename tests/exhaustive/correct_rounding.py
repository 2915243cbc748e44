"""exp and tanh of all 2^32 float32 values: is each result the float32 nearest to the true one?

    python tests/exhaustive/correct_rounding.py                      # everything (`make exhaustive`)
    python tests/exhaustive/correct_rounding.py --fraction 1/1024    # one value in 1024, spread over the whole range

It compares `refops.elementary` and the same text as `cuda_kernels.elementary` compiles it. The nearest float32 comes
from other formulas in float64, whose constants are made here by rational arithmetic:

    e^x = 2^(k/64) e^r,  k = 64 x / ln 2 rounded,  2^(j/64) from a table, e^r by its series: |r| < 0.0055
    tanh x = 1 - 2 / (e^2x + 1) from 2^-5 on, its series below

In units u = 2^-53 of one rounding, relative:

    e^x     the entry of the table, 1 + (e^r - 1) and their product: 1 u each; r and e^r - 1: below 0.02 u, for they
            are small; the terms left out: 0.33 u. Below 4 u.
    tanh    of 2 / (e^2x + 1), at most 0.97: 4 u + 2 u; of the difference, at least 2^-5: 186 u + 1 u. Below 256 u.
            The series: a sum and a product, 1 u each, and what is small. Below 4 u.

Where everything within `BOUNDS` of that result rounds to one float32, it is the nearest. Elsewhere rational arithmetic
says on which side of the middle e^x lies (`is_above`); none is the middle itself, for e^x is no rational number but for
x = 0. The last line is the verdict; the exit code is 1 where a result is not the nearest.
"""

import sys
from fractions import Fraction
from functools import cache
from math import factorial, floor, isqrt

import numba
import numpy as np
from patterns import compare_all

import refops.elementary
from cuda_kernels.elementary import EXACT

F = np.float32
#: Relative error of a result in float64: at least twice what the text above derives, for both branches of tanh.
BOUNDS = {"exp": 2.0**-50, "tanh": 2.0**-44}
#: e^x is 0 or infinity beyond the one, in float32, tanh 1 in magnitude beyond the other.
EXP_END, TANH_END, TANH_SERIES = 110.0, 20.0, 2.0**-5
EXPONENTS = 160
#: Values at a time: the float64 arrays stay in the nearest caches, which halves the time.
CHUNK = 1 << 14
#: Of rational arithmetic: binary places, and terms of a series.
PLACES, TERMS = 320, 60


# --- constants ------------------------------------------------------------------------------------------


def root_of_power(j):
    """2^(j/64) for 0 <= j < 64, to nearest: the square root of a large integer, six times over."""
    root = 1 << (j + 64 * 80)
    for _ in range(6):
        root = isqrt(root)
    return root / (1 << 80)


#: ln(2) / 64, from ln 2 = sum 1 / (k 2^k), in two parts: k STEP_HIGH is exact for |k| < 2^22.
STEP = sum(Fraction(1, k << k) for k in range(1, 200)) / 64
STEP_HIGH = floor(STEP * 2**37) / 2**37
STEP_LOW, STEPS = float(STEP - Fraction(STEP_HIGH)), float(1 / STEP)
ROOTS = np.array([root_of_power(j) for j in range(64)])
POWERS = np.ldexp(1.0, np.arange(-EXPONENTS, EXPONENTS + 1))
E2, E3, E4, E5 = (1 / factorial(k) for k in range(2, 6))
T3, T5, T7, T9, T11 = -1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925


# --- the nearest float32 --------------------------------------------------------------------------------


@numba.njit(error_model="numpy")
def exp_in_float64(x):
    """e^x of a float64 x, |x| <= EXP_END."""
    k = np.floor(x * STEPS + 0.5)
    r = (x - k * STEP_HIGH) - k * STEP_LOW
    more = r * (1 + r * (E2 + r * (E3 + r * (E4 + r * E5))))
    n = np.int64(k)
    return ROOTS[n & 63] * (1 + more) * POWERS[(n >> 6) + EXPONENTS]


@numba.njit(error_model="numpy")
def tanh_in_float64(x):
    """tanh x of a float64 x, |x| <= TANH_END."""
    if abs(x) < TANH_SERIES:
        z = x * x
        return x * (1 + z * (T3 + z * (T5 + z * (T7 + z * (T9 + z * T11)))))
    return np.copysign(1 - 2 / (exp_in_float64(2 * abs(x)) + 1), x)


#: Function -> (in float64, where its results end).
IN_FLOAT64 = {"exp": (exp_in_float64, EXP_END), "tanh": (tanh_in_float64, TANH_END)}
#: Function -> what is compared: of arrays, of numbers.
OURS = {name: (getattr(refops.elementary, name), getattr(EXACT, name)) for name in IN_FLOAT64}


@cache
def scan_of(name):
    """Return `scan(x, nearest, compiled)`, which fills both and returns how many are open, with their indices.

    What is open has in `nearest` the lower of two neighbours, in magnitude.
    """
    (function, end), bound, ours = IN_FLOAT64[name], BOUNDS[name], OURS[name][1]

    @numba.njit(error_model="numpy")
    def scan(x, nearest, compiled, still_open):
        count = 0
        for i in range(x.size):
            compiled[i] = ours(x[i])
            y = function(min(max(np.float64(x[i]), -end), end)) if x[i] == x[i] else np.float64(x[i])
            nearest[i] = F(y * (1 - bound))
            if nearest[i] != F(y * (1 + bound)) and y == y:
                still_open[count] = i
                count += 1
        return count

    return scan


def exp_enclosure(x):
    """Rational numbers below and above e^x, less than 2^-200 of it apart, for a float32 x, |x| < 220.

    e^x is (e^y)^512 with y = x / 512, in integers of 2^-320, of which y is one. Each term of the series may be two
    units off for each product and quotient that made it, which shrink with y: below 4. The terms left out are below 1.
    """
    y = int(Fraction(float(x)) * (1 << PLACES - 9))
    term = total = 1 << PLACES
    for k in range(1, TERMS):
        term = (term * y >> PLACES) // k
        total += term
    low, high = total - 4 * TERMS, total + 4 * TERMS
    for _ in range(9):
        low, high = low * low >> PLACES, (high * high >> PLACES) + 1
    return Fraction(low, 1 << PLACES), Fraction(high, 1 << PLACES)


def is_above(name, x, middle):
    """Whether exp or tanh of a float32 is above a rational number; tanh x > m where e^2x > (1 + m) / (1 - m)."""
    limit = (1 + middle) / (1 - middle) if name == "tanh" else middle
    low, high = exp_enclosure(x + x if name == "tanh" else x)
    if low <= limit <= high:
        raise ArithmeticError(f"{name}({x!r}) is too close to {float(middle)!r} to be told apart")
    return low > limit


def decided(name, x, lower):
    """The nearest float32 of a result that is `lower` or the next one, in magnitude."""
    outward = F(np.copysign(np.inf, lower))
    with np.errstate(over="ignore"):
        upper = np.nextafter(lower, outward)
    end = Fraction(float(upper)) if np.isfinite(upper) else Fraction(2) ** 128
    middle = (Fraction(float(lower)) + end) / 2
    return upper if is_above(name, x, middle) == (outward > 0) else lower


def compare(name, x):
    """Return (counts, bit pattern of the first difference or None) of ours and the nearest float32."""
    nearest, compiled, still_open = np.empty(x.size, F), np.empty(x.size, F), np.empty(x.size, np.int64)
    count = scan_of(name)(x, nearest, compiled, still_open)
    for i in still_open[:count]:
        nearest[i] = decided(name, x[i], nearest[i])
    with np.errstate(all="ignore"):
        arrays = OURS[name][0](x), compiled
    different = np.zeros(x.size, bool)
    for ours in arrays:
        different |= (ours.view(np.uint32) != nearest.view(np.uint32)) & ~(np.isnan(ours) & np.isnan(nearest))
    where = np.flatnonzero(different)
    counts = {"differences": len(where), "decided": count}
    return counts, int(x.view(np.uint32)[where[0]]) if len(where) else None


def main(arguments=None):
    """Run the comparison; return the exit code."""
    values, functions, counts, seconds = compare_all(
        arguments, __doc__.splitlines()[0], "functions", tuple(IN_FLOAT64), compare, CHUNK
    )
    print(
        f"{values:,} values x {functions} functions: {counts['differences']:,} misrounded "
        f"({counts['decided']:,} decided by rational arithmetic) in {seconds:.0f} s"
    )
    return 1 if counts["differences"] else 0


if __name__ == "__main__":
    sys.exit(main())
