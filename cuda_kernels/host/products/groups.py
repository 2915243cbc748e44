"""One step of a unit, for one row of results: a group of products is added to 64 accumulators, a lane each.

`make_add_aligned` and `make_add_exact` return `add(left, row, right, first, unit, scratch, accumulators)`:

    left, right       panels; `row` is a lane of the left one, all lanes of the right one take part
    first             where the group begins in them
    accumulators      float32 (LANES,), before and afterwards

It returns whether lanes are left to do, those marked in `scratch.left`: what the accumulators were is in
`scratch.before`. They are done one by one by `add_any`, the same step for any operands.
"""

from collections import namedtuple

import numpy as np

from cuda_kernels.host.compile import inlined, routine
from cuda_kernels.host.products.panels import (
    FAR,
    LANES,
    NOTHING,
    double_power_of_2,
    element,
    exponent_of,
    is_special,
    larger,
    power_of_2,
)
from cuda_kernels.simt import I32, U64, F, device, select

D = np.float64
INF, NAN = F(np.inf), F(np.nan)
#: Multiplied with this power of 2, every significand is below 1; the power is in float32's range.
LEAST_SHIFT = np.int32(-64)
#: A sum so far below the largest exponent is cut off whole: it has fewer bits, those that are kept included.
SUMS_BITS = np.int32(128)

#: Memory of a step, an element for each lane. Field, meaning:
#:   largest           int8: the largest exponent of the products, below the tops
#:   exponents         int32: the largest of all summands
#:   factors           float32: what products are multiplied by to become integers
#:   integers          int32: sums of such integers
#:   sums              float32: sums of products, with tops as their exponents
#:   totals            float64: the sum of all summands
#:   before            float32: accumulators before the step
#:   left              int32: not 0 where it is left to `add_any`
Scratch = namedtuple("Scratch", "largest exponents factors integers sums tops totals before left")


@routine
def new_scratch(parts):
    """Memory for a `Scratch`; sums and tops are of `parts` groups, one behind the other."""
    return Scratch(
        np.empty(LANES, np.int8),
        np.empty(LANES, np.int32),
        np.empty(LANES, np.float32),
        np.empty(LANES, np.int32),
        np.empty(parts * LANES, np.float32),
        np.empty(parts * LANES, np.int32),
        np.empty(LANES, np.float64),
        np.empty(LANES, np.float32),
        np.empty(LANES, np.int32),
    )


@device
def exponent_of_accumulator(c, unit):
    """The exponent of a finite accumulator."""
    return select(c == F(0), I32(unit.zero_exponent), exponent_of(c, I32(unit.smallest_exponent)))


@device
def cut_off(summand, exponent, largest, unit):
    """summand * 2^exponent in units of the lowest bit that is kept beside a largest exponent, cut off: float64."""
    shift = I32(I32(I32(unit.fraction_bits) + exponent) - largest)
    return np.trunc(D(summand) * double_power_of_2(shift))


@device
def accumulated(total, largest, before, unit):
    """The accumulator that a sum becomes, float32; one that was infinite or NaN stays.

    Args:
        total: float64, an integer in units of the lowest bit that was kept.
        largest: the largest exponent of the summands. before: the accumulator before.
    """
    low = I32(largest - I32(unit.fraction_bits))
    exponent = I32(I32((np.float64(total).view(np.int64) >> 52) & 2047) - I32(1023))
    quantum = I32(larger(exponent, I32(I32(unit.smallest_exponent) - low)) - I32(unit.kept_bits))
    kept = total * double_power_of_2(I32(-quantum))
    kept = select(unit.nearest != 0, np.rint(kept), np.trunc(kept))
    value = F(kept * double_power_of_2(I32(quantum + low)) + D(0))
    value = select(value >= unit.infinity, INF, select(value <= -unit.infinity, -INF, value))
    return select(is_special(before), before, value)


@inlined
def accumulate(scratch, unit, accumulators):
    """Fill accumulators from totals."""
    totals, exponents, before = scratch.totals, scratch.exponents, scratch.before
    for j in range(LANES):
        accumulators[j] = accumulated(totals[j], exponents[j], before[j], unit)


# --- products aligned one by one --------------------------------------------------------------------


def make_add_aligned(chunk):
    """Return `add` for groups of a multiple of `chunk` products, so many that int32 holds their sum."""

    @inlined
    def find_largest(left, row, right, first, group, largest):
        largest[:] = np.int8(2 * FAR)
        for start in range(first, first + group, chunk):
            a, b = left.exponents[start * LANES + row :], right.exponents[start * LANES :]
            for j in range(LANES):
                found = largest[j]
                for p in range(chunk):
                    found = larger(found, np.int8(a[U64(p * LANES)] + b[U64(p * LANES + j)]))
                largest[j] = found

    @inlined
    def add_products(left, row, right, first, group, scratch):
        factors, integers, totals = scratch.factors, scratch.integers, scratch.totals
        for start in range(first, first + group, chunk):
            a, b = left.values[start * LANES + row :], right.values[start * LANES :]
            for j in range(LANES):
                total, factor = I32(0), factors[j]
                for p in range(chunk):
                    total = I32(total + I32(a[U64(p * LANES)] * b[U64(p * LANES + j)] * factor))
                integers[j] = total
            for j in range(LANES):
                totals[j] += D(integers[j])

    @inlined
    def add(left, row, right, first, unit, scratch, accumulators):
        g, largest, exponents, factors = first // unit.group, scratch.largest, scratch.exponents, scratch.factors
        find_largest(left, row, right, first, unit.group, largest)
        top, tops, special, specials = left.tops[g, row], right.tops[g], left.special[g, row], right.special[g]
        before, totals, to_do, any_left = scratch.before, scratch.totals, scratch.left, I32(0)
        for j in range(LANES):
            c, base = accumulators[j], I32(top + tops[j])
            exponent = exponent_of_accumulator(c, unit)
            unsure = (largest[j] <= FAR) & (exponent < I32(base + I32(FAR)))
            undone = I32(I32(special | specials[j]) | select(unsure, I32(1), I32(0)))
            exponent = larger(exponent, I32(base + I32(largest[j])))
            shift = I32(I32(base + I32(unit.fraction_bits - 2)) - exponent)  # values are doubled, both of a product's
            factors[j] = power_of_2(larger(shift, LEAST_SHIFT))
            exponents[j], before[j], to_do[j] = exponent, c, undone
            any_left = I32(any_left | undone)
        for j in range(LANES):
            totals[j] = cut_off(before[j], I32(0), exponents[j], unit)
        add_products(left, row, right, first, unit.group, scratch)
        accumulate(scratch, unit, accumulators)
        return any_left != I32(0)

    return add


@routine
def add_any(a, a_row, b, b_row, a_scale, b_scale, first, unit, c):
    """Return an accumulator after a step in which products are aligned one by one: any elements, any exponents."""
    scale, shift = F(1), I32(0)
    if unit.block:
        one, other = element(a_scale, a_row, first // unit.block), element(b_scale, b_row, first // unit.block)
        scale = one * F(0) + other * F(0) + F(1)  # NaN where one is
        smallest = I32(unit.scale_smallest)
        shift = I32(exponent_of(one, smallest) + exponent_of(other, smallest))
    special, largest = D(0), exponent_of_accumulator(c, unit)
    last = min(first + unit.group, a.inner)
    for p in range(first, last):
        x, y = element(a, a_row, p), element(b, b_row, p)
        product = D(x) * D(y) * D(scale)
        if not np.isfinite(product):
            special += product
        elif product != D(0):
            exponent = exponent_of(x, I32(unit.a_smallest)) + exponent_of(y, I32(unit.b_smallest)) + shift
            largest = larger(largest, I32(exponent))
    if special != D(0) or is_special(c):  # also where it is NaN
        return F(D(c) + special)
    total = cut_off(c, I32(0), largest, unit)
    for p in range(first, last):
        total += cut_off(D(element(a, a_row, p)) * D(element(b, b_row, p)), shift, largest, unit)
    return accumulated(total, largest, c, unit)


# --- groups added exactly ---------------------------------------------------------------------------


def make_add_exact(exactly):
    """Return `add` for groups of some times `exactly` products, which are added before they are aligned."""

    @inlined
    def add_exactly(left, row, right, first, sums):
        a, b = left.values[first * LANES + row :], right.values[first * LANES :]
        for j in range(LANES):
            total = F(0)
            for p in range(exactly):
                total += a[U64(p * LANES)] * b[U64(p * LANES + j)]
            sums[j] = total

    @inlined
    def add(left, row, right, first, unit, scratch, accumulators):
        exponents, before, totals = scratch.exponents, scratch.before, scratch.totals
        parts = unit.group // exactly
        for j in range(LANES):
            before[j], exponents[j] = accumulators[j], exponent_of_accumulator(accumulators[j], unit)
        for part in range(parts):
            g, tops = first // exactly + part, scratch.tops[part * LANES :]
            add_exactly(left, row, right, g * exactly, scratch.sums[part * LANES :])
            top, right_tops, nonzero, others = left.tops[g, row], right.tops[g], left.nonzero[g, row], right.nonzero[g]
            special, specials = left.special[g, row], right.special[g]
            for j in range(LANES):
                tops[j] = select(I32(nonzero & others[j]) != I32(0), I32(top + right_tops[j]), NOTHING)
                exponents[j] = larger(exponents[j], tops[j])
                before[j] = select(I32(special | specials[j]) != I32(0), NAN, before[j])
        for j in range(LANES):
            totals[j] = cut_off(accumulators[j], I32(0), exponents[j], unit)
        for part in range(parts):
            sums, tops = scratch.sums[part * LANES :], scratch.tops[part * LANES :]
            for j in range(LANES):
                exponent = larger(tops[j], I32(exponents[j] - SUMS_BITS))
                totals[j] += cut_off(sums[j], exponent, exponents[j], unit)
        accumulate(scratch, unit, accumulators)
        return False

    return add
