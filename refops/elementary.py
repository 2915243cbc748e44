"""exp and tanh of float32 arrays: the nearest float32, with the same bits on every machine.

NumPy's float32 `exp` and `tanh` depend on the SIMD level of the host, and so does the C library. Here both are
evaluated in float64 by additions, multiplications and one division, which IEEE 754 fixes, and rounded once. The
float64 error is below 2^-48 relative, so the result is the correctly rounded float32 unless the true value lies that
close to a tie: about one input in four million. CUDA's `expf` and `tanhf` are within 1 to 2 ulp of it.
"""

from fractions import Fraction
from math import factorial

import numpy as np

_LOG2_E = 1.4426950408889634
# ln 2 in two parts; the first has 21 zero bits at its end, so that n * _LN2_HIGH is exact for |n| < 2^21.
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
# Taylor coefficients of e^r, highest first: |r| <= ln(2)/2, so the next term is below 2^-57.
_EXP_COEFFICIENTS = [1.0 / factorial(k) for k in range(13, -1, -1)]
# Taylor coefficients of tanh(u)/u in u^2, highest first (DLMF 4.33.3).
_TANH_COEFFICIENTS = [float(Fraction(*c)) for c in [(-1382, 155925), (62, 2835), (-17, 315), (2, 15), (-1, 3), (1, 1)]]
_SMALL = 2.0**-5  # below it tanh uses its series: the next term is under 2^-65, and 1 - e^-2u would cancel


def exp(x):
    """e^x. float32 array in, float32 array out. NaN stays NaN; exp(-inf) = 0; overflow gives inf.

    What is no array brings its own: the oracle runs formulas on intervals.
    """
    if not isinstance(x, np.ndarray | np.generic):
        return x.exp()
    return _exp_float64(x.astype(np.float64)).astype(np.float32)


def tanh(x):
    """Hyperbolic tangent. float32 array in, float32 array out. NaN stays NaN; tanh(-0.0) = -0.0. Else as `exp`."""
    if not isinstance(x, np.ndarray | np.generic):
        return x.tanh()
    x = x.astype(np.float64)
    magnitude = np.abs(x)
    decay = _exp_float64(-2.0 * magnitude)
    large = np.copysign((1.0 - decay) / (1.0 + decay), x)
    small = x * _horner(_TANH_COEFFICIENTS, np.minimum(x * x, 1.0))
    return np.where(magnitude < _SMALL, small, large).astype(np.float32)


def _exp_float64(x):
    """e^x for float64 `x` that came from float32: x = n ln 2 + r, then 2^n times a polynomial in r."""
    x = np.clip(x, -200.0, 200.0)  # beyond, float32 is 0 or inf anyway; NaN passes
    n = np.rint(x * _LOG2_E)
    r = x - n * _LN2_HIGH
    r -= n * _LN2_LOW
    power_of_two = ((n.astype(np.int64) + 1023) << 52).view(np.float64)
    return _horner(_EXP_COEFFICIENTS, r) * power_of_two


def _horner(coefficients, x):
    """Polynomial with `coefficients` from the highest power down."""
    result = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result *= x
        result += coefficient
    return result
