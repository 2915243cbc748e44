"""Casts by blocks of a row, two codes in a byte, under a scale of the tensor or of each row: NVFP4. And MXFP4.

The rules are those that the scaling declares (`refops.scalings`). NVFP4's blocks are 16 elements of a row:

    tensor     S_enc = 448 * 6 / amax, at most FLT_MAX, 1 where amax is 0 or infinite; S_dec = 1 / S_enc. The amax is
               that of the tensor, or of each row. Earlier kernels find it and compute both (`scales.tensor_scales`)
    scale      E4M3(block amax * (S_enc * (1 / 6))) is stored, a byte;
               multiplier = min(1 / (value of the byte * S_dec), FLT_MAX)
    code       E2M1(value * multiplier), to nearest, ties to even, saturated; or stochastically
    place      rowwise codes lie as the values do, columnwise ones transposed; the scaling says where scales lie

MXFP4's blocks are 32 elements, or 16. They share nothing: the byte says a power of two, block amax * (1 / 6) rounded up
to the next one, and the multiplier is 1 / that power.

Columns may go through a random Hadamard transform before their cast. No activation is computed here: for these scalings
another kernel stores its result first. Arguments, results and errors are those of `refops.quantize`.
"""

# --- 1. what it computes: above ---------------------------------------------------------------------

from dataclasses import dataclass

import numpy as np

from cuda_kernels import casts
from cuda_kernels.directions import Direction, direction_of
from cuda_kernels.hadamard import make_hadamard
from cuda_kernels.launch import row_shape, tile_grid
from cuda_kernels.operands import Bits, Cost, Maxima, Spec, as_it_is, described
from cuda_kernels.reads import described_source, make_read, make_read_sixteen
from cuda_kernels.scale_rules import RuleWords
from cuda_kernels.simt import I32, F, cuda, device, kernel, larger_magnitude, offset, select, thread_number
from cuda_kernels.stores import (
    described_blocks,
    make_cast_blocks,
    make_cast_sixteen_by,
    make_record_amax,
    put_nothing,
)
from cuda_kernels.tiles import TILE_WORDS, make_fill, make_turn, tile_columns
from cuda_kernels.vectors import (
    VECTOR,
    make_block_max,
    make_group_max,
    make_round,
    place,
)
from refops.scalings import NVFP4Scaling

ZERO = F(0)
widen, max_of_8 = casts.widen_bf16, make_group_max(8)

# --- 2. naive ---------------------------------------------------------------------------------------

# The declared rules: scale_code(block amax, (S_enc, S_dec), p) is the byte, multiplier_of(byte, (S_enc, S_dec)) what
# elements are multiplied by. `p` are numbers of the scaling, which this rule ignores: the kernels pass ZERO.
scale_code, multiplier_of = NVFP4Scaling().scale_code(RuleWords()), NVFP4Scaling().multiplier(RuleWords())


@kernel
def nvfp4_naive(x, tensor_scales, codes, scales, rows, columns):
    """x (M, columns), bfloat16, tensor_scales (S_enc, S_dec) -> codes, scales (M, columns / 16): one thread one block.

    Two codes lie in a byte, the first one low. Neighbouring threads read 32 bytes apart.
    """
    i = thread_number()
    row, block = i // (columns // 16), i % (columns // 16)
    if row < rows:
        first, amax = offset(row, columns, block * 16), ZERO
        for k in range(16):
            amax = larger_magnitude(amax, widen(x[first + k]))
        of_tensor = tensor_scales[0], tensor_scales[1]
        scale = scale_code(amax, of_tensor, ZERO)
        scales[offset(row, columns // 16, block)] = np.uint8(scale)
        multiplier = multiplier_of(scale, of_tensor)
        for k in range(0, 16, 2):
            pair = casts.e2m1_pair(widen(x[first + k]) * multiplier, widen(x[first + k + 1]) * multiplier)
            codes[(first + k) >> 1] = np.uint8(pair)


# --- 3. coalesced -----------------------------------------------------------------------------------


@kernel
def nvfp4_coalesced(x, tensor_scales, codes, scales, rows, columns):
    """As `nvfp4_naive`: one thread one byte of codes, two elements; eight neighbouring threads share a block.

    `max_of_8` is a shuffle that every lane must reach, so threads past the last row read row 0 and store nothing.
    """
    i = thread_number()
    row, column = i // (columns // 2), i % (columns // 2) * 2
    inside = row < rows
    first = offset(select(inside, row, I32(0)), columns, column)
    low, high = widen(x[first]), widen(x[first + 1])
    of_tensor = tensor_scales[0], tensor_scales[1]
    scale = scale_code(max_of_8(larger_magnitude(larger_magnitude(ZERO, low), high)), of_tensor, ZERO)
    multiplier = multiplier_of(scale, of_tensor)
    if inside:
        codes[first >> 1] = np.uint8(casts.e2m1_pair(low * multiplier, high * multiplier))
        if column % 16 == 0:
            scales[offset(row, columns // 16, column // 16)] = np.uint8(scale)


# --- 4. fused ---------------------------------------------------------------------------------------

# A thread owns 16 neighbours of a row, NVFP4's block, in registers as two vectors of eight float32. A block of threads
# is (along, 256 / along): `along` of them, a power of two from 4 to 128, own elements of one row (`launch.row_shape`).
# So threads that share a larger block of elements are neighbouring lanes of a warp. Five functions:
#
#   place(16, rows, columns)                            (row, column, left) of the first
#   read(source, row, column, left)                     their values
#   block_max(v)                                        largest magnitude of the block: the thread's own, or with blocks
#                                                       of B, which B / 16 threads share, found by shuffles
#   scale_block(block_amax, out, row, column, left)     what elements are multiplied by, by the declared rule; the
#                                                       scale is stored by the first of the block's threads
#   cast(v, multiplier, out, row, column, left)         stores the codes: 16 of them are one store of 8 bytes
#
# left: the number of elements from here to the end of the row. It may exceed the elements of the thread; outside the
# matrix it is 0 or negative: a read gives zeros there and nothing is stored, but the thread goes on, for the shuffles
# in `block_max`.


@dataclass(frozen=True)
class NVFP4Rows(Spec):
    """One copy along the rows.

    Attributes:
        storage: dtype of the values.
        direction: how they are cast.
        whole: rows are a multiple of 16 elements (what a thread owns) and every array is aligned to 16 bytes: a thread
            has all of its elements or none, in wide accesses. Else each element is an access of its own.
    """

    storage: str
    direction: Direction
    whole: bool

    title = "NVFP4 along rows"

    def __str__(self):
        return f"{self.title}: {self.storage} -> {self.direction.name}{', stochastic' * bool(self.direction.random)}"

    def operands(self):
        return described_source(as_it_is(self.storage)), described_blocks(self.direction)

    def must_read(self, field):
        """Random bits only where the caller gives them, numbers that blocks share only where the scaling has any."""
        used = {"bits": self.direction.random is Bits.GIVEN, "tensor_scales": self.direction.rules().parts > 0}
        return super().must_read(field) and used.get(field, True)

    def grid(self, outer, inner):
        return row_shape(outer, inner, lanes=self.direction.block[1] // 16, owned=16)

    def build(self, target):
        read = make_read_sixteen(as_it_is(self.storage), self.whole, target)
        block_max, scale_block = make_block_max(16, self.direction.block[1]), self.direction.scale_block(target)
        cast = make_cast_sixteen_by(self.direction, self.whole, target)

        @kernel
        def nvfp4_rows(source, out):
            row, column, left = place(16, out.outer, out.inner)
            v = read(source, row, column, left)
            multiplier = scale_block(block_max(v), out, row, column, left)
            cast(v, multiplier, out, row, column, left)

        return nvfp4_rows


# 4a. Both copies, or the columnwise one, from one read, through a tile in shared memory (see `tiles`). 256 threads own
#     128 rows x 128 columns (float32: 64). Eight neighbours of a row in each step of `fill`, eight of a column in each
#     step of `turn`; B / 8 threads share a block.
#
#   fill(tile, source, out, rows, width)    reads eight of a row, puts them into the tile and casts them into `out`
#   a barrier                               all threads' values are in the tile
#   turn(tile, out, rows, width)            takes eight of a column out of the tile and casts them into `out`
#
#     The Hadamard transform replaces 16 neighbours of a column by 16 sums of them with random signs, which spread one
#     large value over all. In `turn` 16 neighbouring lanes share a column, so lane ^ 1 holds the other half of such a
#     group. Like TE's kernel, we round the sums to the tensor's dtype.


def make_transform_first(put, sign_mask, storage, target):
    """Return `put(v, out, outer, inner, left)` that transforms v first; `put` itself if `sign_mask` is None."""
    if sign_mask is None:
        return put
    hadamard, rounded = make_hadamard(sign_mask), make_round(storage, target)

    @device
    def transform_first(v, out, outer, inner, left):
        put(rounded(hadamard(v, (inner & 15) == 8)), out, outer, inner, left)

    return transform_first


@dataclass(frozen=True)
class BothNVFP4(Spec):
    """Both copies, or the columnwise one.

    Attributes:
        storage, direction: as above; `direction` is the rowwise one.
        rowwise: whether the rowwise copy is made.
        whole_rows: as `whole`, of eight, of the values and the rowwise codes. whole_columns: of the columnwise codes.
        sign_mask: of the Hadamard transform of columns, or None.
    """

    storage: str
    direction: Direction
    rowwise: bool
    whole_rows: bool
    whole_columns: bool
    sign_mask: int | None

    title = "NVFP4 in both directions"

    def __str__(self):
        return f"{self.title}: {self.storage} -> {self.direction.name}"

    def operands(self):
        out = described_blocks(self.direction)
        return described_source(as_it_is(self.storage)), out, out

    def grid(self, outer, inner):
        return tile_grid(outer, inner, tile_columns(self.storage))

    def build(self, target):
        read = make_read(as_it_is(self.storage), self.whole_rows, target)
        along = make_cast_blocks(self.direction, self.whole_rows, target) if self.rowwise else put_nothing
        down = make_cast_blocks(self.direction.other, self.whole_columns, target)
        down = make_transform_first(down, self.sign_mask, self.storage, target)
        fill, turn = make_fill(read, along, self.storage), make_turn(down, self.storage)

        @kernel
        def both_nvfp4(source, row_out, column_out):
            tile = cuda.shared.array(TILE_WORDS, np.uint32)
            fill(tile, source, row_out, source.rows, source.width)
            cuda.syncthreads()  # all threads' values are in the tile
            turn(tile, column_out, source.rows, source.width)

        return both_nvfp4


# 4b. Stochastic rounding is done by either kernel, if its `direction.random` is not None: a code is rounded up with the
#     probability of the part that is cut off, so that sums of many keep their mean. An element needs eight random bits,
#     and `direction.random` says where `cast` takes them from (`stores`, "stochastic rounding"):
#
#   Bits.PHILOX    the 16 bytes of 16 elements are one output of Philox, a function without memory of key and counter:
#                  key `seed`, counter `offset` and number = first_block + row * (inner / 16) + column / 16, rows and
#                  columns of the copy. `first_block` keeps the copies apart. Where two threads share the 16 elements,
#                  each computes the output and takes its half
#   Bits.GIVEN     the caller gives them, one byte an element


# 4c. The amaxes that `tensor_scales` come from, where the directions have different ones: of each row and of each
#     column, or of what the Hadamard transform makes of the columns. (The amax of the tensor as it is serves both, see
#     `per_tensor`.)
#
#   record(v, out, outer, inner, left)    raises out.amax to the largest magnitude of lanes that share one atomic


@dataclass(frozen=True)
class RowAmaxes(Spec):
    """The largest magnitude of each row: a thread reads eight neighbours, four threads share one atomic.

    Four neighbouring lanes are always of one row (`launch.row_shape`), however short rows are.

    Attributes:
        storage, whole: as above, of eight.
    """

    storage: str
    whole: bool

    title = "amaxes of rows"

    def __str__(self):
        return f"{self.title}: {self.storage}"

    def operands(self):
        return described_source(as_it_is(self.storage)), described(Maxima)

    def grid(self, outer, inner):
        return row_shape(outer, inner, lanes=4)

    def build(self, target):
        read, record = make_read(as_it_is(self.storage), self.whole, target), make_record_amax(4, by_outer=True)

        @kernel
        def row_amaxes(source, out):
            row, column, left = place(VECTOR, out.outer, out.inner)
            record(read(source, row, column, left), out, row, column, left)

        return row_amaxes


@dataclass(frozen=True)
class ColumnAmaxes(Spec):
    """The largest magnitude of each column, or of all of them, from a tile as in `BothNVFP4`.

    In `turn` the 16 lanes of a column share one atomic; if there is one number for all columns, the 32 of a warp do.

    Attributes:
        storage, whole: as above, of eight.
        by_column: each column has its own.
        sign_mask: of the Hadamard transform of columns, or None.
    """

    storage: str
    whole: bool
    by_column: bool
    sign_mask: int | None

    title = "amaxes of columns"

    def __str__(self):
        return f"{self.title}: {self.storage}"

    def operands(self):
        return described_source(as_it_is(self.storage)), described(Maxima)

    def grid(self, outer, inner):
        return tile_grid(outer, inner, tile_columns(self.storage))

    def build(self, target):
        record = make_record_amax(16, by_outer=True) if self.by_column else make_record_amax(32, by_outer=False)
        record = make_transform_first(record, self.sign_mask, self.storage, target)
        fill = make_fill(make_read(as_it_is(self.storage), self.whole, target), put_nothing, self.storage)
        turn = make_turn(record, self.storage)

        @kernel
        def column_amaxes(source, out):
            tile = cuda.shared.array(TILE_WORDS, np.uint32)
            fill(tile, source, out, source.rows, source.width)
            cuda.syncthreads()  # all threads' values are in the tile
            turn(tile, out, source.rows, source.width)

        return column_amaxes


# --- 5. their launch --------------------------------------------------------------------------------


def quantize(gpu, job):
    """Fill the copies of a `copies.BlockJob`.

    Its front is a tensor as it is. Its column sums, and the numbers that blocks share, are made already: `job.rounded`
    and `job.dbias` are not looked at. `gpu` is the backend (`gpu.GPU`).
    """
    front, rowwise, columnwise = job.front, job.rowwise, job.columnwise
    # A tile of float32 is 64 columns wide. Blocks of NVFP4 and MXFP4 always fit, those of a caller's scaling may not.
    fits = job.direction.block[1] <= tile_columns(front.storage)
    together = rowwise is not None and columnwise is not None and fits
    if rowwise is not None and not together:
        spec = NVFP4Rows(front.storage, rowwise.direction, gpu.whole(front, 16, rowwise.data))
        gpu.launch(spec, front.matrix_shape, front.source(), rowwise.blocks())
    if columnwise is not None:
        whole = gpu.whole(front, VECTOR, rowwise.data if together else None)
        # Not `gpu.whole`, which asks about rows of what is read: columns come out of the tile.
        whole_columns = columnwise.inner % VECTOR == 0 and columnwise.data.aligned
        direction = columnwise.direction.other
        spec = BothNVFP4(front.storage, direction, together, whole, whole_columns, job.hadamard)
        # The columnwise copy stands in for a rowwise one that is not made: `put_nothing` ignores it.
        row_out = rowwise if together else columnwise
        gpu.launch(spec, front.matrix_shape, front.source(), row_out.blocks(), columnwise.blocks())


def amaxes(gpu, front, sign_mask, *, of_rows, of_columns, by_column):
    """Fill amaxes that the directions do not share, float32 arrays that are zero, or None for those that are not kept.

    Args:
        front: a tensor as it is, not empty. sign_mask: of the Hadamard transform of columns, or None.
        of_rows: (M,). of_columns: (K,) if `by_column`, else (1,), of all of them.
    """
    m, k = front.matrix_shape
    if of_rows is not None:
        spec = RowAmaxes(front.storage, gpu.whole(front, VECTOR))
        # `stride` is for maxima in two dimensions: these kernels do not look at it.
        gpu.launch(spec, (m, k), front.source(), Maxima(of_rows, stride=1, outer=m, inner=k))
    if of_columns is not None:
        spec = ColumnAmaxes(front.storage, gpu.whole(front, VECTOR), by_column, sign_mask)
        gpu.launch(spec, (m, k), front.source(), Maxima(of_columns, stride=1, outer=k, inner=m))


# --- 6. their cost ----------------------------------------------------------------------------------


def costs():
    """The `operands.Cost` of each kernel.

    Bytes are those that a thread with all of its elements reads and writes: values, half a byte of code for each
    in a copy, a scale for 16. Budgets are instructions for each of them, compiled for (H100, B200).
    """
    plain = direction_of(NVFP4Scaling(), columnwise=False)
    by_row = direction_of(NVFP4Scaling(row_scaled=True), columnwise=False)
    random = direction_of(NVFP4Scaling(stochastic_rounding=True), columnwise=False)
    for name, storage, size, direction, budget in (
        ("bf16 -> NVFP4", "bfloat16", 2, plain, (5.2, 3.1)),
        ("bf16 -> NVFP4, row-scaled", "bfloat16", 2, by_row, (5.35, 3.2)),
        ("bf16 -> NVFP4, stochastic", "bfloat16", 2, random, (9, 8.8)),
        ("float16 -> NVFP4", "float16", 2, plain, (5.2, 3.1)),
        ("float32 -> NVFP4", "float32", 4, plain, (2.8, 1.65)),
    ):
        spec, copy = NVFP4Rows(storage, direction, True), 1 / 2 + 1 / 16
        yield Cost(name, spec, 16 * (size + copy), budget=budget, wide_loads=size, wide_stores=0)
    tile, both = 128 * 128 / 256, 2 + 2 * (1 / 2 + 1 / 16)
    yield Cost("bf16 -> NVFP4 both", BothNVFP4("bfloat16", plain, True, True, True, None), tile * both)
    yield Cost("bf16 -> NVFP4 + RHT both", BothNVFP4("bfloat16", plain, True, True, True, 0xD7E8), tile * both)
    yield Cost("amaxes of rows of bf16", RowAmaxes("bfloat16", True), VECTOR * 2, wide_loads=1, wide_stores=0)
    yield Cost("amax of columns of bf16 + RHT", ColumnAmaxes("bfloat16", True, False, 0xD7E8), tile * 2)
