"""Kernels: where a prologue and an epilogue meet in registers.

    make_row_kernel     one direction; a thread owns 8 columns of one row
    make_pair_kernel    the same for gated gradients, whose halves share what they read
    make_wide_row_kernel, make_wide_pair_kernel     powers of two in whole rows: a thread owns 16 columns
    make_block_row_kernel     blocks of 16 FP4 codes in whole rows: a thread owns one or two
    make_band_kernel    the same, and column sums (dbias): a thread owns 8 columns of 32 rows
    make_tile_kernel    both directions, columnwise copies transposed: a block of threads owns a tile
    make_square_kernel  square blocks; make_square_choice_kernel: with a choice of two scales
    make_column_kernel  columnwise copies that are not transposed, or both directions: a block's rows x 256 in registers
    make_scaled_gradient_kernel     gradients of row-scaled activations: a warp owns a row

and small ones at the end: sums of partial sums, scales, swizzling. All take `Inputs` and `Outputs` tuples of pointers;
offsets are 64-bit. Launch shapes are `launch`'s.
"""

from collections import namedtuple
from functools import cache

import numpy as np

from cuda_kernels.simt import (
    I32,
    I64,
    F,
    as_f32,
    as_i32,
    as_u32,
    cuda,
    device,
    first_column,
    first_row,
    kernel,
    larger_magnitude,
    maximum,
    offset,
    select,
    thread_number,
)
from cuda_kernels.tiles import GROUP_ROWS, TILE_ROWS, TILE_WORDS, make_stage, make_tile_walk, tile_columns, unsigned
from cuda_kernels.vectors import (
    VECTOR,
    WARP,
    ZERO,
    ZEROS,
    add,
    amax,
    high_bf16,
    larger_magnitudes,
    low_bf16,
    make_group_max,
    make_map2,
    make_words,
    multiply,
    pair_of,
)
from refops.scalings.declaration import Numbers

BAND = 32
ONE, FLT_MAX = F(1), F(np.finfo(np.float32).max)


@device
def no_transform(v, upper):
    """Leave the values as they are."""
    return v


# --- one direction ----------------------------------------------------------------------------------


def make_row_kernel(prologue, epilogue, rounded, transform=no_transform):
    """Return the kernel for one direction.

    A thread computes 8 neighbouring columns of one row in registers; `epilogue.lanes` threads share a scale and find
    its amax by shuffles. Thread blocks are (x threads along a row) x (y rows), x a multiple of the lanes.

    Args:
        prologue: of `prologues`. epilogue: of `epilogues`.
        rounded: `vectors.make_round` where TE rounds before it casts, else the identity.
        transform: `hadamard.make_hadamard`, or none.
    """
    group_max, store, lanes = make_group_max(epilogue.lanes), epilogue.store, epilogue.lanes

    @kernel
    def row_kernel(inputs, out):
        row = I32(first_row(cuda.blockDim.y) + cuda.threadIdx.y)
        column = I32((first_column(cuda.blockDim.x) + cuda.threadIdx.x) * VECTOR)
        valid = select(row < out.outer, I32(out.inner - column), I32(0))
        values = transform(rounded(prologue(inputs, row, column, valid)), (column & 15) == 8)
        block_amax = group_max(amax(values)) if lanes else ZERO
        store(values, block_amax, out, row, column, valid)

    return row_kernel


def make_wide_row_kernel(prologues, epilogue, kept):
    """Return the kernel for one direction in which a thread owns 16 columns: two vectors, one address.

    What a thread computes once, its place and its block's scale, then serves twice the elements.

    Args:
        prologues: that of columns 0 to 7 and that of columns 8 to 15. epilogue: `epilogues.wide_blocks`.
        kept: `vectors.Kept`, what eight rounded values are kept as.
    """
    (first_prologue, second_prologue), group_max, store = prologues, make_group_max(epilogue.lanes), epilogue.store
    rounded, amax_of = kept.rounded, kept.amax

    @kernel
    def wide_row_kernel(inputs, out):
        row = I32(first_row(cuda.blockDim.y) + cuda.threadIdx.y)
        column = I32((first_column(cuda.blockDim.x) + cuda.threadIdx.x) * (2 * VECTOR))
        valid = select(row < out.outer, I32(out.inner - column), I32(0))
        first = rounded(first_prologue(inputs, row, column, valid))
        second = rounded(second_prologue(inputs, row, column, valid))
        block_amax = group_max(amax_of(first, second))
        store(first, second, block_amax, out, row, column, valid)

    return wide_row_kernel


def make_block_row_kernel(prologues, store):
    """Return the kernel for one direction in which a thread owns whole blocks of 16 columns, one or two.

    No thread shares a scale, so one outside the matrix does nothing at all. Two blocks need one place and one load of
    what all blocks share.

    Args:
        prologues: those of columns 0 to 7, 8 to 15 and so on, two or four. store: of `epilogues.whole_blocks`.
    """
    columns, last = len(prologues) * VECTOR, len(prologues) - 2
    first_prologue, second_prologue, third_prologue, fourth_prologue = *prologues[:2], *prologues[last:]

    @kernel
    def block_row_kernel(inputs, out):
        row = I32(first_row(cuda.blockDim.y) + cuda.threadIdx.y)
        column = I32((first_column(cuda.blockDim.x) + cuda.threadIdx.x) * columns)
        if row < out.outer and column < out.inner:
            whole = I32(columns)
            a, b = first_prologue(inputs, row, column, whole), second_prologue(inputs, row, column, whole)
            c, d = third_prologue(inputs, row, column, whole), fourth_prologue(inputs, row, column, whole)
            store((a, b, c, d), out, row, column)

    return block_row_kernel


def make_wide_pair_kernel(prologues, epilogue, kept):
    """Return the kernel for gated gradients that is to `make_pair_kernel` what `make_wide_row_kernel` is to rows."""
    (first_prologue, second_prologue), group_max, store = prologues, make_group_max(epilogue.lanes), epilogue.store
    rounded, amax_of = kept.rounded, kept.amax

    @kernel
    def wide_pair_kernel(inputs, out):
        row = I32(first_row(cuda.blockDim.y) + cuda.threadIdx.y)
        column = I32((first_column(cuda.blockDim.x) + cuda.threadIdx.x) * (2 * VECTOR))
        valid = select(row < out.outer, I32(inputs.width - column), I32(0))
        act, gate = first_prologue(inputs, row, column, valid)
        act2, gate2 = second_prologue(inputs, row, column, valid)
        act, gate, act2, gate2 = rounded(act), rounded(gate), rounded(act2), rounded(gate2)
        act_amax, gate_amax = group_max(amax_of(act, act2)), group_max(amax_of(gate, gate2))
        store(act, act2, act_amax, out, row, column, valid)
        store(gate, gate2, gate_amax, out, row, I32(column + inputs.width), valid)

    return wide_pair_kernel


def make_pair_kernel(prologue, epilogue, rounded):
    """Return the kernel for one direction of a gated gradient, both halves from one read of dy, act and gate.

    As `make_row_kernel`; a thread owns 8 columns of each half. Blocks must not reach across the middle.
    """
    group_max, store, lanes = make_group_max(epilogue.lanes), epilogue.store, epilogue.lanes

    @kernel
    def pair_kernel(inputs, out):
        row = I32(first_row(cuda.blockDim.y) + cuda.threadIdx.y)
        column = I32((first_column(cuda.blockDim.x) + cuda.threadIdx.x) * VECTOR)
        valid = select(row < out.outer, I32(inputs.width - column), I32(0))
        act, gate = prologue(inputs, row, column, valid)
        act, gate = rounded(act), rounded(gate)
        act_amax = group_max(amax(act)) if lanes else ZERO
        gate_amax = group_max(amax(gate)) if lanes else ZERO
        store(act, act_amax, out, row, column, valid)
        store(gate, gate_amax, out, row, I32(column + inputs.width), valid)

    return pair_kernel


def make_band_kernel(prologue, epilogue, rounded, sums_rounded):
    """Return the kernel for one direction that also sums columns: `partial` (bands, K) gets each band's sums.

    A thread walks down 8 columns of 32 rows; rows are added in order. Thread blocks are one-dimensional.

    Args:
        sums_rounded: sum the rounded values, not the float32 ones. Others as for `make_row_kernel`.
    """
    group_max, store, lanes = make_group_max(epilogue.lanes), epilogue.store, epilogue.lanes

    @kernel
    def band_kernel(inputs, out, partial):
        band = first_row(1)
        column = I32((first_column(cuda.blockDim.x) + cuda.threadIdx.x) * VECTOR)
        sums = ZEROS
        for i in range(BAND):
            row = I32(band * BAND + i)
            valid = select(row < out.outer, I32(out.inner - column), I32(0))
            exact = prologue(inputs, row, column, valid)
            values = rounded(exact)
            sums = add(sums, values if sums_rounded else exact, ZERO)
            block_amax = group_max(amax(values)) if lanes else ZERO
            store(values, block_amax, out, row, column, valid)
        if band * BAND < out.outer:
            for k in range(VECTOR):
                if column + k < out.inner:
                    partial[I64(band) * out.inner + column + k] = sums[k]

    return band_kernel


# --- both directions --------------------------------------------------------------------------------


def make_tile_kernel(prologue, row, column, rounded, stage, transform=no_transform, dbias=False):
    """Return the kernel for both directions (or the columnwise one), whose columnwise copy is stored transposed.

    256 threads own a tile of 128 rows x 128 columns (x 64 if staged as float32). Along the rows, a thread computes
    eight values, casts them rowwise and puts them into shared memory; down the columns it reads eight values of one
    column and casts them with the same kind of epilogue, rows and columns exchanged.

    Args:
        row, column: the epilogues of the two directions; `epilogues.nothing()` for one that is not wanted.
        rounded: as for `make_row_kernel`. transform: applied to columns before the columnwise cast.
        stage: dtype of the tile in shared memory, "float32" or a 16-bit one that holds the rounded values exactly.
        dbias: also write the column sums of each tile's 128 rows to `partial` (tiles, K), added in order.
    """
    columns = tile_columns(stage)
    put, _, down, value = make_stage(stage)
    place_along, row_steps, place_down, column_steps = make_tile_walk(columns)
    row_max, column_max = make_group_max(row.lanes), make_group_max(column.lanes)
    store_row, store_column, row_lanes, column_lanes = row.store, column.store, row.lanes, column.lanes

    @kernel
    def tile_kernel(inputs, row_out, column_out, partial):
        tile = cuda.shared.array(TILE_WORDS, np.uint32)
        thread = cuda.threadIdx.x
        row0, column0 = first_row(TILE_ROWS), first_column(columns)
        rows, width = column_out.inner, column_out.outer
        for i in range(row_steps):
            r, c = place_along(thread, i)
            valid = select(row0 + r < rows, I32(width - column0 - c), I32(0))
            v = rounded(prologue(inputs, row0 + r, column0 + c, valid))
            put(tile, r, c, v)
            block_amax = row_max(amax(v)) if row_lanes else ZERO
            store_row(v, block_amax, row_out, row0 + r, column0 + c, valid)
        cuda.syncthreads()
        for i in range(column_steps):
            r, c = place_down(thread, i)
            valid = select(column0 + c < width, I32(rows - row0 - r), I32(0))
            v = transform(down(tile, r, c), (r & 15) == 8)
            block_amax = column_max(amax(v)) if column_lanes else ZERO
            store_column(v, block_amax, column_out, column0 + c, row0 + r, valid)
        if dbias:
            sum_tile(tile, value, row0, column0, rows, width, columns, partial)

    return tile_kernel


@device
def sum_tile(tile, value, row0, column0, rows, width, columns, partial):
    """Write the sum of each column of a staged tile, added from the first row on."""
    c = cuda.threadIdx.x
    if c < columns and column0 + c < width and row0 < rows:
        total = ZERO
        for r in range(TILE_ROWS):
            total = total + value(tile, r, c)
        partial[I64(row0 // TILE_ROWS) * width + column0 + c] = total


def make_square_kernel(prologue, row, column, rounded, stage, transposed):
    """Return the kernel for blocks that are squares of `row.block_rows`: one scale serves both directions.

    Tiles as in `make_tile_kernel`. First all values go to shared memory and raise the maxima of their blocks, then each
    direction is cast with these maxima. `transposed` False stores the columnwise copy along the rows as well.
    """
    columns = tile_columns(stage)
    edge = row.block_rows
    if edge > columns:
        raise ValueError(f"a tile staged as {stage} is {columns} columns wide: too narrow for blocks of {edge}")
    put, along, down, _ = make_stage(stage)
    place_along, row_steps, place_down, column_steps = make_tile_walk(columns)
    lane_max, lanes = make_group_max(row.lanes), row.lanes
    store_row, store_column = row.store, column.store
    number_of, squares = make_square_numbers(edge, columns)

    @kernel
    def square_kernel(inputs, row_out, column_out):
        tile = cuda.shared.array(TILE_WORDS, np.uint32)
        maxima = cuda.shared.array(squares, np.int32)
        thread = cuda.threadIdx.x
        row0, column0 = first_row(TILE_ROWS), first_column(columns)
        rows, width = row_out.outer, row_out.inner
        if thread < squares:
            maxima[thread] = 0
        cuda.syncthreads()
        for i in range(row_steps):
            r, c = place_along(thread, i)
            valid = select(row0 + r < rows, I32(width - column0 - c), I32(0))
            v = rounded(prologue(inputs, row0 + r, column0 + c, valid))
            put(tile, r, c, v)
            block_amax = lane_max(amax(v))
            if (thread & (lanes - 1)) == 0:
                cuda.atomic.max(maxima, number_of(r, c), as_i32(block_amax))
        cuda.syncthreads()
        for i in range(row_steps):
            r, c = place_along(thread, i)
            valid = select(row0 + r < rows, I32(width - column0 - c), I32(0))
            v, block_amax = along(tile, r, c), as_f32(maxima[number_of(r, c)])
            store_row(v, block_amax, row_out, row0 + r, column0 + c, valid)
            if not transposed:
                store_column(v, block_amax, column_out, row0 + r, column0 + c, valid)
        if transposed:
            for i in range(column_steps):
                r, c = place_down(thread, i)
                valid = select(column0 + c < width, I32(rows - row0 - r), I32(0))
                v, block_amax = down(tile, r, c), as_f32(maxima[number_of(r, c)])
                store_column(v, block_amax, column_out, column0 + c, row0 + r, valid)

    return square_kernel


@cache
def make_square_numbers(edge, columns):
    """Return (number(r, c), count): the square of an edge that an element of the tile lies in.

    One number follows each row of squares unused. The squares of a column, up to 8 below each other, would
    otherwise lie in every eighth bank; 9 apart they lie in different ones.
    """
    bits, pitch = edge.bit_length() - 1, columns // edge + 1
    return device(lambda r, c: unsigned((r >> bits) * pitch + (c >> bits))), TILE_ROWS // edge * pitch


def make_square_choice_kernel(prologue, choice, store_row, store_column, rounded, stage):
    """Return the kernel of squares of 16 x 16 with a choice of two scales, the same in both directions.

    As `make_square_kernel`; before anything is cast, each row of a square sums the errors of both scales, and the 16
    rows' sums are added as a tree.

    Args:
        choice: `epilogues.make_candidates` and `make_row_errors`.
        store_row, store_column: `make_store_choice`, or None.
    """
    candidates, errors = choice
    columns = tile_columns(stage)
    put, along, down, _ = make_stage(stage)
    place_along, row_steps, place_down, column_steps = make_tile_walk(columns)
    lane_max, (number_of, squares) = make_group_max(2), make_square_numbers(16, columns)
    place_of_sum, count = make_places_of_sums(columns // 16)
    second_errs_less = make_comparison(place_of_sum)

    @kernel
    def square_choice_kernel(inputs, row_out, column_out):
        tile = cuda.shared.array(TILE_WORDS, np.uint32)
        maxima = cuda.shared.array(squares, np.int32)
        sums = cuda.shared.array((2, count), np.float32)
        thread = cuda.threadIdx.x
        row0, column0, amax_of_all = first_row(TILE_ROWS), first_column(columns), row_out.given[0]
        if thread < squares:
            maxima[thread] = 0
        cuda.syncthreads()
        for i in range(row_steps):
            r, c = place_along(thread, i)
            valid = select(row0 + r < row_out.outer, I32(row_out.inner - column0 - c), I32(0))
            v = rounded(prologue(inputs, row0 + r, column0 + c, valid))
            put(tile, r, c, v)
            block_amax = lane_max(amax(v))
            if (thread & 1) == 0:
                cuda.atomic.max(maxima, number_of(r, c), as_i32(block_amax))
        cuda.syncthreads()
        for i in range(row_steps):
            r, c = place_along(thread, i)
            block_amax = as_f32(maxima[number_of(r, c)])
            place = place_of_sum(r, c >> 4)
            both = candidates(block_amax, amax_of_all, row_out)
            first, second = errors(along(tile, r, c), both, amax_of_all, (c & 15) == 8)
            sums[0, place], sums[1, place] = first, second
        cuda.syncthreads()
        for i in range(row_steps):
            r, c = place_along(thread, i)
            valid = select(row0 + r < row_out.outer, I32(row_out.inner - column0 - c), I32(0))
            both = candidates(as_f32(maxima[number_of(r, c)]), amax_of_all, row_out)
            chosen = second_errs_less(sums, r, c)
            if store_row is not None:
                store_row(along(tile, r, c), both, chosen, row_out, row0 + r, column0 + c, valid)
        if store_column is not None:
            for i in range(column_steps):
                r, c = place_down(thread, i)
                valid = select(column0 + c < row_out.inner, I32(row_out.outer - row0 - r), I32(0))
                both = candidates(as_f32(maxima[number_of(r, c)]), amax_of_all, row_out)
                chosen = second_errs_less(sums, r, c)
                store_column(down(tile, r, c), both, chosen, column_out, column0 + c, row0 + r, valid)

    return square_choice_kernel


@cache
def make_places_of_sums(blocks_across):
    """Return (place(r, block), count): where the sum of a row of a square lies, of so many squares side by side.

    Nine words that nobody uses follow every eight rows. The rows of a warp, 8 apart, store their sums 9 banks apart,
    more than the up to 8 squares side by side; squares below each other are read 18 banks apart.
    """
    place = device(lambda r, block: unsigned(r * blocks_across + (r >> 3) * 9 + block))
    return place, TILE_ROWS * blocks_across + TILE_ROWS // GROUP_ROWS * 9


@cache
def make_comparison(place_of_sum):
    """Return `second_errs_less(sums, r, c)`: whether the second scale errs less in the square of (r, c).

    The sums of its 16 rows are added as a tree; sums[0] are those of the first scale, sums[1] of the second.
    """

    @device
    def eighth(sums, which, row, block):
        """The sums of a row and of the one eight further."""
        return sums[which, place_of_sum(row, block)] + sums[which, place_of_sum(row + 8, block)]

    @device
    def tree_sum(sums, which, first, block):
        """Sum of 16 rows: row i with i + 8, then 4, 2, 1 apart."""
        a0, a1 = eighth(sums, which, first, block), eighth(sums, which, first + 1, block)
        a2, a3 = eighth(sums, which, first + 2, block), eighth(sums, which, first + 3, block)
        a4, a5 = eighth(sums, which, first + 4, block), eighth(sums, which, first + 5, block)
        a6, a7 = eighth(sums, which, first + 6, block), eighth(sums, which, first + 7, block)
        return ((a0 + a4) + (a2 + a6)) + ((a1 + a5) + (a3 + a7))

    @device
    def second_errs_less(sums, r, c):
        first, block = (r >> 4) << 4, c >> 4
        return tree_sum(sums, 1, first, block) < tree_sum(sums, 0, first, block)

    return second_errs_less


# --- down the columns, not transposed ---------------------------------------------------------------

COLUMNS, WARPS = 256, 8

#: How columns are cast. Field, meaning:
#:   rows          of a block
#:   scales        `epilogues.make_scales`
#:   put           put(stored, out, column, row): store a scale
#:   store_codes   `epilogues.make_store_codes`
#:   products      of two vectors
ColumnCast = namedtuple("ColumnCast", "rows scales put store_codes products")


def make_column_kernel(prologue, row, cast, maxima_of, dbias=False):
    """Return the kernel for columnwise copies that are stored along the rows, or both directions, in one read.

    8 warps own a block's rows x 256 columns. A thread keeps every eighth row from its warp's on, 8 columns of each, in
    registers. Only the maxima (and sums) of its rows go through shared memory, [warp, lane + 32 k] for column
    8 lane + k, which is free of bank conflicts.

    Args:
        row: the rowwise epilogue, or `epilogues.nothing()`. cast: `ColumnCast`. maxima_of: of `column_maxima_for`.
        dbias: also write the column sums of the unrounded values to `partial` (blocks of rows, K).
    """
    row_max, store_row, row_lanes = make_group_max(row.lanes), row.store, row.lanes
    sum_columns, rows, (kept, values_of, first, larger, of_column) = COLUMNS if dbias else 1, cast.rows, maxima_of
    store_codes, products, scales, put = cast.store_codes, cast.products, cast.scales, cast.put
    row_bits = rows.bit_length() - 1

    @device
    def along_row(inputs, out, row, column):
        valid = select(row < out.outer, I32(out.inner - column), I32(0))
        exact = prologue(inputs, row, column, valid)
        rounded = kept(exact)
        values = values_of(rounded)
        block_amax = row_max(amax(values)) if row_lanes else ZERO
        store_row(values, block_amax, out, row, column, valid)
        return rounded, exact

    @device
    def cast_one(out, kept, multipliers, lane, row, column):
        valid = select(row < out.outer, I32(out.inner - column), I32(0))
        codes = products(values_of(kept[0]), multipliers_of_columns(multipliers, lane), ZERO)
        store_codes(codes, out.data, (row, out.inner, column), valid)

    def make_rows(count):
        """(read, over, cast) of `count` rows, eight apart: registers have no index, so by halves."""
        if count == 1:
            return along_row, lambda fold: fold, cast_one
        half = count // 2
        (read_upper, over_upper, cast_upper), (read_lower, over_lower, cast_lower) = (
            make_rows(half),
            make_rows(count - half),
        )

        @device
        def read(inputs, out, row, column):
            a = read_upper(inputs, out, row, column)
            return a, read_lower(inputs, out, I32(row + half * WARPS), column)

        def over(fold):
            upper, lower = over_upper(fold), over_lower(fold)
            return device(lambda so_far, kept: lower(upper(so_far, kept[0]), kept[1]))

        @device
        def cast_rows(out, kept, multipliers, lane, row, column):
            cast_upper(out, kept[0], multipliers, lane, row, column)
            cast_lower(out, kept[1], multipliers, lane, I32(row + half * WARPS), column)

        return read, over, cast_rows

    read_others, over_others, cast_others = make_rows(rows // WARPS - 1)
    largest_of = over_others(device(lambda largest, one: larger(largest, one[0])))
    sum_of = over_others(device(lambda total, one: add(total, one[1], ZERO)))

    @kernel
    def column_kernel(inputs, row_out, column_out, partial):
        maxima = cuda.shared.array((WARPS, COLUMNS), np.float32)
        multipliers = cuda.shared.array(COLUMNS, np.float32)
        sums = cuda.shared.array((WARPS, sum_columns), np.float32)
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        row0, column = first_row(rows), I32(first_column(COLUMNS) + lane * VECTOR)
        row = I32(row0 + warp)
        one = along_row(inputs, row_out, row, column)
        others = read_others(inputs, row_out, I32(row + WARPS), column)
        put_columns(maxima, warp, lane, largest_of(first(one[0]), others))
        if dbias:
            put_columns(sums, warp, lane, sum_of(one[1], others))
        cuda.syncthreads()
        t = cuda.threadIdx.x
        own = I32(first_column(COLUMNS) + (t & 31) * VECTOR + (t >> 5))
        inside = own < column_out.inner and row0 < column_out.outer
        stored, multipliers[t] = scales(of_column(maxima), column_out, own, inside)
        if inside:
            put(stored, column_out, own, row0)
            if dbias:
                partial[I64(row0 >> row_bits) * column_out.inner + own] = sum_of_warps(sums)
        cuda.syncthreads()
        cast_one(column_out, one, multipliers, lane, row, column)
        cast_others(column_out, others, multipliers, lane, I32(row + WARPS), column)

    return column_kernel


#: How the maxima of columns are found: kept(exact), what a thread keeps of a row of eight; values(kept), rounded;
#: first(kept) and larger(largest, kept) of rows, float32 words; of_column(maxima): of what all warps put into shared
#: memory, a thread's number.
ColumnMaxima = namedtuple("ColumnMaxima", "kept values first larger of_column")

larger = make_map2(device(lambda x, y, p: larger_magnitude(x, y)))


def column_maxima_for(storage, rounded, target):
    """Return the `ColumnMaxima` of values that `rounded` rounds to a dtype ("float32": not at all)."""
    if storage == "bfloat16" and target is not None and target[0] == 9:
        return column_maxima_in_words(pair_of(storage, target))

    @device
    def of_column(maxima):
        m = maxima[0, cuda.threadIdx.x]
        for w in range(1, WARPS):
            m = maximum(m, maxima[w, cuda.threadIdx.x])
        return m

    return ColumnMaxima(
        rounded,
        device(lambda v: v),
        device(lambda v: larger(ZEROS, v, ZERO)),
        device(lambda largest, v: larger(largest, v, ZERO)),
        of_column,
    )


def column_maxima_in_words(pair):
    """Return the `ColumnMaxima` of bfloat16 in words of two: one instruction for both, half the shared memory."""

    @device
    def values(w):
        a, b, c, d = w
        return (
            low_bf16(a),
            high_bf16(a),
            low_bf16(b),
            high_bf16(b),
            low_bf16(c),
            high_bf16(c),
            low_bf16(d),
            high_bf16(d),
        )

    @device
    def first(w):
        return as_f32(w[0]), as_f32(w[1]), as_f32(w[2]), as_f32(w[3])

    @device
    def with_word(largest, w):
        return as_f32(larger_magnitudes(as_u32(largest), w))

    @device
    def larger(largest, w):
        return (
            with_word(largest[0], w[0]),
            with_word(largest[1], w[1]),
            with_word(largest[2], w[2]),
            with_word(largest[3], w[3]),
        )

    @device
    def of_column(maxima):
        t = cuda.threadIdx.x
        i = (t >> 6 << 5) + (t & 31)  # columns 2 k and 2 k + 1 of a lane are one word
        m = as_u32(maxima[0, i])
        for w in range(1, WARPS):
            m = larger_magnitudes(m, as_u32(maxima[w, i]))
        return larger_magnitude(ZERO, select((t & 32) == 0, low_bf16(m), high_bf16(m)))

    return ColumnMaxima(make_words(pair), values, first, larger, of_column)


@device
def put_columns(shared, warp, lane, v):
    """Put values of neighbouring columns where no two lanes share a bank: the k-th at lane + 32 k."""
    for k in range(len(v)):
        shared[warp, lane + 32 * k] = v[k]


@device
def sum_of_warps(sums):
    """The sum of this thread's column."""
    t = cuda.threadIdx.x
    total = sums[0, t]
    for w in range(1, WARPS):
        total = total + sums[w, t]
    return total


@device
def multipliers_of_columns(multipliers, lane):
    """The multipliers of a thread's eight columns."""
    return (
        multipliers[lane],
        multipliers[lane + 32],
        multipliers[lane + 64],
        multipliers[lane + 96],
        multipliers[lane + 128],
        multipliers[lane + 160],
        multipliers[lane + 192],
        multipliers[lane + 224],
    )


# --- gradients of row-scaled activations ------------------------------------------------------------


def make_scaled_gradient_kernel(loads, gradients, forward, stores, gated):
    """Return the kernel that writes dx and drow_scales of a row-scaled activation: a warp owns a row.

    Args:
        loads: (`halves` of `prologues`, `load` of dy); gradients: (d_act, d_gate) maps of (act, gate, scaled dy, p).
        forward: map of (act, gate, dy, p) to dy times the unscaled activation, whose row sum is the scale's gradient.
        stores: (store of dx, narrow of the scales' gradient).
    """
    halves, load_dy = loads
    d_act, d_gate = gradients
    store, narrow = stores

    @kernel
    def scaled_gradient_kernel(inputs, out, drow_scales):
        row = I32(first_row(cuda.blockDim.y) + cuda.threadIdx.y)
        inside = row < inputs.rows
        scale = inputs.row_scales[row] if inside else ZERO
        total = ZERO
        for start in range(0, inputs.width, 32 * VECTOR):
            column = I32(start + cuda.threadIdx.x * VECTOR)
            valid = select(inside, I32(inputs.width - column), I32(0))
            act, gate = halves(inputs, row, column, valid)
            dy = load_dy(inputs.dy, (row, inputs.width, column), valid)
            scaled = multiply(dy, scale)
            first = act_offset(inputs, row, column, gated)
            store(d_act(act, gate, scaled, inputs), out, first, valid)
            if gated:
                store(d_gate(act, gate, scaled, inputs), out, first + gate_distance(inputs), valid)
            total = total + sum_of(forward(act, gate, dy, inputs))
        total = warp_sum(total)
        if inside and cuda.threadIdx.x == 0:
            drow_scales[row] = narrow(total)

    return scaled_gradient_kernel


@device
def act_offset(inputs, row, column, gated):
    """Where a row's activated value of output `column` lies in x."""
    if not gated:
        return offset(row, inputs.width, column)
    g = inputs.interleave
    first = I64(row) * (2 * inputs.width)
    return first + column if g == 0 else first + column // g * (2 * g) + column % g


@device
def gate_distance(inputs):
    """From an activated value to its gate."""
    return inputs.width if inputs.interleave == 0 else inputs.interleave


@device
def sum_of(v):
    """Sum of the eight, from the first on."""
    return ((((((v[0] + v[1]) + v[2]) + v[3]) + v[4]) + v[5]) + v[6]) + v[7]


@device
def warp_sum(x):
    """Sum over a warp, the same in every lane."""
    x = x + cuda.shfl_xor_sync(WARP, x, 16)
    x = x + cuda.shfl_xor_sync(WARP, x, 8)
    x = x + cuda.shfl_xor_sync(WARP, x, 4)
    x = x + cuda.shfl_xor_sync(WARP, x, 2)
    return x + cuda.shfl_xor_sync(WARP, x, 1)


# --- one thread for each result ---------------------------------------------------------------------


@cache
def make_finish_sums(narrow):
    """Return the kernel that adds the partial sums (count, K) of each column, from the first on."""

    @kernel
    def finish_sums(partial, out, count, columns):
        column = thread_number()
        if column < columns:
            total = ZERO
            for i in range(count):
                total = total + partial[I64(i) * columns + column]
            out[column] = narrow(total)

    return finish_sums


@kernel
def copy_one(source, target, index):
    """target[0] = source[index]. One thread."""
    target[0] = source[index]


@cache
def make_scale_of_tensor(block_scale):
    """Return the kernel that makes the scale of a whole tensor, (multiplier, what is stored). One thread."""

    @kernel
    def scale_of_tensor(amax, scale, epsilon, largest_scale):
        scale[1], scale[0] = block_scale(amax[0], ZERO, Numbers(epsilon, largest_scale))

    return scale_of_tensor


@cache
def make_tensor_scales(tensor_scale, parts):
    """Return the kernel that makes what all blocks share, `parts` numbers, of a tensor or of each of `count` rows."""

    @kernel
    def numbers(amax, scales, count):
        i = thread_number()
        if i < count:
            scales[i] = tensor_scale(amax[i])

    @kernel
    def pairs(amax, scales, count):
        i = thread_number()
        if i < count:
            scales[I64(i) * 2], scales[I64(i) * 2 + 1] = tensor_scale(amax[i])

    return {1: numbers, 2: pairs}[parts]


@kernel
def delayed_scale(history, scale, amax, new_history, new_scale, numerator, length, columns, mode, keep_unused):
    """The next delayed scale of each column, and the history rolled by one with a cleared first row.

    `mode` 0 takes the history's maximum, 1 its newest entry, 2 the entry of `amax`. `numerator` is fmt.max / 2^margin.
    """
    column = thread_number()
    if column < columns:
        newest = history[column]
        a = newest if mode == 1 else (amax[column] if mode == 2 else history_max(history, column, length, columns))
        unused = keep_unused != 0 and mode != 2 and newest == ZERO
        fresh = numerator / a
        fresh = select(fresh > FLT_MAX, FLT_MAX, fresh)
        usable = a > ZERO and a <= FLT_MAX and not unused
        new_scale[column] = fresh if usable else scale[column]
        for i in range(length):
            source = i if unused else (0 if i == length - 1 else i + 1)
            cleared = i == 0 and not unused
            new_history[i * columns + column] = ZERO if cleared else history[source * columns + column]


@device
def history_max(history, column, length, columns):
    """The largest entry of a column, NaN ignored (NaN if there is nothing else)."""
    largest = history[column]
    for i in range(1, length):
        entry = history[i * columns + column]
        largest = entry if (entry > largest or largest != largest) else largest
    return largest


@kernel
def swizzle(source, target, rows, columns, transposed, undo):
    """Move one-byte scales (rows, columns) into the order that GEMMs read, or back.

    `transposed` ones are stored [block, outer]; in GEMM order they have no other place than their transpose.
    """
    i = thread_number()
    if i < rows * columns:
        outer, block = i // columns, i % columns
        tile = (outer // 128) * (columns // 4) + block // 4
        swizzled = tile * 512 + (outer % 32) * 16 + (outer % 128) // 32 * 4 + block % 4
        plain = block * rows + outer if transposed else i
        if undo:
            target[plain] = source[swizzled]
        else:
            target[swizzled] = source[plain]
