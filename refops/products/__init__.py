"""Products of matrices as tensor cores compute them, bit for bit as far as tests on cards have found it out.

    unit(card, a_format, b_format)      how a card multiplies two formats: `Unit`, a row of `UNITS`
    matmul(a, b, unit, ...)             the arithmetic: values of codes in, float32 sums out

What is known of cards, and from whom: `refops.products.units`.
"""

from refops.products.arithmetic import Operands, check_operands, matmul
from refops.products.units import CARDS, UNITS, Accumulator, Unit, smallest_exponent, unit

__all__ = [
    "CARDS",
    "UNITS",
    "Accumulator",
    "Operands",
    "Unit",
    "check_operands",
    "matmul",
    "smallest_exponent",
    "unit",
]
