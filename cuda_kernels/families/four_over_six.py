"""NVFP4 4over6: of two scales each block of 1x16, or 16x16, is cast with the one under which its codes err less.

The rules are those that the scaling declares (`NVFP4Scaling.choice` in refops/scalings/nvfp4.py). `amax` is that of the
tensor, or of the row; S_enc and S_dec follow from it as in `nvfp4`:

    scales     two candidates (stored, multiplier, value) for each block. The first stores
               E4M3((block amax / 6) * S_enc), which maps the block's maximum to 6, the second
               E4M3(((block amax / 6) * S_enc) * 1.5), which maps it to 4. `value` is the number that the stored byte
               means; multiplier = min(1 / (value * S_dec), FLT_MAX)
    code       E2M1(x * multiplier), to nearest, ties to even, saturated; two in a byte
    error      of an element |((what its code means * value) * amax) / (448 * 6) - x|, or its square; with `fast_error`
               |what its code means * value - x * S_enc|. Those of a row are
               added from its first element on; those of a square row by row, then the 16 sums as a tree: row i with
               i + 8, then 4, 2, 1 apart. The second candidate is taken if its sum is less; if the sums are equal, or
               one is NaN, the first
    place      rowwise codes lie as the values do, columnwise ones transposed; the scaling says where scales lie

NVFP4's K and M are multiples of 16, so a run of 16 is wholly inside the matrix or outside. No activation is computed
here: for these scalings another kernel stores its result first. Arguments, results and errors are those of
`refops.quantize`.
"""

# --- 1. what it computes: above ---------------------------------------------------------------------

from collections import namedtuple
from dataclasses import dataclass

import numpy as np

from cuda_kernels import casts
from cuda_kernels.directions import Direction, direction_of
from cuda_kernels.launch import row_shape, tile_grid
from cuda_kernels.operands import Chosen, Cost, Spec, as_it_is, described
from cuda_kernels.reads import described_source, make_read, make_read_sixteen
from cuda_kernels.simt import (
    I32,
    F,
    cuda,
    device,
    kernel,
    larger_magnitude,
    offset,
    select,
    thread_number,
)
from cuda_kernels.stores import put_nothing
from cuda_kernels.tiles import (
    GROUP_ROWS,
    TILE_ROWS,
    TILE_WORDS,
    make_fill,
    make_reread,
    make_tile_maxima,
    make_turn,
    tile_columns,
    unsigned,
)
from cuda_kernels.vectors import (
    VECTOR,
    WARP,
    amax_of_sixteen,
    make_block_max,
    make_cast_sixteen,
    make_store_codes,
    multiply,
    place,
)
from refops.scalings import NVFP4Scaling

ZERO = F(0)
widen = casts.widen_bf16

# --- 2. naive ---------------------------------------------------------------------------------------

# The declared rules: candidates_of(block amax, amax, p) are the two candidates, error_of(x, candidate, amax) is the
# error of an element. `p` are numbers of the scaling, which these rules ignore: the kernel passes ZERO.
MAE = direction_of(NVFP4Scaling(four_over_six="mae"), columnwise=False)
candidates_of, error_of = MAE.candidates(), MAE.error()


@kernel
def chosen_naive(x, amax, codes, scales, rows, columns):
    """x (M, columns) of bfloat16, amax (1,) -> codes, scales (M, columns / 16): one thread one block.

    A block is read three times: for its largest magnitude, its errors and its codes.
    """
    i = thread_number()
    row, block = i // (columns // 16), i % (columns // 16)
    if row < rows:
        first, largest, error_with_6, error_with_4 = offset(row, columns, block * 16), ZERO, ZERO, ZERO
        for k in range(16):
            largest = larger_magnitude(largest, widen(x[first + k]))
        to_6, to_4 = candidates_of(largest, amax[0], ZERO)
        for k in range(16):
            error_with_6 = error_with_6 + error_of(widen(x[first + k]), to_6, amax[0])
            error_with_4 = error_with_4 + error_of(widen(x[first + k]), to_4, amax[0])
        stored, multiplier, _ = to_4 if error_with_4 < error_with_6 else to_6  # the third was for `error_of`
        scales[offset(row, columns // 16, block)] = np.uint8(stored)
        for k in range(0, 16, 2):
            pair = casts.e2m1_pair(widen(x[first + k]) * multiplier, widen(x[first + k + 1]) * multiplier)
            codes[(first + k) >> 1] = np.uint8(pair)


# --- 3. coalesced -----------------------------------------------------------------------------------

# There is none. Eight neighbouring threads with two elements each, as in `nvfp4_coalesced`, would read a block in one
# access. But its errors are added in order, so each thread would wait for the sum of the one before it: seven shuffles
# one after another, for either candidate. The fused kernel leaves a block to one thread, which reads it 16 bytes at a
# time.

# --- 4. fused ---------------------------------------------------------------------------------------

# A thread owns a block, 16 neighbours of a row, in registers as two vectors of eight float32. Five functions:
#
#   place(16, rows, columns)                                  (row, column, left) of the first
#   read(source, row, column, left)                           their values
#   choose(v, out, row, left)                                 (stored, multiplier) of the candidate that errs less
#   put_scale(stored, out, row, column, left)                 stores its scale
#   cast(v, multiplier, data, (row, stride, column), left)    stores the codes
#
# left: the number of elements from here to the end of the row. It may exceed the elements of the thread; outside the
# matrix it is 0 or negative: a read gives zeros there and nothing is stored.


def make_amax(direction):
    """Return `amax_of(out, outer, left)`: the tensor's amax, or that of row `outer`; outside the matrix of row 0."""
    amax = direction.amax()
    return device(lambda out, outer, left: amax(out, select(left > 0, outer, I32(0))))


def make_add_errors(direction, target):
    """Return `add_errors(start, v, candidate, amax)`: `start` plus the errors of eight elements, one after another."""
    error = direction.error(target)

    @device
    def add_errors(start, v, candidate, amax):
        total = start
        for k in range(VECTOR):
            total = total + error(v[k], candidate, amax)
        return total

    return add_errors


@device
def better(candidates, second_errs_less):
    """(stored, multiplier) of the second candidate if it errs less, else of the first."""
    first, second = candidates
    return select(second_errs_less, second[0], first[0]), select(second_errs_less, second[1], first[1])


def make_choose(direction, target):
    """Return `choose(v, out, row, left)`: (stored, multiplier) of the better candidate, of a block in one thread."""
    candidates, amax_of = direction.candidates(target), make_amax(direction)
    add_errors = make_add_errors(direction, target)

    @device
    def error(v, candidate, amax):
        return add_errors(add_errors(ZERO, v[0], candidate, amax), v[1], candidate, amax)

    @device
    def choose(v, out, row, left):
        amax = amax_of(out, row, left)
        both = candidates(amax_of_sixteen(v), amax, out)
        return better(both, error(v, both[1], amax) < error(v, both[0], amax))

    return choose


@dataclass(frozen=True)
class ChosenRows(Spec):
    """One copy along the rows.

    Attributes:
        storage: dtype of the values.
        direction: how they are cast.
        whole: rows are a multiple of 16 elements (what a thread owns) and every array is aligned to 16 bytes: values
            are read 16 bytes at a time, the 16 codes stored in one access. Else each element is an access of its own.
    """

    storage: str
    direction: Direction
    whole: bool

    title = "a choice of scales along rows"

    def __str__(self):
        return f"{self.title}: {self.storage} -> {self.direction.name}"

    def operands(self):
        return described_source(as_it_is(self.storage)), described_chosen(self.direction)

    def grid(self, outer, inner):
        return row_shape(outer, inner, lanes=1, owned=16)

    def build(self, target):
        fmt, packed, choose = self.direction.fmt, self.direction.packed, make_choose(self.direction, target)
        read = make_read_sixteen(as_it_is(self.storage), self.whole, target)
        put_scale, cast = self.direction.put_scale(), make_cast_sixteen(fmt, packed, self.whole, target)

        @kernel
        def chosen_rows(source, out):
            row, column, left = place(16, out.outer, out.inner)
            v = read(source, row, column, left)
            stored, multiplier = choose(v, out, row, left)
            put_scale(stored, out, row, column, left)
            cast(v, multiplier, out.data, (row, out.inner, column), left)

        return chosen_rows


def described_chosen(direction):
    """The description of the `Chosen` that a direction's blocks are cast to."""
    return described(Chosen, scales=direction.scale_type)


# 4a. Both copies, through a tile in shared memory (see `tiles`). 256 threads own 128 rows x 128 columns (float32: 64).
#     Eight neighbours of a row in each step of `fill`, eight of a column in each step of `turn`. Either way lanes 2i
#     and 2i + 1 of a warp hold a run of 16, a block: the lower one its first half, the upper one its second.


def make_errors_of_two(direction, target):
    """Return `errors(v, candidates, amax, upper)`: the sums of the errors of a run of 16, (of the first, the second).

    Two lanes hold the run; `upper` says that v are its second eight. Both lanes get the sums. All lanes must call.
    """
    add_errors = make_add_errors(direction, target)

    @device
    def error(v, candidate, amax, upper):
        # Each lane sums its own eight and passes that on. `upper` goes on from what it got, which is the whole sum in
        # order, and passes it back. What the lower lane adds up itself is in the wrong order and dropped.
        partner = cuda.shfl_xor_sync(WARP, add_errors(ZERO, v, candidate, amax), 1)
        continued = add_errors(partner, v, candidate, amax)
        return select(upper, continued, cuda.shfl_xor_sync(WARP, continued, 1))

    @device
    def errors(v, candidates, amax, upper):
        return error(v, candidates[0], amax, upper), error(v, candidates[1], amax, upper)

    return errors


def make_cast_one_of(direction, whole, target):
    """Return `cast(v, candidates, second_errs_less, out, outer, inner, left)`: store codes of eight, and the scale.

    The scale is stored by the thread that owns the first element of its block.
    """
    put_scale = direction.put_scale()
    store_codes = make_store_codes(direction.fmt, direction.packed, whole, target)

    @device
    def cast_one_of(v, candidates, second_errs_less, out, outer, inner, left):
        stored, multiplier = better(candidates, second_errs_less)
        put_scale(stored, out, outer, inner, left)
        store_codes(multiply(v, multiplier), out.data, (outer, out.inner, inner), left)

    return cast_one_of


def make_cast_chosen(direction, whole, target):
    """Return `put(v, out, outer, inner, left)` for `fill` and `turn`: cast eight, half a block of 1 x 16."""
    pair_max, candidates, amax_of = make_block_max(VECTOR, 16), direction.candidates(target), make_amax(direction)
    errors, cast = make_errors_of_two(direction, target), make_cast_one_of(direction, whole, target)

    @device
    def cast_chosen(v, out, outer, inner, left):
        amax = amax_of(out, outer, left)
        both = candidates(pair_max(v), amax, out)
        first, second = errors(v, both, amax, (inner & 15) == 8)
        cast(v, both, second < first, out, outer, inner, left)

    return cast_chosen


@dataclass(frozen=True)
class ChosenTile(Spec):
    """What the kernels that go through a tile have in common.

    Attributes:
        storage, direction: as above; `direction` is the rowwise one.
        rowwise, columnwise: whether a copy is made.
        whole_rows: as `whole`, of eight, of the values and the rowwise codes. whole_columns: of the columnwise codes.
    """

    storage: str
    direction: Direction
    rowwise: bool
    columnwise: bool
    whole_rows: bool
    whole_columns: bool

    def __str__(self):
        copies = [self.direction.name] * self.rowwise + [f"{self.direction.name} of columns"] * self.columnwise
        return f"{self.title}: {self.storage} -> {' + '.join(copies)}"

    def operands(self):
        out = described_chosen(self.direction)
        return described_source(as_it_is(self.storage)), out, out

    def grid(self, outer, inner):
        return tile_grid(outer, inner, tile_columns(self.storage))


@dataclass(frozen=True)
class ChosenBoth(ChosenTile):
    """Both copies, or the columnwise one (`columnwise` is true), from one read."""

    title = "a choice of scales in both directions"

    def build(self, target):
        read = make_read(as_it_is(self.storage), self.whole_rows, target)
        along = make_cast_chosen(self.direction, self.whole_rows, target) if self.rowwise else put_nothing
        down = make_cast_chosen(self.direction.other, self.whole_columns, target)
        fill, turn = make_fill(read, along, self.storage), make_turn(down, self.storage)

        @kernel
        def chosen_both(source, row_out, column_out):
            tile = cuda.shared.array(TILE_WORDS, np.uint32)
            fill(tile, source, row_out, source.rows, source.width)
            cuda.syncthreads()  # all threads' values are in the tile
            turn(tile, column_out, source.rows, source.width)

        return chosen_both


# 4b. Squares of 16 x 16, through a tile as well. A run of 16 is a row of a square, or a column of it. The sums of the
#     errors of the 16 rows meet in shared memory.

#: A tile's `sums`, (2, count) float32 in shared memory: the errors of each row of each square under either candidate.
#:   at(row, column)                        the index in sums[0] and sums[1] of the row of a square that the element
#:                                          (row, column) of the matrix lies in
#:   second_errs_less(sums, row, column)    whether the second candidate errs less in the element's square
Sums = namedtuple("Sums", "count at second_errs_less")

#: Words that nobody uses, which follow the sums of every eight rows.
SUM_GAP = 9


def make_sums(storage):
    """Return the `Sums` of a tile of a dtype: those of a row side by side, 8 squares (float32: 4).

    Of 32 banks, a warp must not want two words of one at once. It stores sums of two rows (float32: four), 8 apart.
    Without `SUM_GAP` they would begin in the same bank; with it they begin 9 banks apart, and a row has at most 8 sums.
    In `turn` it reads the sums of eight squares below each other. Those are 18 banks apart: in eight different banks.
    """
    columns = tile_columns(storage)
    across = columns // 16
    eight_down = GROUP_ROWS * across + SUM_GAP

    @device
    def at(row, column):
        r = row & (TILE_ROWS - 1)
        return r * across + (r >> 3) * SUM_GAP + ((column & (columns - 1)) >> 4)

    @device
    def two_rows(sums, which, i):
        """The sum of two rows of a square, 8 apart; the index of the first is i."""
        return sums[which, unsigned(i)] + sums[which, unsigned(i + eight_down)]

    @device
    def tree_sum(sums, which, i):
        """The sum of 16 rows, row k with k + 8, then 4, 2, 1 apart; the index of the first is i."""
        a0, a1 = two_rows(sums, which, i), two_rows(sums, which, i + across)
        a2, a3 = two_rows(sums, which, i + 2 * across), two_rows(sums, which, i + 3 * across)
        a4, a5 = two_rows(sums, which, i + 4 * across), two_rows(sums, which, i + 5 * across)
        a6, a7 = two_rows(sums, which, i + 6 * across), two_rows(sums, which, i + 7 * across)
        return ((a0 + a4) + (a2 + a6)) + ((a1 + a5) + (a3 + a7))

    @device
    def second_errs_less(sums, row, column):
        i = at((row >> 4) << 4, column)
        return tree_sum(sums, 1, i) < tree_sum(sums, 0, i)

    return Sums(TILE_ROWS // GROUP_ROWS * eight_down, at, second_errs_less)


def make_sum_errors(direction, get, at, target):
    """Return `put(v, (maxima, sums, out), row, column, left)` for `reread`: store the sums of a row of a square.

    `get` is that of `tiles.TileMaxima`, the largest magnitude of a square. Both threads of a row store the same sums in
    one place, which is harmless. So do threads outside the matrix, but no stored value depends on what they store: a
    square is wholly inside or outside.
    """
    candidates, errors = direction.candidates(target), make_errors_of_two(direction, target)

    @device
    def sum_errors(v, shared, row, column, left):
        maxima, sums, out = shared
        amax, i = out.amax[0], unsigned(at(row, column))
        both = candidates(get(maxima, row, column, left), amax, out)
        sums[0, i], sums[1, i] = errors(v, both, amax, (column & 15) == 8)

    return sum_errors


def make_cast_square(direction, get, second_errs_less, whole, target):
    """Return `put(v, (maxima, sums, out), outer, inner, left)` for `reread` and `turn`: cast eight, as their square."""
    candidates, cast = direction.candidates(target), make_cast_one_of(direction, whole, target)
    columnwise = direction.columnwise

    @device
    def cast_square(v, shared, outer, inner, left):
        maxima, sums, out = shared
        row, column = (inner, outer) if columnwise else (outer, inner)
        both = candidates(get(maxima, row, column, left), out.amax[0], out)
        cast(v, both, second_errs_less(sums, row, column), out, outer, inner, left)

    return cast_square


@dataclass(frozen=True)
class ChosenSquares(ChosenTile):
    """Both copies, or one, of squares of 16 x 16, which have one scale in both copies.

    First all values are in the tile and the squares' maxima beside it; then the sums of the errors of every row of a
    square; then each copy is cast with the candidate whose tree sum of 16 row sums is less (else: with the first).
    """

    title = "a choice of scales for squares"

    def build(self, target):
        storage, direction, rowwise, columnwise = self.storage, self.direction, self.rowwise, self.columnwise
        count, clear, raise_maxima, get = make_tile_maxima(16, storage)
        sums_count, at, second_errs_less = make_sums(storage)
        fill = make_fill(make_read(as_it_is(storage), self.whole_rows, target), raise_maxima, storage)
        sum_errors = make_reread(make_sum_errors(direction, get, at, target), storage)
        cast_rows = make_reread(make_cast_square(direction, get, second_errs_less, self.whole_rows, target), storage)
        turn = make_turn(make_cast_square(direction.other, get, second_errs_less, self.whole_columns, target), storage)

        @kernel
        def chosen_squares(source, row_out, column_out):
            tile = cuda.shared.array(TILE_WORDS, np.uint32)
            maxima = cuda.shared.array(count, np.int32)
            sums = cuda.shared.array((2, sums_count), np.float32)
            rows, width = source.rows, source.width
            clear(maxima)
            cuda.syncthreads()  # all maxima are zero
            fill(tile, source, maxima, rows, width)
            cuda.syncthreads()  # all threads' values are in the tile, and in the maxima of their squares
            sum_errors(tile, (maxima, sums, row_out), rows, width)
            cuda.syncthreads()  # all threads' sums are there
            if rowwise:
                cast_rows(tile, (maxima, sums, row_out), rows, width)
            if columnwise:
                turn(tile, (maxima, sums, column_out), rows, width)

        return chosen_squares


# --- 5. their launch --------------------------------------------------------------------------------


def quantize(gpu, job):
    """Fill the copies of a `copies.BlockJob`; its front is a tensor as it is, whose amax is known.

    `gpu` is the backend (`gpu.GPU`).
    """
    front, rowwise, columnwise = job.front, job.rowwise, job.columnwise
    direction = job.direction.other if job.direction.columnwise else job.direction
    data = None if rowwise is None else rowwise.data
    if columnwise is None and not direction.square:
        spec = ChosenRows(front.storage, direction, gpu.whole(front, 16, data))
        gpu.launch(spec, front.matrix_shape, front.source(), rowwise.chosen())
        return
    # Not `gpu.whole`, which asks about rows of what is read: columns come out of the tile.
    whole_columns = columnwise is not None and columnwise.inner % VECTOR == 0 and columnwise.data.aligned
    whole = gpu.whole(front, VECTOR, data), whole_columns
    kind = ChosenSquares if direction.square else ChosenBoth
    spec = kind(front.storage, direction, rowwise is not None, columnwise is not None, *whole)
    # The copy that is made stands in for one that is not, of which at most the amax is read: it is the same.
    row_out, column_out = (rowwise or columnwise).chosen(), (columnwise or rowwise).chosen()
    gpu.launch(spec, front.matrix_shape, front.source(), row_out, column_out)


# --- 6. their cost ----------------------------------------------------------------------------------


def costs():
    """The `operands.Cost` of each kernel, from bfloat16.

    Bytes are those that a thread with all of its elements reads and writes: values, half a byte of code for each
    in a copy, a scale for 16.
    """
    copy, tile = 1 / 2 + 1 / 16, 128 * 128 / 256
    direction = direction_of(NVFP4Scaling(four_over_six="mae"), columnwise=False)
    squares = direction_of(NVFP4Scaling(two_d=True, four_over_six="mae"), columnwise=False)
    rows = ChosenRows("bfloat16", direction, True)
    yield Cost("bf16 -> NVFP4, 4over6", rows, 16 * (2 + copy), wide_loads=2, wide_stores=0)
    both = ChosenBoth("bfloat16", direction, True, True, True, True)
    yield Cost("bf16 -> NVFP4 4over6 both", both, tile * (2 + 2 * copy))
    of_squares = ChosenSquares("bfloat16", squares, True, True, True, True)
    yield Cost("bf16 -> NVFP4 16x16 4over6 both", of_squares, tile * (2 + 2 * copy))
