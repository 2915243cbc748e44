"""One result of a tensor core in rational arithmetic, written from the description, and the numbers of each unit again.

It shares no code with `refops.products`: fractions instead of float64, one result instead of tiles, rules for NaN and
infinity written out instead of left to float arithmetic.
"""

from fractions import Fraction
from math import copysign, inf, isinf, isnan, nan
from typing import NamedTuple


class Numbers(NamedTuple):
    """What is known of a unit."""

    products: int
    fraction_bits: int
    zero_exponent: int
    kept_bits: int
    smallest: int
    nearest: bool
    added_exactly: int = 1


#: (card, name) -> numbers.
NUMBERS = {
    ("ampere", "16 bits"): Numbers(8, 24, -132, 23, -126, False),
    ("ampere", "16 bits in float16"): Numbers(8, 24, -20, 10, -14, True),
    ("hopper", "16 bits"): Numbers(16, 25, -133, 23, -126, False),
    ("hopper", "16 bits in float16"): Numbers(16, 25, -21, 10, -14, True),
    ("hopper", "FP8"): Numbers(32, 13, -133, 13, -126, False),
    ("hopper", "FP8 in float16"): Numbers(32, 13, -21, 10, -14, True),
    ("blackwell", "16 bits"): Numbers(16, 25, -133, 23, -126, False),
    ("blackwell", "16 bits in float16"): Numbers(16, 25, -21, 10, -14, True),
    ("blackwell", "f8f6f4"): Numbers(32, 25, -133, 23, -126, False),
    ("blackwell", "f8f6f4 in float16"): Numbers(32, 25, -21, 10, -14, True),
    ("blackwell", "mxf4"): Numbers(64, 35, -139, 23, -126, False, 16),
    ("blackwell", "nvf4"): Numbers(64, 35, -139, 23, -126, False, 16),
    ("blackwell", "mxf8f6f4"): Numbers(32, 25, -133, 23, -126, False),
}

#: The exponent of the smallest normal number of each format.
SMALLEST = {"e4m3": -6, "e5m2": -14, "e3m2": -2, "e2m3": 0, "e2m1": 0, "e8m0": -127, "float16": -14, "bfloat16": -126}

FLOAT32_SUM = Numbers(1, 0, 0, 23, -126, True)


def dot(a, b, numbers, smallest, scales=None, scale_smallest=None, block=None):
    """The accumulator, a float, after all products of two rows of floats.

    Args:
        smallest: the smallest exponents of the two formats.
        scales: two rows of floats, one for `block` elements; None: there are none.
        scale_smallest: the smallest exponent of their format.
    """
    c = 0.0
    for start in range(0, len(a), numbers.products):
        summands = []
        for first in range(start, start + numbers.products, numbers.added_exactly):
            pairs = [(a[i], b[i]) for i in range(first, min(first + numbers.added_exactly, len(a)))]
            factors = [row[first // block] for row in scales] if scales is not None and first < len(a) else []
            summands.append(_summand(pairs, factors, numbers, smallest, scale_smallest))
        c = _step(c, summands, numbers)
    return c


def promoted(a, b, numbers, smallest, interval, scales=None):
    """A float32 sum of accumulators of `interval` products, with scales of each: one FMA."""
    total = 0.0
    for number, start in enumerate(range(0, len(a), interval)):
        partial = dot(a[start : start + interval], b[start : start + interval], numbers, smallest)
        factor = 1.0
        if scales is not None:
            factor = _float32_product(scales[0][number], scales[1][number])
        product = _special_product(partial, factor)
        if product is not None or not _finite(total):
            total = (0.0 if product is None else product) + total
        else:
            total = rounded(Fraction(partial) * Fraction(factor) + Fraction(total), FLOAT32_SUM)
    return total


def _summand(pairs, factors, numbers, smallest, scale_smallest):
    """(significand, exponent, whether it is zero) of a product or an exact sum, or a special value."""
    special = [_special_product(x, y) for x, y in pairs] + [nan for factor in factors if isnan(factor)]
    special = [value for value in special if value is not None]
    if special:
        return sum(special)
    scaled = [_parts(factor, scale_smallest) for factor in factors]
    significand, exponent = Fraction(1), 0
    for s, e in scaled:
        significand, exponent = significand * s, exponent + e
    if numbers.added_exactly > 1:
        products = [Fraction(x) * Fraction(y) for x, y in pairs]
        return significand * sum(products), exponent, not any(products) or not significand
    if not pairs:
        return Fraction(0), 0, True
    ((x, y),) = pairs
    (sx, ex), (sy, ey) = _parts(x, smallest[0]), _parts(y, smallest[1])
    return significand * sx * sy, exponent + ex + ey, not sx * sy


def _step(c, summands, numbers):
    special = [one for one in [c, *summands] if isinstance(one, float) and not _finite(one)]
    if special:
        return sum(special)
    significand, exponent = _parts(c, numbers.smallest)
    terms = [*summands, (significand, exponent, not significand)]
    terms = [(s, numbers.zero_exponent if zero else e) for s, e, zero in terms]
    unit = Fraction(2) ** (max(e for _, e in terms) - numbers.fraction_bits)
    return rounded(unit * sum(int(s * Fraction(2) ** e / unit) for s, e in terms), numbers)


def _special_product(x, y):
    """NaN or infinity of a product, None where it is finite."""
    if isnan(x) or isnan(y):
        return nan
    if isinf(x) or isinf(y):
        return nan if x == 0 or y == 0 else copysign(inf, x) * copysign(1, y)
    return None


def _float32_product(x, y):
    special = _special_product(x, y)
    return rounded(Fraction(x) * Fraction(y), FLOAT32_SUM) if special is None else special


def _finite(x):
    return not isnan(x) and not isinf(x)


def _parts(value, smallest):
    """(significand, exponent) of a finite float."""
    value = Fraction(value)
    exponent = max(_exponent(value), smallest) if value else smallest
    return value / Fraction(2) ** exponent, exponent


def _exponent(value):
    """floor(log2 |value|) of a fraction other than 0."""
    value = abs(value)
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1


def rounded(value, numbers):
    """The nearest float with the bits of an accumulator, or the next toward zero; infinity where it has none."""
    if not value:
        return 0.0
    unit = Fraction(2) ** (max(_exponent(value), numbers.smallest) - numbers.kept_bits)
    steps = round(value / unit) if numbers.nearest else int(value / unit)  # int: toward zero; round: ties to even
    limit = Fraction(2) ** (2 - numbers.smallest)
    result = steps * unit
    return float(result) if abs(result) < limit else copysign(inf, result)
