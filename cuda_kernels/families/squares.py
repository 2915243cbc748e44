"""Casts by blocks that are squares, whose one scale serves both copies: 128x128, MXFP8 32x32, NVFP4 and MXFP4 16x16.

    copies     rowwise, as the values lie; columnwise, for the other GEMM operand: transposed, or (MXFP8) as they lie
    amax       the largest magnitude of a square; NaN is ignored
    scale      the rule that the scaling declares (`refops.scalings`) makes of the amax what is stored and what elements
               are multiplied by. 128x128: multiplier = fmt.max / amax, rounded down to a power of two unless the
               scaling says otherwise; 1 / multiplier is stored
    code       the element format's code of value * multiplier, to nearest (or stochastically), saturated
    place      the scaling says where scales lie, and whether a square's is stored once or for each row and column of it

An activation or a gradient in front is rounded to the tensor's dtype before anything else. Arguments, results and
errors are those of `refops.quantize`.
"""

# --- 1. what it computes: above ---------------------------------------------------------------------

from dataclasses import dataclass

import numpy as np

from cuda_kernels import casts
from cuda_kernels.directions import Direction, direction_of
from cuda_kernels.launch import row_shape, tile_grid
from cuda_kernels.operands import Cost, Kind, Maxima, Spec, Values, as_it_is, described
from cuda_kernels.reads import described_source, make_read, make_read_sixteen
from cuda_kernels.simt import (
    I32,
    F,
    as_f32,
    as_i32,
    atomic_max,
    cuda,
    device,
    kernel,
    larger_magnitude,
    offset,
    thread_number,
)
from cuda_kernels.stores import cast_nothing, described_blocks, make_cast_under
from cuda_kernels.tiles import (
    TILE_WORDS,
    make_fill,
    make_reread,
    make_tile_maxima,
    make_turn,
    tile_columns,
)
from cuda_kernels.vectors import VECTOR, make_block_max, make_round, place
from refops.formats import E4M3
from refops.quantization.layout import ceil_div
from refops.scalings import BlockScaling, MXFP8Scaling, NVFP4Scaling

ZERO, LIMIT = F(0), F(448)
widen = casts.widen_bf16

# --- 2. naive ---------------------------------------------------------------------------------------


@kernel
def squares_naive(x, rowwise, columnwise, scales, rows, columns):
    """x (rows, columns), bfloat16 -> codes (rows, columns), codes (columns, rows), scales: one thread one square.

    `columns` is a multiple of 128; `rows` need not be. The rule of the scale is written out: multiplier = 448 / amax.
    A thread reads 16384 values twice. There are far too few threads, and those of a warp read 256 bytes apart.
    """
    i = thread_number()
    row0, column0, amax = i // (columns // 128) * 128, i % (columns // 128) * 128, ZERO
    for row in range(row0, min(row0 + 128, rows)):
        for column in range(column0, column0 + 128):
            amax = larger_magnitude(amax, widen(x[offset(row, columns, column)]))
    multiplier = LIMIT / amax if amax > ZERO else F(1)
    if row0 < rows:
        scales[i] = F(1) / multiplier
    for row in range(row0, min(row0 + 128, rows)):
        for column in range(column0, column0 + 128):
            code = np.uint8(casts.e4m3(widen(x[offset(row, columns, column)]) * multiplier))
            rowwise[offset(row, columns, column)] = columnwise[offset(column, rows, row)] = code


# --- 3. coalesced -----------------------------------------------------------------------------------


@kernel
def squares_coalesced(x, rowwise, columnwise, scales, rows, columns):
    """As `squares_naive`: 32 x 32 threads own a square. Warp y takes its rows y, y + 32, y + 64 and y + 96.

    Every thread raises one maximum in shared memory to its own: magnitudes have the order of their bits as integers.
    Reads and rowwise stores are coalesced. A warp's columnwise store still writes to 32 different lines.
    """
    largest = cuda.shared.array(1, np.int32)
    row0, column0 = I32(cuda.blockIdx.y * 128), I32(cuda.blockIdx.x * 128)
    tx, ty, amax = cuda.threadIdx.x, cuda.threadIdx.y, ZERO
    largest[0] = 0
    cuda.syncthreads()  # the maximum is zero before any thread raises it
    for row in range(row0 + ty, min(row0 + 128, rows), 32):
        for column in range(column0 + tx, column0 + 128, 32):
            amax = larger_magnitude(amax, widen(x[offset(row, columns, column)]))
    cuda.atomic.max(largest, 0, as_i32(amax))
    cuda.syncthreads()  # all threads have raised it before any reads it
    multiplier = LIMIT / as_f32(largest[0]) if largest[0] > 0 else F(1)
    scales[offset(cuda.blockIdx.y, cuda.gridDim.x, cuda.blockIdx.x)] = F(1) / multiplier
    for row in range(row0 + ty, min(row0 + 128, rows), 32):
        for column in range(column0 + tx, column0 + 128, 32):
            code = np.uint8(casts.e4m3(widen(x[offset(row, columns, column)]) * multiplier))
            rowwise[offset(row, columns, column)] = columnwise[offset(column, rows, row)] = code


# --- 4. fused ---------------------------------------------------------------------------------------

# 256 threads own 128 rows x 128 columns (float32: 64) in shared memory (see `tiles`), and with them whole squares; of
# 128 x 128 that is so only for 16-bit dtypes. Eight neighbours of a row in each step of `fill` and `reread`, eight of a
# column in each step of `turn`. Four functions:
#
#   clear(maxima)                                 sets the squares' largest magnitudes, in shared memory, to zero
#   fill(tile, source, maxima, rows, columns)     reads the values and puts them into the tile. The edge / 8 lanes that
#                                                 have one row of a square find their common maximum by shuffles; one of
#                                                 them raises the square's to it, by an atomic operation
#   reread(tile, (maxima, row_out, column_out), rows, columns)
#                                                 takes the values out again and casts each copy that lies along rows
#   turn(tile, (maxima, column_out), rows, columns)
#                                                 takes them out as columns and casts the transposed copy
#
# `read`, `get` and casts, which these are made of, take `left`: the number of elements from here to the end of the row
# (in `turn`, of the column). It may exceed the elements of the thread; outside the matrix it is 0 or negative: a read
# gives zeros there and nothing is stored, but the thread goes on, for its warp shuffles in `fill`.
#
# How eight values of a square are cast is one text for all kernels. `get(maxima, row, column, left)` is the square's
# maximum, which lies in shared memory, or in global memory where an earlier kernel found it. `stores.make_cast_under`
# makes the rest: it applies the rule and stores codes and scale. The scale is stored by the thread that owns the
# square's first element, or, if the scaling repeats it, the first element in each of its rows. A columnwise copy that
# lies along rows has a scale for each column instead: `directions.put_scales_of_columns`.


def make_read_rounded(values, whole, target):
    """Return `read(source, row, column, left)`: eight values, of an activation rounded to the tensor's dtype."""
    read, rounded = make_read(values, whole, target), make_round(values.storage, target)
    if values.kind is Kind.IDENTITY:
        return read
    return device(lambda source, row, column, left: rounded(read(source, row, column, left)))


def called(direction):
    """What tables call a copy."""
    return f"{direction.name} of columns" if direction.columnwise else direction.name


@dataclass(frozen=True)
class CastInTiles(Spec):
    """What the kernels that cast in tiles have in common.

    Attributes:
        values: what is computed.
        direction: how the rowwise copy is cast; `direction.other` is how the columnwise one is.
        rowwise, columnwise: whether a copy is made.
        whole_rows: rows are a multiple of 8 elements (what a thread owns) and what is read and stored along rows is
            aligned to 16 bytes: a thread has all of its elements or none, in wide accesses. Else each element is an
            access of its own.
        whole_columns: the same of a transposed copy, whose rows are the matrix's columns.
    """

    values: Values
    direction: Direction
    rowwise: bool
    columnwise: bool
    whole_rows: bool
    whole_columns: bool

    def __str__(self):
        directions = (self.direction, self.rowwise), (self.direction.other, self.columnwise)
        copies = [called(direction) for direction, made in directions if made]
        return f"{self.title}: {self.values} -> {' + '.join(copies)}"

    def operands(self):
        out = described_blocks(self.direction)
        return described_source(self.values), out, out

    def must_read(self, field):
        return self.values.must_read(field)

    def grid(self, outer, inner):
        return tile_grid(outer, inner, tile_columns(self.values.storage))

    @property
    def edge(self):
        """Rows, and columns, of a square."""
        return self.direction.block[1]

    @property
    def transposes(self):
        """Whether a transposed copy is made."""
        return self.columnwise and self.direction.other.transposed


def make_cast_along(spec, get, target):
    """Return `put(v, (maxima, row_out, column_out), row, column, left)`: cast the copies that lie along rows.

    `spec` is the `CastInTiles` of the kernel, `get` gives a square's maximum.
    """
    along_too = spec.columnwise and not spec.transposes
    cast = make_cast_under(spec.direction, spec.whole_rows, target) if spec.rowwise else cast_nothing
    cast_too = make_cast_under(spec.direction.other, spec.whole_rows, target) if along_too else cast_nothing

    @device
    def cast_along(v, out, row, column, left):
        maxima, row_out, column_out = out
        largest = get(maxima, row, column, left)
        cast(v, largest, row_out, row, column, left)
        cast_too(v, largest, column_out, row, column, left)

    return cast_along


def make_cast_down(spec, get, target):
    """Return `put(v, (maxima, column_out), column, row, left)`: cast the transposed copy, if there is one.

    As `make_cast_along`, but `v` are values of a column from `row` on.
    """
    cast = make_cast_under(spec.direction.other, spec.whole_columns, target) if spec.transposes else cast_nothing

    @device
    def cast_down(v, out, column, row, left):
        maxima, column_out = out
        cast(v, get(maxima, row, column, left), column_out, column, row, left)

    return cast_down


@dataclass(frozen=True)
class Squares(CastInTiles):
    """Both copies, or one, from one read, where a tile holds whole squares."""

    title = "squares"

    def build(self, target):
        storage, transposes = self.values.storage, self.transposes
        lies_along = self.rowwise or not transposes
        count, clear, raise_maxima, get = make_tile_maxima(self.edge, storage)
        fill = make_fill(make_read_rounded(self.values, self.whole_rows, target), raise_maxima, storage)
        reread = make_reread(make_cast_along(self, get, target), storage)
        turn = make_turn(make_cast_down(self, get, target), storage)

        @kernel
        def squares(source, row_out, column_out):
            tile = cuda.shared.array(TILE_WORDS, np.uint32)
            maxima = cuda.shared.array(count, np.int32)
            rows, columns = row_out.outer, row_out.inner
            clear(maxima)
            # All maxima are zero before any thread raises one.
            cuda.syncthreads()
            fill(tile, source, maxima, rows, columns)
            # All maxima are final, and all values are in the tile: `turn` reads those that other threads put there.
            cuda.syncthreads()
            if lies_along:
                reread(tile, (maxima, row_out, column_out), rows, columns)
            if transposes:
                turn(tile, (maxima, column_out), rows, columns)

        return squares


# A tile of float32 is 64 columns wide, so it holds no square of 128 x 128. There, one kernel finds the maxima of all
# squares, `SquareMaxima`, and the next one casts under them: `GivenRows` one copy that lies along rows, `GivenSquares`
# both if one is transposed. They read float32 alone, so nothing need be rounded to the tensor's dtype.


def make_index_of_square(edge):
    """Return `index(maxima, row, column)`: where a `Maxima` has the maximum of the square that an element lies in."""
    log2_edge = edge.bit_length() - 1

    @device
    def index(maxima, row, column):
        return offset(row >> log2_edge, maxima.stride, column >> log2_edge)

    return index


@dataclass(frozen=True)
class SquareMaxima(Spec):
    """The largest magnitude of each square, into global memory: a thread owns 16 neighbours of a row.

    Edge / 16 lanes have a row of a square. They find its maximum by shuffles, and the first one raises the square's.

    Attributes:
        values: what is computed.
        edge: rows, and columns, of a square.
        whole: as `whole_rows` above, of the 16 that a thread owns; nothing is stored along rows.
    """

    values: Values
    edge: int
    whole: bool

    title = "maxima of squares"

    def __str__(self):
        return f"{self.title}: {self.values}"

    def operands(self):
        return described_source(self.values), described(Maxima)

    def must_read(self, field):
        return self.values.must_read(field)

    def grid(self, outer, inner):
        return row_shape(outer, inner, lanes=self.edge // 16, owned=16)

    def build(self, target):
        read, block_max = make_read_sixteen(self.values, self.whole, target), make_block_max(16, self.edge)
        lanes, index = self.edge // 16, make_index_of_square(self.edge)

        @kernel
        def square_maxima(source, out):
            row, column, left = place(16, out.outer, out.inner)
            largest = block_max(read(source, row, column, left))
            if (cuda.threadIdx.x & (lanes - 1)) == 0 and left > 0:
                atomic_max(out.amax, index(out, row, column), as_i32(largest))

        return square_maxima


def make_given(edge):
    """Return `get(maxima, row, column, left)`: what `SquareMaxima` found for the square of an element."""
    index = make_index_of_square(edge)

    @device
    def get(maxima, row, column, left):
        return as_f32(maxima.amax[index(maxima, row, column)]) if left > 0 else ZERO

    return get


@dataclass(frozen=True)
class GivenRows(Spec):
    """One copy that lies along rows, under the maxima of `SquareMaxima`: a thread owns eight neighbours of a row.

    Attributes:
        values: what is computed.
        direction: how it is cast; that of either copy.
        whole: as `whole_rows` above.
    """

    values: Values
    direction: Direction
    whole: bool

    title = "squares along rows"

    def __str__(self):
        return f"{self.title}: {self.values} -> {called(self.direction)}"

    def operands(self):
        return described_source(self.values), described_blocks(self.direction), described(Maxima)

    def must_read(self, field):
        return self.values.must_read(field)

    def grid(self, outer, inner):
        return row_shape(outer, inner, lanes=1)

    def build(self, target):
        read, get = make_read(self.values, self.whole, target), make_given(self.direction.block[1])
        cast = make_cast_under(self.direction, self.whole, target)

        @kernel
        def given_rows(source, out, maxima):
            row, column, left = place(VECTOR, out.outer, out.inner)
            v = read(source, row, column, left)
            cast(v, get(maxima, row, column, left), out, row, column, left)

        return given_rows


@dataclass(frozen=True)
class GivenSquares(CastInTiles):
    """The transposed copy, and perhaps the rowwise one, under the maxima of `SquareMaxima`.

    `fill` reads eight neighbours of a row, puts them into the tile and casts them for the rowwise copy; `turn` takes
    eight neighbours of a column out and casts those.
    """

    title = "squares turned"

    def operands(self):
        return *super().operands(), described(Maxima)

    def build(self, target):
        storage, get = self.values.storage, make_given(self.edge)
        fill = make_fill(make_read(self.values, self.whole_rows, target), make_cast_along(self, get, target), storage)
        turn = make_turn(make_cast_down(self, get, target), storage)

        @kernel
        def given_squares(source, row_out, column_out, maxima):
            tile = cuda.shared.array(TILE_WORDS, np.uint32)
            rows, columns = row_out.outer, row_out.inner
            fill(tile, source, (maxima, row_out, column_out), rows, columns)
            # All values are in the tile: `turn` reads those that other threads put there.
            cuda.syncthreads()
            turn(tile, (maxima, column_out), rows, columns)

        return given_squares


# --- 5. their launch --------------------------------------------------------------------------------


def quantize(gpu, job):
    """Fill the copies of a `copies.BlockJob`, but not its `dbias`: another kernel sums the columns.

    `gpu` is the backend (`gpu.GPU`): `gpu.launch(spec, (rows, columns), *operands)` starts a kernel,
    `gpu.whole(front, n, *stored)` says whether rows are whole accesses of n elements in what is read and stored.
    """
    front, edge, columnwise = job.front, job.direction.block[1], job.columnwise
    if edge <= tile_columns(front.storage):
        cast_in_tiles(gpu, job, Squares)
        return
    maxima = find_maxima(gpu, front, edge)
    if columnwise is not None and columnwise.direction.transposed:
        cast_in_tiles(gpu, job, GivenSquares, maxima)
        return
    for copy in (job.rowwise, columnwise):  # each reads, and computes an activation, again: few scalings have both here
        if copy is not None:
            spec = GivenRows(front.values(), copy.direction, gpu.whole(front, VECTOR, copy.data))
            gpu.launch(spec, front.matrix_shape, front.source(), copy.blocks(), maxima)


def find_maxima(gpu, front, edge):
    """Run `SquareMaxima` for squares of an edge; return the `Maxima` that it filled."""
    m, k = front.matrix_shape
    down, across = ceil_div(m, edge), ceil_div(k, edge)
    maxima = Maxima(gpu.zeros((down, across), "float32"), across, m, k)
    spec = SquareMaxima(front.values(), edge, gpu.whole(front, 16))
    gpu.launch(spec, (m, k), front.source(), maxima)
    return maxima


def cast_in_tiles(gpu, job, kernel, *maxima):
    """Run `Squares`, or `GivenSquares` with the `Maxima` that it needs."""
    front, rowwise, columnwise = job.front, job.rowwise, job.columnwise
    (m, k), made = front.matrix_shape, [copy for copy in (rowwise, columnwise) if copy is not None]
    transposed = columnwise is not None and columnwise.direction.transposed
    spec = kernel(
        values=front.values(),
        direction=job.direction.other if job.direction.columnwise else job.direction,
        rowwise=rowwise is not None,
        columnwise=columnwise is not None,
        whole_rows=gpu.whole(front, VECTOR, *(copy.data for copy in made if not copy.direction.transposed)),
        whole_columns=transposed and columnwise.inner % VECTOR == 0 and columnwise.data.aligned,
    )
    # In place of a copy that is not made stands the other one without arrays; `row_out` says the sizes of the matrix.
    not_made = made[0].blocks()._replace(data=None, scales=None, outer=m, inner=k)
    row_out, column_out = (not_made if copy is None else copy.blocks() for copy in (rowwise, columnwise))
    gpu.launch(spec, (m, k), front.source(), row_out, column_out, *maxima)


# --- 6. their cost ----------------------------------------------------------------------------------


def costs():
    """The `operands.Cost` of each kernel.

    Bytes are those that a thread with all of its elements reads and writes; budgets are instructions for each of
    them, compiled for (H100, B200); then 16-byte loads and stores. Scales are counted where a square has one for each
    of its rows. Kernels of tiles have no budget, for they are loops, and instructions of a loop are counted once.
    """
    values, owned = as_it_is("bfloat16"), 128 * 128 / 256
    for name, scaling, size in (
        ("128x128", BlockScaling(E4M3, 2), 2 + 1 + 1),
        ("MXFP8 32x32", MXFP8Scaling(E4M3, two_d=True), 2 + 1 + 1 + 2 / 32),
        ("NVFP4 16x16", NVFP4Scaling(two_d=True), 2 + 1 / 2 + 1 / 2 + 2 / 16),
    ):
        spec = Squares(values, direction_of(scaling, False), True, True, True, True)
        yield Cost(f"bf16 -> {name} both", spec, owned * size)
    wide, direction = as_it_is("float32"), direction_of(BlockScaling(E4M3, 2), False)
    maxima, rows = SquareMaxima(wide, 128, True), GivenRows(wide, direction, True)
    both = GivenSquares(wide, direction, True, True, True, True)
    yield Cost("float32 -> maxima of 128x128", maxima, 16 * 4, budget=(1.2, 1.05), wide_loads=4, wide_stores=0)
    yield Cost("float32 -> 128x128", rows, 8 * (4 + 1), budget=(2.3, 2.35), wide_loads=2, wide_stores=0)
    yield Cost("float32 -> 128x128 both", both, owned / 2 * (4 + 1 + 1))
