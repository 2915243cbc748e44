"""Matrix products as tensor cores compute them, bit for bit, as far as tests on cards have established.

    unit(card, a_format, b_format)      how a card multiplies two formats: `Unit`, a row of `UNITS`
    matmul(a, b, unit, ...)             the arithmetic: values of codes in, float32 sums out
    product_of(card, a, b)              which unit multiplies two scalings, and where their scales apply: `Product`
    gemm(a, b, card)                    two quantized tensors: scales, alpha, bias, one rounding

What is known of cards, and from whom: `refops.products.units`. What software around the units does:
`refops.products.cards`.
"""

from refops.products.arithmetic import Operands, check_operands, matmul
from refops.products.cards import Product, product_of
from refops.products.quantized import gemm
from refops.products.units import CARDS, UNITS, Accumulator, Unit, smallest_exponent, unit

__all__ = [
    "CARDS",
    "UNITS",
    "Accumulator",
    "Operands",
    "Product",
    "Unit",
    "check_operands",
    "gemm",
    "matmul",
    "product_of",
    "smallest_exponent",
    "unit",
]
