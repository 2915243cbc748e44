"""IEEE P3109's casts: Decode, and Project, which is RoundToPrecision, then Saturate, then Encode.

Written from the definitions of the working group's interim report, whose names it has, and apart from `refops`: nothing
of it is used here. What the report derives from width and precision (bias, which codes are infinite or NaN) are
parameters, so that OCP's formats are formats of this text too. There is no -0: numbers are real ones, infinities, NaN.

Arithmetic is exact in float64: a number of at most 53 bits is scaled by a power of two, parted into floor and rest, and
compared.
"""

from dataclasses import dataclass

import numpy as np

#: Bits of a random number of StochasticA.
RANDOM_BITS = 8

#: What `encode` gives for NaN and infinity where the format has none.
NO_CODE = -1

#: RoundAway: f(rest of the step, whether the code of the smaller magnitude is even, x, random number) -> whether the
#: larger magnitude is taken.
ROUND_AWAY = {
    "NearestTiesToEven": lambda rest, even, x, random: (rest > 0.5) | ((rest == 0.5) & ~even),
    "NearestTiesToAway": lambda rest, even, x, random: rest >= 0.5,
    "TowardZero": lambda rest, even, x, random: np.zeros(x.shape, bool),
    "TowardPositive": lambda rest, even, x, random: (rest > 0) & (x > 0),
    "TowardNegative": lambda rest, even, x, random: (rest > 0) & (x < 0),
    "StochasticA": lambda rest, even, x, random: np.floor(rest * 2**RANDOM_BITS) + random >= 2**RANDOM_BITS,
}

#: SatFinite: the largest number for what is larger. SatPropagate: but infinity stays. OvfInf: infinity for both.
SATURATIONS = ("SatFinite", "SatPropagate", "OvfInf")


@dataclass(frozen=True)
class Format:
    """The parameters of a format; codes of magnitudes are without sign.

    Attributes:
        width: bits of a code. precision: of a significand, the hidden bit included. bias: of exponents.
        largest_code: of the largest finite magnitude.
        infinity: code of infinity, None in the domain Finite. nan: what NaN is encoded as, None: it has no code.
        signed: whether there are negative numbers.
        first: which code of the report is code 0: 1 where the format has no zero, else 0.
    """

    width: int
    precision: int
    bias: int
    largest_code: int
    infinity: int | None = None
    nan: int | None = None
    signed: bool = True
    first: int = 0

    @property
    def sign(self):
        """What a negative number's code is more than that of its magnitude."""
        return 1 << (self.width - 1)

    @property
    def codes(self):
        """All codes."""
        return np.arange(1 << self.width)

    @property
    def magnitudes(self):
        """The finite magnitudes in ascending order, float64."""
        return _values(np.arange(self.largest_code + 1), self)


def binary(width, precision, *, signed=True, extended=True):
    """P3109's own format: binary{width}p{precision}, then s or u, e or f."""
    last = (1 << (width - 1)) - 1 if signed else (1 << width) - 2
    return Format(
        width,
        precision,
        bias=1 << (width - precision - signed),
        largest_code=last - extended,
        infinity=last if extended else None,
        nan=last + 1,
        signed=signed,
    )


def decode(codes, fmt):
    """Decode: float64 values of codes. What lies beyond the last magnitude is NaN: P3109 has one, OCP's FP8 more."""
    negative = fmt.signed & (codes > fmt.sign)
    magnitudes = np.where(negative, codes - fmt.sign, codes)
    values = _values(magnitudes, fmt)
    last = fmt.largest_code
    if fmt.infinity is not None:
        last = fmt.infinity
        values = np.where(magnitudes == last, np.inf, values)
    return np.where(magnitudes > last, np.nan, np.where(negative, -values, values))


def _values(magnitudes, fmt):
    """The values of codes without sign, none of them infinite or NaN."""
    exponents, trailing = np.divmod(magnitudes + fmt.first, 1 << (fmt.precision - 1))
    rest = trailing * 2.0 ** (1 - fmt.precision)
    subnormal = rest * 2.0 ** (1 - fmt.bias)
    return np.where(exponents == 0, subnormal, np.ldexp(1 + rest, exponents - fmt.bias))


def exponents_of(x, fmt):
    """floor(log2 |x|), and no less than that of the smallest normal number."""
    _, exponents = np.frexp(x)  # of fractions from 1/2 on
    return np.maximum(exponents - 1, 1 - fmt.bias)


def round_to_precision(x, fmt, rounding, random=0):
    """RoundToPrecision: the numbers nearest to x, or next to it, that have the format's precision, of any size.

    Args:
        x: float64. rounding: of `ROUND_AWAY`. random: integers below 2**RANDOM_BITS, with StochasticA alone.
    """
    finite = np.isfinite(x)
    number = np.where(finite, x, 0)
    exponents = exponents_of(number, fmt) - fmt.precision + 1
    steps = np.ldexp(np.abs(number), -exponents)
    floor = np.floor(steps)
    even = floor % 2 == 0
    if fmt.precision == 1:
        even = (floor == 0) | ((exponents + fmt.bias) % 2 == 0)
    away = ROUND_AWAY[rounding](steps - floor, even, number, random)
    return np.where(finite, np.copysign(np.ldexp(floor + away, exponents), number), x)


def saturate(x, fmt, saturation, rounding):
    """Saturate: what has no code becomes the smallest or largest number, or infinite."""
    largest = fmt.magnitudes[-1]
    smallest = -largest if fmt.signed else fmt.magnitudes[0]
    within = np.clip(x, smallest, largest)
    if saturation == "SatFinite" or fmt.infinity is None:
        return within
    infinite = np.isinf(x)
    if saturation == "OvfInf":
        infinite |= (x > largest) & (rounding not in ("TowardZero", "TowardNegative"))
        infinite |= (x < smallest) & (rounding not in ("TowardZero", "TowardPositive"))
    return np.where(infinite & ((x > 0) | fmt.signed), np.copysign(np.inf, x), within)


def encode(x, fmt):
    """Encode: the codes of numbers that the format has, int64, or `NO_CODE`."""
    finite = np.isfinite(x)
    magnitudes = np.where(finite, np.abs(x), 0)
    exponents = exponents_of(magnitudes, fmt)
    hidden = 1 << (fmt.precision - 1)
    significands = np.ldexp(magnitudes, fmt.precision - 1 - exponents).astype(np.int64)
    normal = significands % hidden + (exponents + fmt.bias) * hidden
    codes = np.where(significands < hidden, significands, normal) - fmt.first
    codes = np.where(np.isinf(x), NO_CODE if fmt.infinity is None else fmt.infinity, codes)
    codes = np.where(x < 0, codes + fmt.sign, codes)
    return np.where(np.isnan(x), NO_CODE if fmt.nan is None else fmt.nan, codes)


def project(x, fmt, rounding, saturation, random=0):
    """Project: the codes of float64 x."""
    return encode(saturate(round_to_precision(x, fmt, rounding, random), fmt, saturation, rounding), fmt)
