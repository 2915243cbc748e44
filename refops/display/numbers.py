"""Numbers in a few characters."""

import math
from itertools import pairwise

import numpy as np


def significant(value, digits=3):
    """A short number; "-" for None."""
    return "-" if value is None else f"{value:.{digits}g}"


def percent(share):
    """A share in percent, never rounded to 0 if it is positive, nor to 100 if it is less; "-" for None."""
    if share is None:
        return "-"
    if share in (0, 1):
        return "0" if share == 0 else "100.00"
    if 100 * share < 0.01:
        return "<0.01"
    return f"{100 * share:.2f}" if 100 * share < 99.995 else ">99.99"


def decibels(measurement):
    """The SQNR of a `Measurement`: "exact" and "-inf" at the ends, "-" where there is none."""
    return sqnr(measurement.sqnr_db)


def sqnr(value):
    """An SQNR in dB, or None, as `decibels` shows a measurement's."""
    if value is None:
        return "-"
    if math.isinf(value):
        return "exact" if value > 0 else "-inf"
    return f"{value:.1f}"


def power_of_two(value, digits=6):
    """A number, as a power of two where that is shorter."""
    mantissa, exponent = math.frexp(value)
    if mantissa == 0.5 and (value < 0.01 or value >= 2**20):
        return f"2^{exponent - 1}"
    return f"{value:.{digits}g}"


def hexadecimal(code, fmt):
    """A code of a format, as many digits as its bits need."""
    return f"0x{code:0{-(-fmt.bits // 4)}X}"


def binary(code, fmt):
    """The bits of a code, its fields apart: sign, exponent and mantissa of a float."""
    text, ends = f"{code:0{fmt.bits}b}", np.cumsum([0, *fmt.fields.values()])
    return " ".join(text[first:end] for first, end in pairwise(ends) if end > first)
