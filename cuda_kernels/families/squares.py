"""Casts by blocks that are squares, whose one scale serves both copies: 128x128, MXFP8 32x32, NVFP4 and MXFP4 16x16.

    scale      the declared rule of the square's largest magnitude: (what is stored, what elements are multiplied with)
    code       the element format's code of value * multiplier, to nearest (or stochastically), saturated
    place      the columnwise copy lies transposed, or as the values do; the scaling says where scales lie, and whether
               a square's scale is stored once or for each of its rows and columns

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
    select,
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
    """x (M, columns) -> codes (M, columns), (columns, M), scales (M / 128, columns / 128): one thread one square.

    A thread reads 16384 values twice. There are far too few threads, and those of a warp read 256 bytes apart.
    """
    i = thread_number()
    row0, column0, amax = i // (columns // 128) * 128, i % (columns // 128) * 128, ZERO
    for row in range(row0, min(row0 + 128, rows)):
        for column in range(column0, column0 + 128):
            amax = larger_magnitude(amax, widen(x[offset(row, columns, column)]))
    factor = LIMIT / amax if amax > ZERO else F(1)
    if row0 < rows:
        scales[i] = F(1) / factor
    for row in range(row0, min(row0 + 128, rows)):
        for column in range(column0, column0 + 128):
            code = np.uint8(casts.e4m3(widen(x[offset(row, columns, column)]) * factor))
            rowwise[offset(row, columns, column)] = columnwise[offset(column, rows, row)] = code


# --- 3. coalesced -----------------------------------------------------------------------------------


@kernel
def squares_coalesced(x, rowwise, columnwise, scales, rows, columns):
    """As `squares_naive`: 32 x 32 threads own a square, a warp one of 32 rows at a time; the maximum is shared.

    Reads and rowwise stores are coalesced. A warp's columnwise store still writes to 32 different lines.
    """
    largest = cuda.shared.array(1, np.int32)
    row0, column0, amax = I32(cuda.blockIdx.y * 128), I32(cuda.blockIdx.x * 128 + cuda.threadIdx.x), ZERO
    largest[0] = 0
    cuda.syncthreads()
    for row in range(row0 + cuda.threadIdx.y, min(row0 + 128, rows), 32):
        for column in range(column0, column0 + 128, 32):
            amax = larger_magnitude(amax, widen(x[offset(row, columns, column)]))
    cuda.atomic.max(largest, 0, as_i32(amax))
    cuda.syncthreads()
    factor = LIMIT / as_f32(largest[0]) if largest[0] > 0 else F(1)
    scales[offset(cuda.blockIdx.y, cuda.gridDim.x, cuda.blockIdx.x)] = F(1) / factor
    for row in range(row0 + cuda.threadIdx.y, min(row0 + 128, rows), 32):
        for column in range(column0, column0 + 128, 32):
            code = np.uint8(casts.e4m3(widen(x[offset(row, columns, column)]) * factor))
            rowwise[offset(row, columns, column)] = columnwise[offset(column, rows, row)] = code


# --- 4. fused ---------------------------------------------------------------------------------------

# 256 threads own a tile, 128 x 128 values in shared memory (see `tiles`), and with it whole squares. Five words:
#
#   clear(maxima)                                       the squares' largest magnitudes, in shared memory: zeros
#   fill(tile, source, maxima, rows, width)             reads eight neighbours of a row at a time, puts them into the
#                                                       tile and raises the maximum of their square
#   cast_rows(tile, (maxima, row_out, column_out), ..)  takes them out again and casts each copy that lies along rows
#   turn(tile, (maxima, column_out), ..)                takes out eight neighbours of a column: the transposed copy
#
# How a square's eight values are cast is one text for all kernels: `get(maxima, row, column, left)` is the square's
# maximum, in shared or in global memory; `stores.make_cast_under` is the declared rule, and codes and scales stored.


def make_read_rounded(values, whole, target):
    """Return `read(source, row, column, left)`: eight values, of an activation rounded to the tensor's dtype."""
    read, rounded = make_read(values, whole, target), make_round(values.storage, target)
    if values.kind is Kind.IDENTITY:
        return read
    return device(lambda source, row, column, left: rounded(read(source, row, column, left)))


@dataclass(frozen=True)
class CastInTiles(Spec):
    """What the kernels that cast in tiles have in common.

    Attributes:
        values: what is computed.
        direction: how they are cast; the rowwise one.
        rowwise, columnwise: whether a copy is made.
        whole_rows, whole_columns: rows of what is read and stored, rows of a transposed copy, consist of whole aligned
            vectors. Else every element is an access of its own.
    """

    values: Values
    direction: Direction
    rowwise: bool
    columnwise: bool
    whole_rows: bool
    whole_columns: bool

    def __str__(self):
        copies = [self.direction.name] * self.rowwise + [f"{self.direction.name} of columns"] * self.columnwise
        return f"{self.title}: {self.values} -> {' + '.join(copies)}"

    def operands(self):
        out = described_blocks(self.direction)
        return described_source(self.values), out, out

    @property
    def turns(self):
        """Whether a transposed copy is made."""
        return self.columnwise and self.direction.other.transposed

    def cast_rows(self, get, target):
        """put(v, (maxima, row_out, column_out), row, column, left): cast the copies that lie along rows."""
        along_too = self.columnwise and not self.turns
        cast = make_cast_under(self.direction, self.whole_rows, target) if self.rowwise else cast_nothing
        cast_too = make_cast_under(self.direction.other, self.whole_rows, target) if along_too else cast_nothing

        @device
        def cast_rows(v, out, row, column, left):
            maxima, row_out, column_out = out
            largest = get(maxima, row, column, left)
            cast(v, largest, row_out, row, column, left)
            cast_too(v, largest, column_out, row, column, left)

        return cast_rows

    def cast_columns(self, get, target):
        """put(v, (maxima, column_out), column, row, left): cast the transposed copy."""
        cast = make_cast_under(self.direction.other, self.whole_columns, target) if self.turns else cast_nothing

        @device
        def cast_columns(v, out, column, row, left):
            maxima, column_out = out
            cast(v, get(maxima, row, column, left), column_out, column, row, left)

        return cast_columns


@dataclass(frozen=True)
class Squares(CastInTiles):
    """Both copies, or one, from one read, of squares that a tile holds."""

    title = "squares"

    def grid(self, outer, inner):
        return tile_grid(outer, inner, tile_columns(self.values.storage))

    def build(self, target):
        stage, turns = self.values.storage, self.turns
        lies_along = self.rowwise or not turns
        count, clear, raise_maxima, get = make_tile_maxima(self.direction.block[1], stage)
        fill = make_fill(make_read_rounded(self.values, self.whole_rows, target), raise_maxima, stage)
        cast_rows = make_reread(self.cast_rows(get, target), stage)
        turn = make_turn(self.cast_columns(get, target), stage)

        @kernel
        def squares(source, row_out, column_out):
            tile = cuda.shared.array(TILE_WORDS, np.uint32)
            maxima = cuda.shared.array(count, np.int32)
            clear(maxima)
            cuda.syncthreads()
            fill(tile, source, maxima, row_out.outer, row_out.inner)
            cuda.syncthreads()
            if lies_along:
                cast_rows(tile, (maxima, row_out, column_out), row_out.outer, row_out.inner)
            if turns:
                turn(tile, (maxima, column_out), row_out.outer, row_out.inner)

        return squares


# Squares that no tile holds, 128 x 128 of float32, whose tile is 64 columns wide: their maxima first, then both casts.


@dataclass(frozen=True)
class SquareMaxima(Spec):
    """The largest magnitude of each square, into memory: a thread owns 16 neighbours of a row.

    Attributes:
        values, whole: as above; `whole` is of 16 neighbours.
        edge: of a square.
    """

    values: Values
    edge: int
    whole: bool

    title = "maxima of squares"

    def __str__(self):
        return f"{self.title}: {self.values}"

    def operands(self):
        return described_source(self.values), described(Maxima)

    def grid(self, outer, inner):
        return row_shape(outer, inner, lanes=self.edge // 16, owned=16)

    def build(self, target):
        read, block_max = make_read_sixteen(self.values, self.whole, target), make_block_max(16, self.edge)
        bits, others = self.edge.bit_length() - 1, self.edge // 16 - 1

        @kernel
        def square_maxima(source, out):
            row, column = place(16)
            left = select(row < out.outer, I32(out.inner - column), I32(0))
            largest = block_max(read(source, row, column, left))
            if (cuda.threadIdx.x & others) == 0 and left > 0:
                atomic_max(out.amax, offset(row >> bits, out.stride, column >> bits), as_i32(largest))

        return square_maxima


def make_given(edge):
    """Return `get(maxima, row, column, left)`: what `SquareMaxima` found for the square of an element."""
    bits = edge.bit_length() - 1

    @device
    def get(maxima, row, column, left):
        return as_f32(maxima.amax[offset(row >> bits, maxima.stride, column >> bits)]) if left > 0 else ZERO

    return get


@dataclass(frozen=True)
class GivenRows(Spec):
    """One copy that lies along rows, under maxima that lie in memory: a thread owns eight neighbours of a row.

    Attributes:
        values, whole: as above; `whole` is of eight neighbours. direction: how they are cast, either one.
    """

    values: Values
    direction: Direction
    whole: bool

    title = "squares along rows"

    def __str__(self):
        return f"{self.title}: {self.values} -> {self.direction.name}{' of columns' * self.direction.columnwise}"

    def operands(self):
        return described_source(self.values), described_blocks(self.direction), described(Maxima)

    def grid(self, outer, inner):
        return row_shape(outer, inner, lanes=1)

    def build(self, target):
        read, get = make_read_rounded(self.values, self.whole, target), make_given(self.direction.block[1])
        cast = make_cast_under(self.direction, self.whole, target)

        @kernel
        def given_rows(source, out, maxima):
            row, column = place(VECTOR)
            left = select(row < out.outer, I32(out.inner - column), I32(0))
            v = read(source, row, column, left)
            cast(v, get(maxima, row, column, left), out, row, column, left)

        return given_rows


@dataclass(frozen=True)
class GivenSquares(CastInTiles):
    """The transposed copy, and perhaps the rowwise one, under maxima that lie in memory: a tile turns round once."""

    title = "squares turned"

    def operands(self):
        return *super().operands(), described(Maxima)

    def grid(self, outer, inner):
        return tile_grid(outer, inner, tile_columns(self.values.storage))

    def build(self, target):
        stage, get = self.values.storage, make_given(self.direction.block[1])
        read = make_read_rounded(self.values, self.whole_rows, target)
        fill = make_fill(read, self.cast_rows(get, target), stage)
        turn = make_turn(self.cast_columns(get, target), stage)

        @kernel
        def given_squares(source, row_out, column_out, maxima):
            tile = cuda.shared.array(TILE_WORDS, np.uint32)
            fill(tile, source, (maxima, row_out, column_out), row_out.outer, row_out.inner)
            cuda.syncthreads()
            turn(tile, (maxima, column_out), row_out.outer, row_out.inner)

        return given_squares


# --- 5. their launch --------------------------------------------------------------------------------


def quantize(gpu, job):
    """Fill the copies of a `copies.BlockJob`, whose column sums are another kernel's."""
    front, rowwise, columnwise = job.front, job.rowwise, job.columnwise
    shape, source, values = front.matrix_shape, front.source(), front.values(gpu.fast_math)
    along = [copy for copy in (rowwise, columnwise) if copy is not None and not copy.direction.transposed]
    whole = gpu.whole(front, VECTOR, *(copy.data for copy in along))
    turns = columnwise is not None and columnwise not in along
    fits = job.direction.block[1] <= tile_columns(front.storage)
    maxima = () if fits else (find_maxima(gpu, job, values),)
    if not fits and not turns:
        for copy in along:
            gpu.launch(GivenRows(values, copy.direction, whole), shape, source, copy.blocks(), *maxima)
        return
    not_made = (rowwise or columnwise).blocks()._replace(data=None, scales=None, outer=shape[0], inner=shape[1])
    out = [not_made if copy is None else copy.blocks() for copy in (rowwise, columnwise)]  # `row_out` says the sizes
    whole_columns = turns and columnwise.inner % VECTOR == 0 and columnwise.data.aligned
    direction = job.direction.other if job.direction.columnwise else job.direction
    made = rowwise is not None, columnwise is not None
    spec = (Squares if fits else GivenSquares)(values, direction, *made, whole, whole_columns)
    gpu.launch(spec, shape, source, *out, *maxima)


def find_maxima(gpu, job, values):
    """Run `SquareMaxima`; return the `Maxima` that it filled."""
    front, edge = job.front, job.direction.block[1]
    m, k = front.matrix_shape
    across = ceil_div(k, edge)
    maxima = Maxima(gpu.zeros((ceil_div(m, edge), across), "float32"), across, m, k)
    gpu.launch(SquareMaxima(values, edge, gpu.whole(front, 16)), (m, k), front.source(), maxima)
    return maxima


# --- 6. their cost ----------------------------------------------------------------------------------


def costs():
    """The `operands.Cost` of each kernel: bytes are values, codes and scales of a thread's part."""
    values, elements = as_it_is("bfloat16"), 128 * 128 / 256
    for name, scaling, size in (
        ("128x128", BlockScaling(E4M3, 2), 4),
        ("MXFP8 32x32", MXFP8Scaling(E4M3, two_d=True), 4.0625),
        ("NVFP4 16x16", NVFP4Scaling(two_d=True), 3.125),
    ):
        spec = Squares(values, direction_of(scaling, False), True, True, True, True)
        yield Cost(f"bf16 -> {name} both", spec, elements * size)
    wide = as_it_is("float32")
    given = GivenSquares(wide, direction_of(BlockScaling(E4M3, 2), False), True, True, True, True)
    yield Cost("float32 -> maxima of 128x128", SquareMaxima(wide, 128, True), 64, (1.2, 1.05), 4, 0)
    yield Cost("float32 -> 128x128", GivenRows(wide, given.direction, True), 40, (2.3, 2.35), 2, 0)
    yield Cost("float32 -> 128x128 both", given, elements / 2 * 6)
