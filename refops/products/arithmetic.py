"""How a tensor core adds: `matmul`, in NumPy, written to be read.

`add_group` is the whole of it. A unit takes a group of products and the accumulator so far, and in one step:

1. Each product is exact, and stays as it comes: two significands of [1, 2) make one of [1, 4), with the sum of their
   exponents. It is *not* normalised. Subnormal elements have the smallest exponent and a significand below 1.
2. The largest exponent of products and accumulator is found, and the others are shifted down to it. What lies below the
   last of `fraction_bits` bits is cut off, toward zero. What is left are multiples of one power of two: their sum is
   exact.
3. The sum becomes the next accumulator: normalised, and cut off to the bits that are kept.

So a small product vanishes beside a large one, and always toward zero. That is the bias of long FP8 sums on Hopper, and
why software there empties the accumulator into a float32 sum now and then (*promotion*).

float64 holds every number on the way exactly: the largest multiple of the lowest bit is below 2^47 (FP4: 16 products of
36, both scales' significands below 4, 35 bits), and at most 33 of them, then below 2^28, are added.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from refops.arguments import as_array, describe_array, shown
from refops.formats import FloatFormat, decode, encode
from refops.hints import Array, ArrayLike, DTypeLike
from refops.products.units import (
    Accumulator,
    OperandFormat,
    Unit,
    format_name,
    require_interval,
    require_operand_format,
    smallest_exponent,
)
from refops.quantization.layout import pad_to_blocks
from refops.rounding import multiply_add, stored
from refops.tiles import ceil_div, cut, for_each, tile_slices

Doubles: TypeAlias = NDArray[np.float64]

#: Rows and columns of a tile of results, whose products of a group lie in memory at once: at most 64 of each.
TILE = 64

ROUND_TO_INTEGER = {"toward_zero": np.trunc, "nearest_even": np.rint}


# --- the unit -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Numbers as significand times 2^exponent, exactly. |significand| is in [1, 2), below 1 for subnormal numbers."""

    significand: Doubles
    exponent: NDArray[np.int32]

    def __getitem__(self, places: Any) -> "Split":
        return Split(self.significand[places], self.exponent[places])

    def __mul__(self, other: "Split") -> "Split":
        """The products, not normalised."""
        return Split(self.significand * other.significand, self.exponent + other.exponent)

    def with_exponent(self, exponent: int, where: Any) -> "Split":
        """The same significands, with another exponent where a mask is set: for zeros."""
        return Split(self.significand, np.where(where, np.int32(exponent), self.exponent))

    def values(self) -> Doubles:
        """The numbers."""
        return np.ldexp(self.significand, self.exponent)


def split(values: Array, smallest: int) -> Split:
    """Split floats of a format whose smallest exponent is given; zeros, infinities and NaN get that exponent."""
    values = values.astype(np.float64)
    _, exponent = np.frexp(np.where(np.isfinite(values), values, 0))  # of significands in [1/2, 1)
    exponent = np.maximum(exponent - 1, smallest)
    return Split(np.ldexp(values, -exponent), exponent)


def add_group(accumulator: Array, summands: Split, unit: Unit) -> Array:
    """Return accumulator + the sum of summands along axis 0, as a unit adds them in one step.

    Args:
        accumulator: float32 (m, n), values of `unit.accumulator`.
        summands: (summands, m, n), as `summands_of_group` gives them.
        unit: whose widths count.

    Returns:
        float32 (m, n), the next accumulator.
    """
    before = split(accumulator, unit.accumulator.smallest_exponent)
    before = before.with_exponent(unit.zero_exponent, before.significand == 0)
    largest = np.maximum(summands.exponent.max(axis=0), before.exponent)
    lowest_bit = largest - unit.fraction_bits

    def multiples(numbers):
        """Each number in units of the lowest bit; what lies below that is cut off."""
        return np.trunc(np.ldexp(numbers.significand, numbers.exponent - lowest_bit))

    total = multiples(summands).sum(axis=0) + multiples(before)
    return rounded(np.ldexp(total, lowest_bit), unit.accumulator)


def rounded(total: Doubles, accumulator: Accumulator) -> Array:
    """Round exact sums to an accumulator's bits: float32, +0 for -0, CUDA's NaN, infinity beyond the largest value."""
    number = split(total, accumulator.smallest_exponent)
    kept = ROUND_TO_INTEGER[accumulator.rounding](np.ldexp(number.significand, accumulator.fraction_bits))
    values = np.ldexp(kept, number.exponent - accumulator.fraction_bits) + 0.0
    return stored(values.astype(accumulator.dtype), np.float32)


@dataclass(frozen=True)
class Panel:
    """Rows of an operand as a unit reads them: the contracted dimension first, padded with zeros to whole groups.

    Attributes:
        elements: (k, rows). Times their scales, where a unit multiplies each product with them.
        scales: (k / added_exactly, rows), where a unit multiplies exact sums with them; else None.
    """

    elements: Split
    scales: Split | None

    def group(self, places: slice, unit: Unit) -> "Panel":
        """The part of one group."""
        shared = slice(places.start // unit.added_exactly, places.stop // unit.added_exactly)
        return Panel(self.elements[places], None if self.scales is None else self.scales[shared])


def panel(values, fmt, scales, block, unit):
    """Return rows (rows, k) of an operand, and scales (rows, blocks) that the unit reads, as a `Panel`."""
    elements = split(pad_to_blocks(values, 1, unit.products).T, smallest_exponent(fmt))
    if scales is None:
        return Panel(elements, None)
    needed = elements.exponent.shape[0] // unit.added_exactly
    repeated = np.ones((len(values), needed), np.float32)  # a scale of 1 for what fills the last group
    given = np.repeat(scales, block // unit.added_exactly, axis=1)[:, :needed]
    repeated[:, : given.shape[1]] = given
    factors = split(repeated.T, smallest_exponent(unit.scale_format))
    return Panel(elements * factors, None) if unit.added_exactly == 1 else Panel(elements, factors)


def summands_of_group(a, b, unit):
    """Return what a unit adds to its accumulator for a group of two `Panel`s: a `Split` (summands, m, n).

    Products; or exact sums of `unit.added_exactly` of them times the significands of their scales, with the exponent of
    the scales alone, however large the sum is. Zeros have the unit's exponent: a product that is 0, a sum all of whose
    products are, or whose scale is. A sum of products that cancel keeps that of its scales.
    """
    products = a.elements[:, :, None] * b.elements[:, None, :]
    if unit.added_exactly == 1:
        return products.with_exponent(unit.zero_exponent, products.significand == 0)
    values = products.values()
    values = values.reshape(-1, unit.added_exactly, *values.shape[1:])
    scales = a.scales[:, :, None] * b.scales[:, None, :]
    is_zero = (values == 0).all(axis=1) | (scales.significand == 0)
    sums = Split(values.sum(axis=1) * scales.significand, scales.exponent)
    return sums.with_exponent(unit.zero_exponent, is_zero)


# --- the product of matrices ----------------------------------------------------------------------


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    unit: Unit,
    *,
    a_format: FloatFormat | DTypeLike,
    b_format: FloatFormat | DTypeLike,
    a_scale: ArrayLike | None = None,
    b_scale: ArrayLike | None = None,
    promotion: int | None = None,
) -> Array:
    """Return a b^T as a unit of a tensor core computes it.

    Groups of products follow each other along k; the accumulator goes from one to the next and starts at 0. Where k is
    no multiple of a group, zeros fill the last one.

    Args:
        a: float32 (m, k), the values of codes, without their scales.
        b: float32 (n, k).
        unit: what `refops.products.unit` returns.
        a_format, b_format: the formats that the values are in: `FloatFormat`, float16 or bfloat16.
        a_scale, b_scale: float32 (m, ceil(k / block)) and (n, ceil(k / block)). A unit with a `scale_format` needs
            them: values of that format, block one of `unit.scale_blocks`. With another, and with `promotion`, which
            is then the block, they are what software multiplies partial sums with. None: no scales.
        promotion: products, a multiple of those that the unit adds at once, after which the accumulator is added to a
            float32 sum, rounded to nearest even, and starts again at 0. With scales the partial sum is multiplied by
            the float32 product of both and added in one FMA. None: never.

    Returns:
        float32 (m, n); values of float16 where the unit accumulates in that and nothing is promoted. NaN is 0x7FFFFFFF.

    Raises:
        TypeError: another dtype than float32. ValueError: shapes that do not fit; formats that the unit does not
            multiply; a value that its format does not have; scales that are missing or that nothing reads; a
            promotion inside a group.
    """
    operands = check_operands(a, b, unit, a_format, b_format, a_scale, b_scale, promotion)
    out = np.empty((len(operands.a), len(operands.b)), np.float32)

    def work(rows, columns):
        out[rows, columns] = _sums(operands.tile(rows, columns))

    for_each([(rows, columns) for rows in cut(out.shape[0], TILE) for columns in cut(out.shape[1], TILE)], work)
    return out


@dataclass(frozen=True)
class Operands:
    """The checked arguments of `matmul`: arrays as they lie in memory.

    Attributes:
        a, b, a_scale, b_scale: float32 arrays, scales None without.
        unit, a_format, b_format, promotion: as given, dtypes as np.dtype.
        block: elements along k of a scale, None without.
    """

    a: Array
    b: Array
    unit: Unit
    a_format: OperandFormat
    b_format: OperandFormat
    a_scale: Array | None
    b_scale: Array | None
    promotion: int | None
    block: int | None

    def tile(self, rows: slice, columns: slice) -> "Operands":
        """What a tile of results needs: rows of a, and those of b that become columns."""
        a_scale, b_scale = self.a_scale, self.b_scale
        return replace(
            self,
            a=self.a[rows],
            b=self.b[columns],
            a_scale=None if a_scale is None else a_scale[rows],
            b_scale=None if b_scale is None else b_scale[columns],
        )


def _sums(tile):
    """The float32 results of a tile: accumulated in one go, or promoted after each interval."""
    if tile.promotion is None:
        return _accumulated(tile)
    total = np.zeros((len(tile.a), len(tile.b)), np.float32)
    for number, interval in enumerate(cut(tile.a.shape[1], tile.promotion)):
        part = replace(tile, a=tile.a[:, interval], b=tile.b[:, interval], a_scale=None, b_scale=None)
        partial = _accumulated(part)
        if tile.a_scale is None:
            total += partial
        else:
            total = multiply_add(partial, tile.a_scale[:, number, None] * tile.b_scale[None, :, number], total)
    return stored(total, np.float32)


def _accumulated(tile):
    """What the accumulator holds after all groups of a tile."""
    unit = tile.unit
    a = panel(tile.a, tile.a_format, tile.a_scale, tile.block, unit)
    b = panel(tile.b, tile.b_format, tile.b_scale, tile.block, unit)
    accumulator = np.zeros((len(tile.a), len(tile.b)), np.float32)
    for places in cut(len(a.elements.exponent), unit.products):
        summands = summands_of_group(a.group(places, unit), b.group(places, unit), unit)
        accumulator = add_group(accumulator, summands, unit)
    return accumulator


# --- checks ---------------------------------------------------------------------------------------


def check_operands(
    a: Any, b: Any, unit: Unit, a_format: Any, b_format: Any, a_scale: Any, b_scale: Any, promotion: int | None
) -> Operands:
    """Return the arguments of `matmul` as `Operands`, raising what it raises."""
    if not isinstance(unit, Unit):
        raise TypeError(f"unit must be a Unit, what refops.products.unit returns; got {shown(unit)}")
    a_format, b_format = require_operand_format(a_format, "a_format"), require_operand_format(b_format, "b_format")
    if not unit.takes(a_format, b_format):
        taken = ", ".join(map(format_name, unit.formats))
        raise ValueError(
            f"a_format and b_format must be formats that the unit {unit.card} {unit.name} multiplies, of {taken}; "
            f"got {format_name(a_format)} and {format_name(b_format)}"
        )
    a, b = _float32_matrix(a, "a"), _float32_matrix(b, "b")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"a and b must have the same last dimension, which is contracted; got {a.shape} and {b.shape}")
    promotion = require_interval(promotion, unit, "promotion")
    a_scale, b_scale, block = _checked_scales(a_scale, b_scale, unit, promotion, (len(a), len(b), a.shape[1]))
    _require_values(a, a_format, "a")
    _require_values(b, b_format, "b")
    if unit.scale_format is not None:
        _require_values(a_scale, unit.scale_format, "a_scale")
        _require_values(b_scale, unit.scale_format, "b_scale")
    return Operands(a, b, unit, a_format, b_format, a_scale, b_scale, promotion, block)


def _float32_matrix(value, name):
    array = as_array(value, name)
    if array.dtype != np.float32:
        raise TypeError(f"{name} must be float32; got {describe_array(array)}")
    if array.ndim != 2:
        raise ValueError(f"{name} must have two dimensions; got shape {array.shape}")
    return array


def _checked_scales(a_scale, b_scale, unit, promotion, sizes):
    """Return the scales as arrays, and their block along k; without scales, None three times."""
    if unit.scale_format is not None and promotion is not None:
        raise ValueError(f"promotion must be None with a unit that reads scales, {unit.name}; got {promotion}")
    if a_scale is None and b_scale is None:
        if unit.scale_format is not None:
            raise ValueError(f"a_scale and b_scale must be given for the unit {unit.card} {unit.name}; got None")
        return None, None, None
    if a_scale is None or b_scale is None:
        raise ValueError(f"a_scale and b_scale must both be given or None; got {shown(a_scale)} and {shown(b_scale)}")
    if unit.scale_format is None and promotion is None:
        raise ValueError(
            f"a_scale and b_scale must be None with the unit {unit.card} {unit.name}, which reads none, unless "
            f"promotion is their block; got promotion=None"
        )
    blocks = (promotion,) if unit.scale_format is None else unit.scale_blocks
    a_scale, b_scale = _float32_matrix(a_scale, "a_scale"), _float32_matrix(b_scale, "b_scale")
    m, n, k = sizes
    for block in blocks:
        count = ceil_div(k, block)
        if a_scale.shape == (m, count) and b_scale.shape == (n, count):
            return a_scale, b_scale, block
    shapes = " or ".join(f"({m}, {ceil_div(k, block)}) and ({n}, {ceil_div(k, block)})" for block in blocks)
    raise ValueError(
        f"a_scale and b_scale must be of shape {shapes}, one for {' or '.join(map(str, blocks))} elements along k; "
        f"got {a_scale.shape} and {b_scale.shape}"
    )


def _require_values(values, fmt, name):
    """Raise ValueError unless every one of (rows, k) float32 values is one of a format's."""

    def work(rows, columns):
        tile = values[rows, columns]
        if isinstance(fmt, FloatFormat):
            nearest = decode(encode(tile, fmt, saturate=False), fmt)
        else:
            nearest = tile.astype(fmt).astype(np.float32)
        wrong = (nearest != tile) & ~(np.isnan(nearest) & np.isnan(tile))
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            place = f"{rows.start + row}, {columns.start + column}"
            raise ValueError(f"{name} must hold values of {format_name(fmt)}; got {tile[row, column]!r} at [{place}]")

    for_each(tile_slices(values.shape), work)
