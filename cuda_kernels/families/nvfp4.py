"""Casts by blocks of a row under a scale of the tensor or of each row, two codes in a byte: NVFP4, and MXFP4.

    tensor     the declared rule makes numbers for all blocks of the largest magnitude of the tensor, or of a row; an
               earlier kernel has (MXFP4 has none)
    scale      the declared rule of a block's largest magnitude, under these: (what is stored, what elements are
               multiplied with)
    code       the element format's code of value * multiplier, to nearest, ties to even, saturated; or stochastically
    place      rowwise codes lie as the values do, columnwise ones transposed; the scaling says where scales lie

Columns may go through a random Hadamard transform before their cast. Activations come without: the paths of these
scalings store their values first. Arguments, results and errors are those of `refops.quantize`.
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
    make_record_amax,
    make_store_sixteen_at_random,
    put_nothing,
)
from cuda_kernels.tiles import TILE_WORDS, make_fill, make_turn, tile_columns
from cuda_kernels.vectors import (
    VECTOR,
    make_block_max,
    make_cast_sixteen,
    make_group_max,
    make_round,
    multiply_sixteen,
    place,
)
from refops.scalings import NVFP4Scaling

ZERO = F(0)
widen, max_of_8 = casts.widen_bf16, make_group_max(8)

# --- 2. naive ---------------------------------------------------------------------------------------

nvfp4_code, nvfp4_multiplier = NVFP4Scaling().scale_code(RuleWords()), NVFP4Scaling().multiplier(RuleWords())


@kernel
def nvfp4_naive(x, tensor_scales, codes, scales, rows, columns):
    """x (M, columns), tensor_scales (S_enc, S_dec) -> codes, scales (M, columns / 16): one thread one block.

    Two codes lie in a byte. Neighbouring threads read 32 bytes apart.
    """
    i = thread_number()
    row, block = i // (columns // 16), i % (columns // 16)
    if row < rows:
        first, amax = offset(row, columns, block * 16), ZERO
        for k in range(16):
            amax = larger_magnitude(amax, widen(x[first + k]))
        of_tensor = tensor_scales[0], tensor_scales[1]
        byte = nvfp4_code(amax, of_tensor, ZERO)
        scales[offset(row, columns // 16, block)] = np.uint8(byte)
        factor = nvfp4_multiplier(byte, of_tensor)
        for k in range(0, 16, 2):
            pair = casts.e2m1_pair(widen(x[first + k]) * factor, widen(x[first + k + 1]) * factor)
            codes[(first + k) >> 1] = np.uint8(pair)


# --- 3. coalesced -----------------------------------------------------------------------------------


@kernel
def nvfp4_coalesced(x, tensor_scales, codes, scales, rows, columns):
    """As `nvfp4_naive`: one thread one byte of codes, two elements; eight neighbouring threads share a block."""
    i = thread_number()
    row, column = i // (columns // 2), i % (columns // 2) * 2
    inside = row < rows
    first = offset(select(inside, row, I32(0)), columns, column)
    low, high = widen(x[first]), widen(x[first + 1])
    of_tensor = tensor_scales[0], tensor_scales[1]
    byte = nvfp4_code(max_of_8(larger_magnitude(larger_magnitude(ZERO, low), high)), of_tensor, ZERO)
    factor = nvfp4_multiplier(byte, of_tensor)
    if inside:
        codes[first >> 1] = np.uint8(casts.e2m1_pair(low * factor, high * factor))
        if column % 16 == 0:
            scales[offset(row, columns // 16, column // 16)] = np.uint8(byte)


# --- 4. fused ---------------------------------------------------------------------------------------

# A thread owns 16 neighbours of a row, in registers as two vectors of eight float32: NVFP4's block. Five words:
#
#   place(16)                                           their (row, column)
#   read(source, row, column, left)                     their values; `left` elements to the end of the row
#   block_max(v)                                        largest magnitude of the block: the thread's own, or with blocks
#                                                       of B, which B / 16 threads share, found by shuffles
#   scale_block(block_amax, out, row, column, left)     what elements are multiplied with, by the declared rule; the
#                                                       scale is stored by the first of the block's threads
#   cast(v, multiplier, data, place, left)              the codes: 16 of them are one store of 8 bytes


@dataclass(frozen=True)
class NVFP4Rows(Spec):
    """One copy along the rows.

    Attributes:
        storage: dtype of the values.
        direction: how they are cast.
        whole: rows consist of whole 16-byte accesses at aligned addresses. Else every element is an access of its own.
    """

    storage: str
    direction: Direction
    whole: bool

    title = "NVFP4 along rows"

    def __str__(self):
        return f"{self.title}: {self.storage} -> {self.direction.name}"

    def operands(self):
        return described_source(as_it_is(self.storage)), described_blocks(self.direction)

    def grid(self, outer, inner):
        return row_shape(outer, inner, lanes=self.direction.block[1] // 16, owned=16)

    def build(self, target):
        fmt, packed, columns = self.direction.fmt, self.direction.packed, self.direction.block[1]
        read = make_read_sixteen(as_it_is(self.storage), self.whole, target)
        block_max, scale_block = make_block_max(16, columns), self.direction.scale_block(target)
        cast = make_cast_sixteen(fmt, packed, self.whole, target)

        @kernel
        def nvfp4_rows(source, out):
            row, column = place(16)
            left = select(row < out.outer, I32(out.inner - column), I32(0))
            v = read(source, row, column, left)
            multiplier = scale_block(block_max(v), out, row, column, left)
            cast(v, multiplier, out.data, (row, out.inner, column), left)

        return nvfp4_rows


# 4a. Both copies, or the columnwise one, from one read: 256 threads turn a tile of 128 x 128 round (see `tiles`). Along
#     the rows a thread reads eight neighbours, casts them and puts them into the tile; down the columns it takes eight
#     neighbours of a column out of it and casts them in the same way. B / 8 threads share a block.
#
#     The Hadamard transform replaces 16 neighbours of a column by 16 sums of them with random signs, which spread one
#     large value over all. Two threads hold the 16. TE's kernel rounds its results to the tensor's dtype.


def make_transform_first(put, sign_mask, storage, target):
    """Return `put` of the Hadamard transform of its values; `put` itself if `sign_mask` is None."""
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
        rowwise: whether the rowwise copy is made. whole_rows, whole_columns: as `whole`, of either copy.
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
            fill(tile, source, row_out, column_out.inner, column_out.outer)
            cuda.syncthreads()
            turn(tile, column_out, column_out.inner, column_out.outer)

        return both_nvfp4


# 4b. Stochastic rounding: a code is rounded up with the probability of the part that is cut off, so that sums of many
#     keep their mean. Each element needs eight random bits. Those of 16 neighbours are one Philox number, which follows
#     from the seed and the number of the 16, or the caller gives them. `BothNVFP4` does it if its direction says so.


@dataclass(frozen=True)
class StochasticRows(NVFP4Rows):
    """`NVFP4Rows` rounded stochastically: `direction.random` says where the bits come from.

    One more word, store(v, out, row, column, left): the codes, with the bits that `out` tells of.
    """

    title = "NVFP4 along rows, stochastic"

    def must_read(self, field):
        return super().must_read(field) and (field != "bits" or self.direction.random is Bits.GIVEN)

    def build(self, target):
        read = make_read_sixteen(as_it_is(self.storage), self.whole, target)
        block_max, scale_block = make_block_max(16, self.direction.block[1]), self.direction.scale_block(target)
        store = make_store_sixteen_at_random(self.direction.random, self.whole, target)

        @kernel
        def stochastic_rows(source, out):
            row, column = place(16)
            left = select(row < out.outer, I32(out.inner - column), I32(0))
            v = read(source, row, column, left)
            multiplier = scale_block(block_max(v), out, row, column, left)
            store(multiply_sixteen(v, multiplier), out, row, column, left)

        return stochastic_rows


# 4c. Largest magnitudes that the casts stand under, where the directions have different ones: of each row and of each
#     column, or of what the Hadamard transform makes of the columns. (The one of a tensor as it is serves both.)


@dataclass(frozen=True)
class RowAmaxes(Spec):
    """The largest magnitude of each row: a thread reads eight neighbours, four threads raise the row's together."""

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
            row, column = place(VECTOR)
            left = select(row < out.outer, I32(out.inner - column), I32(0))
            record(read(source, row, column, left), out, row, column, left)

        return row_amaxes


@dataclass(frozen=True)
class ColumnAmaxes(Spec):
    """The largest magnitude of each column, or of all of them, from a tile as in `BothNVFP4`.

    Attributes:
        storage, whole: as above; of rows.
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
        record = make_record_amax(4, by_outer=True) if self.by_column else make_record_amax(32, by_outer=False)
        record = make_transform_first(record, self.sign_mask, self.storage, target)
        fill = make_fill(make_read(as_it_is(self.storage), self.whole, target), put_nothing, self.storage)
        turn = make_turn(record, self.storage)

        @kernel
        def column_amaxes(source, out):
            tile = cuda.shared.array(TILE_WORDS, np.uint32)
            fill(tile, source, out, source.rows, source.width)
            cuda.syncthreads()
            turn(tile, out, source.rows, source.width)

        return column_amaxes


# --- 5. their launch --------------------------------------------------------------------------------


def quantize(gpu, job):
    """Fill the copies of a `copies.BlockJob`; its front is a tensor as it is, its amaxes are there."""
    front, rowwise, columnwise = job.front, job.rowwise, job.columnwise
    fits = job.direction.block[1] <= tile_columns(front.storage)  # a tile of float32 is 64 columns wide
    if rowwise is not None and not (columnwise is not None and fits):
        kind = NVFP4Rows if rowwise.random is None else StochasticRows
        spec = kind(front.storage, rowwise.direction, gpu.whole(front, 16, rowwise.data))
        gpu.launch(spec, front.matrix_shape, front.source(), rowwise.blocks())
        rowwise = None
    if columnwise is not None:
        whole = gpu.whole(front, VECTOR, None if rowwise is None else rowwise.data)
        whole_columns = columnwise.inner % VECTOR == 0 and columnwise.data.aligned
        direction, made = columnwise.direction.other, rowwise is not None
        spec = BothNVFP4(front.storage, direction, made, whole, whole_columns, job.hadamard)
        gpu.launch(spec, front.matrix_shape, front.source(), (rowwise or columnwise).blocks(), columnwise.blocks())


def amaxes(gpu, front, sign_mask, *, of_rows, of_columns, by_column):
    """Fill amaxes that the directions do not share, float32 arrays that are zero, or None for those that are not kept.

    Args:
        front: a tensor as it is, not empty. sign_mask: of the Hadamard transform of columns, or None.
        of_rows: (M,). of_columns: (K,) if `by_column`, else (1,), of all of them.
    """
    m, k = front.matrix_shape
    if of_rows is not None:
        spec = RowAmaxes(front.storage, gpu.whole(front, VECTOR))
        gpu.launch(spec, (m, k), front.source(), Maxima(of_rows, 1, m, k))
    if of_columns is not None:
        spec = ColumnAmaxes(front.storage, gpu.whole(front, VECTOR), by_column, sign_mask)
        gpu.launch(spec, (m, k), front.source(), Maxima(of_columns, 1, k, m))


# --- 6. their cost ----------------------------------------------------------------------------------


def costs():
    """The `operands.Cost` of each kernel: bytes are 16 values, 8 bytes of codes and a scale; of a tile 64 values."""
    plain = direction_of(NVFP4Scaling(), False)
    random = direction_of(NVFP4Scaling(stochastic_rounding=True), False)
    by_row = direction_of(NVFP4Scaling(row_scaled=True), False)
    yield Cost("bf16 -> NVFP4", NVFP4Rows("bfloat16", plain, True), 41, (5.2, 3.1), 2, 0)
    yield Cost("bf16 -> NVFP4, row-scaled", NVFP4Rows("bfloat16", by_row, True), 41, (5.35, 3.2), 2, 0)
    yield Cost("bf16 -> NVFP4, stochastic", StochasticRows("bfloat16", random, True), 41, (9, 8.8), 2, 0)
    yield Cost("float16 -> NVFP4", NVFP4Rows("float16", plain, True), 41, (5.2, 3.1), 2, 0)
    yield Cost("float32 -> NVFP4", NVFP4Rows("float32", plain, True), 73, (2.8, 1.65), 4, 0)
    tile = 128 * 128 / 256
    yield Cost("bf16 -> NVFP4 both", BothNVFP4("bfloat16", plain, True, True, True, None), tile * 3.125)
    yield Cost("bf16 -> NVFP4 + RHT both", BothNVFP4("bfloat16", plain, True, True, True, 0xD7E8), tile * 3.125)
    yield Cost("amaxes of rows of bf16", RowAmaxes("bfloat16", True), 16, None, 1, 0)
    yield Cost("amax of columns of bf16 + RHT", ColumnAmaxes("bfloat16", True, False, 0xD7E8), tile * 2)
