"""The loop over tiles of results: panels of a piece of k, and all steps of the unit between them."""

from functools import cache

import numpy as np

from cuda_kernels.host.compile import compiled, fused_multiply_add, inlined, routine
from cuda_kernels.host.products.groups import add_any, make_add_aligned, make_add_exact, new_scratch
from cuda_kernels.host.products.panels import (
    DEPTH,
    LANES,
    element,
    fill_aligned,
    make_fill_exact,
    new_aligned,
    new_exact,
    one_aligned,
    one_exact,
)
from cuda_kernels.host.tiles import LOOP, reader, size
from cuda_kernels.operands import Stored, Strided, UnitNumbers
from cuda_kernels.simt import U32, F, as_f32, device, select

NAN_BITS = U32(0x7FFFFFFF)


@device
def stored(x):
    """A float32 as it is stored: CUDA's NaN."""
    return select(x != x, as_f32(NAN_BITS), x)


@routine
def promote(accumulators, totals, a_scale, b_scale, row, column, interval):
    """Add the partial sums of a row to its float32 sums, times the scales of the interval where it has some."""
    if a_scale.outer:
        scale = np.ones(LANES, np.float32)
        for lane in range(min(LANES, b_scale.outer - column)):
            scale[lane] = element(a_scale, row, interval) * element(b_scale, column + lane, interval)
        for lane in range(LANES):
            totals[lane] = fused_multiply_add(accumulators[lane], scale[lane], totals[lane])
    else:
        for lane in range(LANES):
            totals[lane] += accumulators[lane]
    accumulators[:] = F(0)


def make_walk(shared, new_panels, one_panel, fill, add):
    """Return `loop(words, first, last)` over tiles of results.

    Words are those of both matrices, their scales, the results and the unit. A tile is `unit.down` times `unit.across`
    squares of 64 results. Of each piece of k panels are made of all its columns, then of 64 of its rows at a time.

    Args:
        shared: products that are added exactly.
        new_panels, one_panel, fill, add: as in `panels` and `groups`.
    """
    read_matrix, read_out, read_unit = reader(Strided), reader(Stored, data=F), reader(UnitNumbers)
    at_b, at_scales, at_out = size(Strided), 2 * size(Strided), 4 * size(Strided)
    at_unit = at_out + size(Stored)

    @inlined
    def add_rows(left, right, at, place, rows, columns, matrices, unit, scratch, accumulators):
        """A step of each row of a square at place (row, column, k), whose group begins at `at` in the panels."""
        a, b, a_scale, b_scale = matrices
        top, start, k = place
        for row in range(rows):
            sums = accumulators[row]
            if add(left, row, right, at, unit, scratch, sums):
                for lane in range(columns):
                    if scratch.left[lane]:
                        before = scratch.before[lane]
                        sums[lane] = add_any(a, top + row, b, start + lane, a_scale, b_scale, k + at, unit, before)

    def loop(words, first, last):
        a, b, a_scale = read_matrix(words, 0), read_matrix(words, at_b), read_matrix(words, at_scales)
        b_scale, out, unit = read_matrix(words, at_scales + at_b), read_out(words, at_out), read_unit(words, at_unit)
        matrices, group = (a, b, a_scale, b_scale), unit.group
        end, piece = (a.inner + group - 1) // group * group, DEPTH // group * group
        groups = piece // (shared if shared > 1 else group)
        lefts, rights, scratch = new_panels(1, groups), new_panels(unit.across, groups), new_scratch(group // shared)
        left = one_panel(lefts, 0)
        squares = (unit.down, unit.across, LANES, LANES)
        accumulators, totals = np.empty(squares, np.float32), np.empty(squares, np.float32)
        height, width = unit.down * LANES, unit.across * LANES
        in_a_row = (out.inner + width - 1) // width
        for tile in range(first, last):
            tile_top, tile_start = tile // in_a_row * height, tile % in_a_row * width
            bottom, side = min(out.outer, tile_top + height), min(out.inner, tile_start + width)
            accumulators[:] = F(0)
            totals[:] = F(0)
            for k in range(0, end, piece):
                depth = min(piece, end - k)
                for start in range(tile_start, side, LANES):
                    right = one_panel(rights, (start - tile_start) // LANES)
                    fill(right, b, b_scale, start, k, depth, unit.b_smallest, unit)
                for top in range(tile_top, bottom, LANES):
                    i, rows = (top - tile_top) // LANES, min(LANES, bottom - top)
                    fill(left, a, a_scale, top, k, depth, unit.a_smallest, unit)
                    for start in range(tile_start, side, LANES):
                        j, columns = (start - tile_start) // LANES, min(LANES, side - start)
                        right, sums, place = one_panel(rights, j), accumulators[i, j], (top, start, k)
                        for at in range(0, depth, group):
                            add_rows(left, right, at, place, rows, columns, matrices, unit, scratch, sums)
                            done = k + at + group
                            if unit.promotion and (done % unit.promotion == 0 or done == end):
                                interval = (done - 1) // unit.promotion
                                for row in range(rows):
                                    total = totals[i, j, row]
                                    promote(sums[row], total, a_scale, b_scale, top + row, start, interval)
            results = totals if unit.promotion else accumulators
            for row in range(tile_top, bottom):
                i, r = (row - tile_top) // LANES, (row - tile_top) % LANES
                for column in range(tile_start, side):
                    j, lane = (column - tile_start) // LANES, (column - tile_start) % LANES
                    out.data[row * out.inner + column] = stored(results[i, j, r, lane])

    return loop


@cache
def aligned(chunk):
    """The loop for units that align products one by one, and add a multiple of `chunk`."""
    loop = make_walk(1, new_aligned, one_aligned, fill_aligned, make_add_aligned(chunk))
    return compiled(f"product-aligned-{chunk}", loop, LOOP)


@cache
def exact(exactly):
    """The loop for units that add groups of `exactly` products before they align them."""
    loop = make_walk(exactly, new_exact, one_exact, make_fill_exact(exactly), make_add_exact(exactly))
    return compiled(f"product-exact-{exactly}", loop, LOOP)
