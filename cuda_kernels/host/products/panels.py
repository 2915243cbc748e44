"""Panels: what a unit reads of 64 rows of an operand along a piece of k, in the order in which lanes of a CPU take it.

A lane is a row of the operand. What lanes hold of one place along k are neighbours in memory, so that loops over lanes
become vector instructions. Where products are aligned one by one, a panel has for each element

    value * 2^(1 - top)    float32; top is the largest exponent in the row's group, and 2^-127 would be subnormal
    exponent - top         int8, at least `FAR`

and of each group the exponent `top`, with that of its scale. Products of such values stay in float32's range, whatever
the operands' was, and their exponents in int8's. Where groups are added exactly, it has the value times the scale's
significand, which products and sums hold exactly, and of each group which elements are not 0.
"""

from collections import namedtuple

import numpy as np

from cuda_kernels.host.compile import routine
from cuda_kernels.simt import I32, U32, U64, F, as_f32, as_i32, device, select

#: Rows of a panel, and elements along k: whole groups of any unit.
LANES, DEPTH = 64, 256
#: An exponent further below a group's largest is treated as this far below.
FAR = np.int8(-64)
#: The exponent of a group in which everything is 0, below all others.
NOTHING = np.int32(-4096)
#: Elements along k that are copied of a row before the next row's: those of a line of the cache.
LINE = 16

#: Where products are aligned. Field, meaning:
#:   values, exponents     float32 and int8 (DEPTH * LANES,), flat: strides are constants, which LLVM must see to find
#:                         out that nothing overlaps
#:   tops                  int32 (groups, LANES)
#:   special               int32 (groups, LANES): 1 where an element or the scale is infinite or NaN
Aligned = namedtuple("Aligned", "values exponents tops special")

#: Where groups are added exactly. Field, meaning:
#:   values, tops, special     as of `Aligned`; tops are the scales' exponents
#:   nonzero               int32 (groups, LANES): bit p where element p of a group counts
Exact = namedtuple("Exact", "values nonzero tops special")


@device
def larger(a, b):
    """The larger of two numbers of a type."""
    return select(a > b, a, b)


@device
def exponent_of(x, smallest):
    """The exponent of a finite float32, at least `smallest`."""
    return larger(I32(I32(as_i32(x) >> I32(23) & I32(255)) - I32(127)), smallest)


@device
def is_special(x):
    """Whether a float32 is infinite or NaN."""
    return I32(as_i32(x) & I32(0x7F800000)) == I32(0x7F800000)


@device
def power_of_2(n):
    """2^n in float32, for n from -126 to 127."""
    return as_f32(U32(I32(n + I32(127)) << I32(23)))


@device
def double_power_of_2(n):
    """2^n in float64, for n from -1022 to 1023."""
    return np.int64((np.int64(n) + 1023) << 52).view(np.float64)


@routine
def element(matrix, row, column):
    """An element of a `Strided`."""
    return matrix.data[matrix.start + row * matrix.outer_stride + column * matrix.inner_stride]


@routine
def new_aligned(panels, groups):
    """Memory for an `Aligned` of so many panels, whose arrays have one more dimension, with so many groups each."""
    return Aligned(
        np.empty((panels, DEPTH * LANES), np.float32),
        np.empty((panels, DEPTH * LANES), np.int8),
        np.empty((panels, groups, LANES), np.int32),
        np.empty((panels, groups, LANES), np.int32),
    )


@routine
def one_aligned(panels, i):
    """One of several panels."""
    return Aligned(panels.values[i], panels.exponents[i], panels.tops[i], panels.special[i])


@routine
def new_exact(panels, groups):
    """As `new_aligned`, for an `Exact`."""
    return Exact(
        np.empty((panels, DEPTH * LANES), np.float32),
        np.empty((panels, groups, LANES), np.int32),
        np.empty((panels, groups, LANES), np.int32),
        np.empty((panels, groups, LANES), np.int32),
    )


@routine
def one_exact(panels, i):
    """One of several panels."""
    return Exact(panels.values[i], panels.nonzero[i], panels.tops[i], panels.special[i])


@routine
def gather(matrix, row, column, depth, values):
    """Copy values[c * LANES + lane] from rows and columns of a matrix, 0 behind its ends."""
    lanes, columns = min(LANES, matrix.outer - row), min(depth, matrix.inner - column)
    if lanes < LANES or columns < depth:
        values[: depth * LANES] = F(0)
    start = matrix.start + row * matrix.outer_stride + column * matrix.inner_stride
    for first in range(0, columns, LINE):
        for lane in range(lanes):
            at = start + lane * matrix.outer_stride
            for c in range(first, min(first + LINE, columns)):
                values[U64(c * LANES + lane)] = matrix.data[U64(at + c * matrix.inner_stride)]


@routine
def gather_scales(scales, row, place, found):
    """Copy the scales of 64 rows at a place along k; 1 behind the ends."""
    found[:] = F(1)
    if place < scales.inner:
        for lane in range(min(LANES, scales.outer - row)):
            found[lane] = element(scales, row + lane, place)


@routine
def fill_aligned(panel, matrix, scales, row, column, depth, smallest, unit):
    """Fill an `Aligned` with rows from `row` and columns from `column` on; `smallest` is the format's exponent."""
    gather(matrix, row, column, depth, panel.values)
    values, exponents = panel.values.reshape(DEPTH, LANES), panel.exponents.reshape(DEPTH, LANES)
    factors, scale = np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    smallest, scale_smallest = I32(smallest), I32(unit.scale_smallest)
    for g in range(depth // unit.group):
        tops, special = panel.tops[g], panel.special[g]
        first, last = g * unit.group, (g + 1) * unit.group
        tops[:] = NOTHING
        special[:] = I32(0)
        for c in range(first, last):
            line = values[c]
            for j in range(LANES):
                x = line[j]
                counts = (x != F(0)) & (not is_special(x))
                tops[j] = larger(tops[j], select(counts, exponent_of(x, smallest), NOTHING))
                special[j] = I32(special[j] | select(is_special(x), I32(1), I32(0)))
        for j in range(LANES):
            factors[j] = power_of_2(select(tops[j] == NOTHING, I32(0), I32(I32(1) - tops[j])))
        for c in range(first, last):
            line, below = values[c], exponents[c]
            for j in range(LANES):
                x = line[j]
                counts = (x != F(0)) & (not is_special(x))
                distance = larger(I32(exponent_of(x, smallest) - tops[j]), I32(FAR))
                below[j] = np.int8(select(counts, distance, I32(FAR)))
                line[j] = select(counts, x * factors[j], F(0))
        if unit.block:
            gather_scales(scales, row, (column + first) // unit.block, scale)
            for j in range(LANES):
                tops[j] = I32(tops[j] + exponent_of(scale[j], scale_smallest))
                special[j] = I32(special[j] | select(is_special(scale[j]), I32(1), I32(0)))


def make_fill_exact(exactly):
    """Return `fill`, which is to an `Exact` what `fill_aligned` is to an `Aligned`."""

    @routine
    def fill(panel, matrix, scales, row, column, depth, smallest, unit):
        gather(matrix, row, column, depth, panel.values)
        values, scale = panel.values.reshape(DEPTH, LANES), np.empty(LANES, np.float32)
        scale_smallest = I32(unit.scale_smallest)
        for g in range(depth // exactly):
            tops, special, nonzero = panel.tops[g], panel.special[g], panel.nonzero[g]
            gather_scales(scales, row, (column + g * exactly) // unit.block, scale)
            nonzero[:] = I32(0)
            for j in range(LANES):
                s, top = scale[j], exponent_of(scale[j], scale_smallest)
                tops[j], special[j] = top, select(is_special(s), I32(1), I32(0))
                significand = F(np.float64(s) * double_power_of_2(I32(-top)))
                scale[j] = select(is_special(s), F(0), significand)
            for p in range(exactly):
                line, bit = values[g * exactly + p], I32(I32(1) << I32(p))
                for j in range(LANES):
                    x = line[j] * scale[j]
                    nonzero[j] = I32(nonzero[j] | select(x != F(0), bit, I32(0)))
                    line[j] = x

    return fill
