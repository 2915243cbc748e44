"""NVFP4 4over6: each block of 1x16, or 16x16, has that of two scales under which its codes err less.

    scales     two candidates, the declared rules of the block's and the tensor's largest magnitude: NVFP4's, which maps
               the block's maximum to 6, and 1.5 times that, which maps it to 4
    error      declared, of an element; those of a row are added from its first element on, those of a square's 16 rows
               as a tree; the first scale wins a tie
    code       two in a byte, rowwise as the values lie and columnwise transposed

Activations come without: they are stored first, for the amax of the tensor. Arguments, results and errors are those of
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
    I64,
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

MAE = direction_of(NVFP4Scaling(four_over_six="mae"), False)
candidates_of, error_of = MAE.candidates(), MAE.error()


@kernel
def chosen_naive(x, amax, codes, scales, rows, columns):
    """x (M, columns), amax (1,) -> codes, scales (M, columns / 16): one thread one block, read three times."""
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
        byte, factor, _ = to_4 if error_with_4 < error_with_6 else to_6
        scales[offset(row, columns // 16, block)] = np.uint8(byte)
        for k in range(0, 16, 2):
            pair = casts.e2m1_pair(widen(x[first + k]) * factor, widen(x[first + k + 1]) * factor)
            codes[(first + k) >> 1] = np.uint8(pair)


# --- 3. coalesced -----------------------------------------------------------------------------------

# None: errors are added from the first element on, so a block that is spread over eight threads passes its sum from one
# to the next seven times, for either scale. The fused kernel reads a block in two accesses of 16 bytes instead.

# --- 4. fused ---------------------------------------------------------------------------------------

# A thread owns a block, 16 neighbours of a row, in registers as two vectors of eight float32. Five words:
#
#   place(16)                                           their (row, column)
#   read(source, row, column, left)                     their values; `left` elements to the end of the row
#   choose(v, out, row, left)                           (stored, multiplier) of the scale that errs less
#   put_scale(stored, out, row, column, left)           stores it
#   cast(v, multiplier, data, place, left)              the codes


def make_amax(direction):
    """Return `amax_of(out, outer, left)`: the amax that a block's scale stands under, the tensor's or its row's."""
    by_outer = direction.by_outer
    return device(lambda out, outer, left: out.amax[I64(outer) if by_outer and left > 0 else I64(0)])


def make_add_errors(direction, target):
    """Return `add_errors(start, v, candidate, amax)`: `start` plus the errors of eight elements, one after another."""
    error = direction.error(target)

    @device
    def four(start, a, b, c, d, s, amax):
        return (((start + error(a, s, amax)) + error(b, s, amax)) + error(c, s, amax)) + error(d, s, amax)

    @device
    def add_errors(start, v, s, amax):
        return four(four(start, v[0], v[1], v[2], v[3], s, amax), v[4], v[5], v[6], v[7], s, amax)

    return add_errors


@device
def better(candidates, second_errs_less):
    """(stored, multiplier) of one of the two."""
    first, second = candidates
    return select(second_errs_less, second[0], first[0]), select(second_errs_less, second[1], first[1])


def make_choose(direction, target):
    """Return `choose(v, out, row, left)`: (stored, multiplier) of a block that one thread owns."""
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
        whole: rows consist of whole 16-byte accesses at aligned addresses. Else every element is an access of its own.
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
            row, column = place(16)
            left = select(row < out.outer, I32(out.inner - column), I32(0))
            v = read(source, row, column, left)
            stored, multiplier = choose(v, out, row, left)
            put_scale(stored, out, row, column, left)
            cast(v, multiplier, out.data, (row, out.inner, column), left)

        return chosen_rows


def described_chosen(direction):
    """The description of the `Chosen` that a direction's blocks are cast to."""
    return described(Chosen, scales=direction.scale_type)


# Both copies: along the rows and down the columns of a tile (see `tiles`) two neighbouring threads share a block.


def make_errors_of_two(direction, target):
    """Return `errors(v, candidates, amax, upper)`: with either scale, of 16 elements that two threads hold.

    A sum runs through the first thread's elements, then through those of the second (`upper`); both get it.
    """
    add_errors = make_add_errors(direction, target)

    @device
    def error(v, candidate, amax, upper):
        lower_half = cuda.shfl_xor_sync(WARP, add_errors(ZERO, v, candidate, amax), 1)
        both_halves = add_errors(lower_half, v, candidate, amax)
        return select(upper, both_halves, cuda.shfl_xor_sync(WARP, both_halves, 1))

    @device
    def errors(v, candidates, amax, upper):
        return error(v, candidates[0], amax, upper), error(v, candidates[1], amax, upper)

    return errors


def make_cast_one_of(direction, whole, target):
    """Return `cast(v, candidates, second_errs_less, out, outer, inner, left)`: eight elements with one of both."""
    put_scale = direction.put_scale()
    store_codes = make_store_codes(direction.fmt, direction.packed, whole, target)

    @device
    def cast_one_of(v, candidates, second_errs_less, out, outer, inner, left):
        stored, multiplier = better(candidates, second_errs_less)
        put_scale(stored, out, outer, inner, left)
        store_codes(multiply(v, multiplier), out.data, (outer, out.inner, inner), left)

    return cast_one_of


def make_cast_chosen(direction, whole, target):
    """Return `put(v, out, outer, inner, left)`, of `make_fill` and `make_turn`: cast by blocks of 1 x 16."""
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
class ChosenBoth(Spec):
    """Both copies, or the columnwise one, from one read.

    Attributes:
        storage, direction: as above; `direction` is the rowwise one.
        rowwise: whether the rowwise copy is made. whole_rows, whole_columns: as `whole`, of either copy.
    """

    storage: str
    direction: Direction
    rowwise: bool
    whole_rows: bool
    whole_columns: bool

    title = "a choice of scales in both directions"

    def __str__(self):
        return f"{self.title}: {self.storage} -> {self.direction.name}"

    def operands(self):
        out = described_chosen(self.direction)
        return described_source(as_it_is(self.storage)), out, out

    def grid(self, outer, inner):
        return tile_grid(outer, inner, tile_columns(self.storage))

    def build(self, target):
        read = make_read(as_it_is(self.storage), self.whole_rows, target)
        along = make_cast_chosen(self.direction, self.whole_rows, target) if self.rowwise else put_nothing
        down = make_cast_chosen(self.direction.other, self.whole_columns, target)
        fill, turn = make_fill(read, along, self.storage), make_turn(down, self.storage)

        @kernel
        def chosen_both(source, row_out, column_out):
            tile = cuda.shared.array(TILE_WORDS, np.uint32)
            fill(tile, source, row_out, column_out.inner, column_out.outer)
            cuda.syncthreads()
            turn(tile, column_out, column_out.inner, column_out.outer)

        return chosen_both


# Squares of 16 x 16: the sums of the errors of their rows lie in shared memory.

#: Where the sums of the rows of squares lie, (2, count) float32 in shared memory, [0] with the first scale:
#: place(row, column) of the row of a square that an element of the matrix lies in; second_errs_less(sums, row, column).
Sums = namedtuple("Sums", "count place second_errs_less")


def make_sums(stage):
    """Return the `Sums` of a tile of a dtype.

    Nine words that nobody uses follow every eight rows. The rows of a warp, 8 apart, store their sums 9 banks apart,
    more than the up to 8 squares side by side; squares below each other are read 18 banks apart.
    """
    columns = tile_columns(stage)
    across = columns // 16
    eight_down = GROUP_ROWS * across + 9

    @device
    def place_of_sum(row, column):
        r = row & (TILE_ROWS - 1)
        return r * across + (r >> 3) * 9 + ((column & (columns - 1)) >> 4)

    @device
    def two_rows(sums, which, i):
        """The sums of a row and of the one eight further."""
        return sums[which, unsigned(i)] + sums[which, unsigned(i + eight_down)]

    @device
    def tree_sum(sums, which, i):
        """The sum of 16 rows: row i with i + 8, then 4, 2, 1 apart."""
        a0, a1 = two_rows(sums, which, i), two_rows(sums, which, i + across)
        a2, a3 = two_rows(sums, which, i + 2 * across), two_rows(sums, which, i + 3 * across)
        a4, a5 = two_rows(sums, which, i + 4 * across), two_rows(sums, which, i + 5 * across)
        a6, a7 = two_rows(sums, which, i + 6 * across), two_rows(sums, which, i + 7 * across)
        return ((a0 + a4) + (a2 + a6)) + ((a1 + a5) + (a3 + a7))

    @device
    def second_errs_less(sums, row, column):
        i = place_of_sum((row >> 4) << 4, column)
        return tree_sum(sums, 1, i) < tree_sum(sums, 0, i)

    return Sums(TILE_ROWS // GROUP_ROWS * eight_down, place_of_sum, second_errs_less)


def make_sum_errors(direction, get, place_of_sum, target):
    """Return `put(v, (maxima, sums, out), row, column, left)`: store the sums of errors of a row of a square.

    `get` is that of `tiles.TileMaxima`.
    """
    candidates, errors = direction.candidates(target), make_errors_of_two(direction, target)

    @device
    def sum_errors(v, shared, row, column, left):
        maxima, sums, out = shared
        amax, i = out.amax[0], unsigned(place_of_sum(row, column))
        both = candidates(get(maxima, row, column, left), amax, out)
        sums[0, i], sums[1, i] = errors(v, both, amax, (column & 15) == 8)

    return sum_errors


def make_cast_square(direction, get, second_errs_less, whole, target):
    """Return `put(v, (maxima, sums, out), outer, inner, left)`: cast with the scale that errs less in the square."""
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
class ChosenSquares(Spec):
    """Both copies, or one, of squares of 16 x 16, which have one scale in both: a tile in shared memory.

    First all values are in the tile and the squares' maxima beside it; then the sums of the errors of every row of a
    square; then each copy is cast with the scale whose 16 sums are less.

    Attributes:
        storage, direction: as above; `direction` is the rowwise one.
        rowwise, columnwise: whether a copy is made. whole_rows, whole_columns: as `whole`, of either copy.
    """

    storage: str
    direction: Direction
    rowwise: bool
    columnwise: bool
    whole_rows: bool
    whole_columns: bool

    title = "a choice of scales for squares"

    def __str__(self):
        copies = [self.direction.name] * self.rowwise + [f"{self.direction.name} of columns"] * self.columnwise
        return f"{self.title}: {self.storage} -> {' + '.join(copies)}"

    def operands(self):
        out = described_chosen(self.direction)
        return described_source(as_it_is(self.storage)), out, out

    def grid(self, outer, inner):
        return tile_grid(outer, inner, tile_columns(self.storage))

    def build(self, target):
        stage, direction, rowwise, columnwise = self.storage, self.direction, self.rowwise, self.columnwise
        count, clear, raise_maxima, get = make_tile_maxima(16, stage)
        sums_count, place_of_sum, second_errs_less = make_sums(stage)
        fill = make_fill(make_read(as_it_is(stage), self.whole_rows, target), raise_maxima, stage)
        sum_errors = make_reread(make_sum_errors(direction, get, place_of_sum, target), stage)
        cast_rows = make_reread(make_cast_square(direction, get, second_errs_less, self.whole_rows, target), stage)
        turn = make_turn(make_cast_square(direction.other, get, second_errs_less, self.whole_columns, target), stage)

        @kernel
        def chosen_squares(source, row_out, column_out):
            tile = cuda.shared.array(TILE_WORDS, np.uint32)
            maxima = cuda.shared.array(count, np.int32)
            sums = cuda.shared.array((2, sums_count), np.float32)
            rows, width = row_out.outer, row_out.inner
            clear(maxima)
            cuda.syncthreads()
            fill(tile, source, maxima, rows, width)
            cuda.syncthreads()
            sum_errors(tile, (maxima, sums, row_out), rows, width)
            cuda.syncthreads()
            if rowwise:
                cast_rows(tile, (maxima, sums, row_out), rows, width)
            if columnwise:
                turn(tile, (maxima, sums, column_out), rows, width)

        return chosen_squares


# --- 5. their launch --------------------------------------------------------------------------------


def quantize(gpu, job):
    """Fill the copies of a `copies.BlockJob`; its front is a tensor as it is, whose amax is known."""
    front, rowwise, columnwise = job.front, job.rowwise, job.columnwise
    (m, k), storage, source = front.matrix_shape, front.storage, front.source()
    direction = job.direction.other if job.direction.columnwise else job.direction
    data = None if rowwise is None else rowwise.data
    whole_columns = columnwise is not None and columnwise.inner % VECTOR == 0 and columnwise.data.aligned
    if columnwise is None and not direction.square:
        spec = ChosenRows(storage, direction, gpu.whole(front, 16, data))
        gpu.launch(spec, (m, k), source, rowwise.chosen())
        return
    not_made = (rowwise or columnwise).chosen()._replace(data=None, scales=None, outer=m, inner=k)
    row_out, column_out = (not_made if copy is None else copy.chosen() for copy in (rowwise, columnwise))
    whole = gpu.whole(front, VECTOR, data), whole_columns
    if direction.square:
        spec = ChosenSquares(storage, direction, rowwise is not None, columnwise is not None, *whole)
    else:
        spec = ChosenBoth(storage, direction, rowwise is not None, *whole)
    gpu.launch(spec, (m, k), source, row_out, column_out)


# --- 6. their cost ----------------------------------------------------------------------------------


def costs():
    """The `operands.Cost` of each kernel, from bfloat16: bytes are values of two bytes, codes and scales."""
    direction, elements = direction_of(NVFP4Scaling(four_over_six="mae"), False), 128 * 128 / 256
    squares = direction_of(NVFP4Scaling(two_d=True, four_over_six="mae"), False)
    both, of_squares = ChosenBoth("bfloat16", direction, *[True] * 3), ChosenSquares("bfloat16", squares, *[True] * 4)
    yield Cost("bf16 -> NVFP4, 4over6", ChosenRows("bfloat16", direction, True), 41, None, 2, 0)
    yield Cost("bf16 -> NVFP4 4over6 both", both, elements * 3.125)
    yield Cost("bf16 -> NVFP4 16x16 4over6 both", of_squares, elements * 3.125)
