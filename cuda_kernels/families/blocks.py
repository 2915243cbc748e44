"""Casts by blocks of a row, one code in a byte, whose columnwise copy is stored transposed: 1x128, 1x64, UE5M3.

    scale      the declared rule of the block's largest magnitude: (what is stored, what elements are multiplied with)
    code       the element format's code of value * multiplier, to nearest, ties to even, saturated
    place      rowwise codes lie as the values do, columnwise ones transposed; the scaling says where scales lie

Activations come without: the paths of these scalings store their values first. Arguments, results and errors are those
of `refops.quantize`.
"""

# --- 1. what it computes: above ---------------------------------------------------------------------

from dataclasses import dataclass

import numpy as np

from cuda_kernels import casts
from cuda_kernels.directions import Direction, direction_of
from cuda_kernels.launch import row_shape, tile_grid
from cuda_kernels.operands import Cost, Spec, as_it_is
from cuda_kernels.reads import described_source, make_read, make_read_sixteen
from cuda_kernels.simt import I32, F, cuda, kernel, larger_magnitude, offset, select, thread_number
from cuda_kernels.stores import described_blocks, make_cast_blocks, put_nothing
from cuda_kernels.tiles import TILE_WORDS, make_fill, make_turn, tile_columns
from cuda_kernels.vectors import (
    VECTOR,
    make_block_max,
    make_cast_sixteen,
    make_group_max,
    place,
)
from refops.formats import E4M3
from refops.scalings import BlockScaling

ZERO, LIMIT = F(0), F(448)
widen, max_of_32 = casts.widen_bf16, make_group_max(32)

# --- 2. naive ---------------------------------------------------------------------------------------


@kernel
def blocks_naive(x, codes, scales, rows, columns):
    """x (M, columns) -> codes (M, columns), decode scales (columns / 128, M): one thread one block, read twice.

    Neighbouring threads read 256 bytes apart: a warp's load touches 32 different lines of memory.
    """
    i = thread_number()
    row, block = i // (columns // 128), i % (columns // 128)
    if row < rows:
        first, amax = offset(row, columns, block * 128), ZERO
        for k in range(128):
            amax = larger_magnitude(amax, widen(x[first + k]))
        factor = LIMIT / amax if amax > ZERO else F(1)
        scales[offset(block, rows, row)] = F(1) / factor
        for k in range(128):
            codes[first + k] = np.uint8(casts.e4m3(widen(x[first + k]) * factor))


# --- 3. coalesced -----------------------------------------------------------------------------------


@kernel
def blocks_coalesced(x, codes, scales, rows, columns):
    """As `blocks_naive`: a warp one block, four elements a thread, 32 apart.

    A warp reads 64 neighbouring bytes at once. The amax goes round by shuffles, in which every thread takes part.
    """
    i = thread_number()
    row, column = i // (columns // 4), i % (columns // 4) // 32 * 128 + (i & 31)
    inside = row < rows
    first = offset(select(inside, row, I32(0)), columns, column)
    a, b, c, d = widen(x[first]), widen(x[first + 32]), widen(x[first + 64]), widen(x[first + 96])
    amax = larger_magnitude(larger_magnitude(larger_magnitude(larger_magnitude(ZERO, a), b), c), d)
    amax = max_of_32(amax)
    factor = LIMIT / amax if amax > ZERO else F(1)
    if inside:
        if column % 128 == 0:
            scales[offset(column // 128, rows, row)] = F(1) / factor
        codes[first], codes[first + 32] = np.uint8(casts.e4m3(a * factor)), np.uint8(casts.e4m3(b * factor))
        codes[first + 64], codes[first + 96] = np.uint8(casts.e4m3(c * factor)), np.uint8(casts.e4m3(d * factor))


# --- 4. fused ---------------------------------------------------------------------------------------

# A thread owns 16 neighbours of a row, in registers as two vectors of eight float32. Five words:
#
#   place(16)                                           their (row, column)
#   read(source, row, column, left)                     their values; `left` elements to the end of the row
#   block_max(v)                                        largest magnitude of the block, which B / 16 threads share
#   scale_block(block_amax, out, row, column, left)     what elements are multiplied with, by the declared rule; the
#                                                       scale is stored by the first of the block's threads
#   cast(v, multiplier, data, place, left)              the codes


@dataclass(frozen=True)
class BlockRows(Spec):
    """One copy along the rows.

    Attributes:
        storage: dtype of the values.
        direction: how they are cast.
        whole: rows consist of whole 16-byte accesses at aligned addresses. Else every element is an access of its own.
    """

    storage: str
    direction: Direction
    whole: bool

    title = "blocks along rows"

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
        def block_rows(source, out):
            row, column = place(16)
            left = select(row < out.outer, I32(out.inner - column), I32(0))
            v = read(source, row, column, left)
            multiplier = scale_block(block_max(v), out, row, column, left)
            cast(v, multiplier, out.data, (row, out.inner, column), left)

        return block_rows


@dataclass(frozen=True)
class BothBlocks(Spec):
    """Both copies, or the columnwise one, from one read: 256 threads turn a tile of 128 x 128 round (see `tiles`).

    Along the rows a thread reads eight neighbours, casts them and puts them into the tile; down the columns it takes
    eight neighbours of a column out of it and casts them in the same way. B / 8 threads share a block.

    Attributes:
        storage, direction: as above; `direction` is the rowwise one.
        rowwise: whether the rowwise copy is made. whole_rows, whole_columns: as `whole`, of either copy.
    """

    storage: str
    direction: Direction
    rowwise: bool
    whole_rows: bool
    whole_columns: bool

    title = "blocks in both directions"

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
        fill, turn = make_fill(read, along, self.storage), make_turn(down, self.storage)

        @kernel
        def both_blocks(source, row_out, column_out):
            tile = cuda.shared.array(TILE_WORDS, np.uint32)
            fill(tile, source, row_out, column_out.inner, column_out.outer)
            cuda.syncthreads()
            turn(tile, column_out, column_out.inner, column_out.outer)

        return both_blocks


# --- 5. their launch --------------------------------------------------------------------------------


def quantize(gpu, job):
    """Fill the copies of a `copies.BlockJob`; its front is a tensor as it is."""
    front, rowwise, columnwise = job.front, job.rowwise, job.columnwise
    fits = job.direction.block[1] <= tile_columns(front.storage)  # a tile of float32 is 64 columns wide
    if rowwise is not None and not (columnwise is not None and fits):
        spec = BlockRows(front.storage, rowwise.direction, gpu.whole(front, 16, rowwise.data))
        gpu.launch(spec, front.matrix_shape, front.source(), rowwise.blocks())
        rowwise = None
    if columnwise is not None:
        whole = gpu.whole(front, VECTOR, None if rowwise is None else rowwise.data)
        whole_columns = columnwise.inner % VECTOR == 0 and columnwise.data.aligned
        spec = BothBlocks(front.storage, columnwise.direction.other, rowwise is not None, whole, whole_columns)
        gpu.launch(spec, front.matrix_shape, front.source(), (rowwise or columnwise).blocks(), columnwise.blocks())


# --- 6. their cost ----------------------------------------------------------------------------------


def costs():
    """The `operands.Cost` of each kernel, from bfloat16: bytes are values of two bytes, codes and scales."""
    direction = direction_of(BlockScaling(E4M3, 1), False)
    yield Cost("bf16 -> 1x128 blocks", BlockRows("bfloat16", direction, True), 48.5, (2.75, 2.55), 2, 1)
    yield Cost(
        "bf16 -> 1x128 blocks both", BothBlocks("bfloat16", direction, True, True, True), 128 * 64 / 128 * 4.0625
    )
