"""Casts by blocks of B neighbours of a row, or of a column for a transposed copy, one code in a byte: 1x128, 1x64.

    block      B neighbours of a row in the rowwise copy, of a column in the columnwise one
    scale      (stored, multiplier) of the block's largest magnitude, amax, NaN ignored, by the rule that the scaling
               declares (`refops.scalings`): what is stored, and what elements are multiplied by. 1x128: multiplier =
               fmt.max / amax (1 where amax is 0 or infinite), rounded down to a power of two if the scaling says so;
               stored is the decode scale, 1 / multiplier, a float32
    code       the element format's code of value * multiplier, to nearest, ties to even, saturated
    place      rowwise codes lie as the values do, (M, K), columnwise ones transposed, (K, M); the scaling says where
               scales lie: those of 1x128 are [block, row] and [block, column]

No activation is computed here: for these scalings another kernel stores its result first. Arguments, results and errors
are those of `refops.quantize`.
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
from cuda_kernels.vectors import VECTOR, make_block_max, make_cast_sixteen, make_group_max, place
from refops.formats import E4M3
from refops.scalings import BlockScaling

ZERO, E4M3_MAX = F(0), F(448)
widen, max_of_32 = casts.widen_bf16, make_group_max(32)

# --- 2. naive ---------------------------------------------------------------------------------------


@kernel
def blocks_naive(x, codes, scales, rows, columns):
    """x (rows, columns), bfloat16 -> codes (rows, columns), scales (columns / 128, rows): one thread one block.

    A thread reads its block twice. Neighbouring threads read 256 bytes apart: a warp's load spans 8 KiB, touches 32
    sectors of 32 bytes, and uses 2 bytes of each at once.
    """
    i = thread_number()
    row, block = i // (columns // 128), i % (columns // 128)
    if row < rows:
        first, amax = offset(row, columns, block * 128), ZERO
        for k in range(128):
            amax = larger_magnitude(amax, widen(x[first + k]))
        multiplier = E4M3_MAX / amax if amax > ZERO else F(1)
        scales[offset(block, rows, row)] = F(1) / multiplier
        for k in range(128):
            codes[first + k] = np.uint8(casts.e4m3(widen(x[first + k]) * multiplier))


# --- 3. coalesced -----------------------------------------------------------------------------------


@kernel
def blocks_coalesced(x, codes, scales, rows, columns):
    """As `blocks_naive`: one warp one block, one thread four elements of it, 32 apart.

    A warp reads 64 neighbouring bytes at once. Every lane gets the amax by shuffles, which all lanes must reach:
    threads past the last row read row 0 and store nothing.
    """
    i = thread_number()
    row, column = i // (columns // 4), i % (columns // 4) // 32 * 128 + (i & 31)
    inside = row < rows
    first = offset(select(inside, row, I32(0)), columns, column)
    a, b, c, d = widen(x[first]), widen(x[first + 32]), widen(x[first + 64]), widen(x[first + 96])
    amax = larger_magnitude(larger_magnitude(larger_magnitude(larger_magnitude(ZERO, a), b), c), d)
    amax = max_of_32(amax)
    multiplier = E4M3_MAX / amax if amax > ZERO else F(1)
    if inside:
        if column % 128 == 0:
            scales[offset(column // 128, rows, row)] = F(1) / multiplier
        codes[first], codes[first + 32] = np.uint8(casts.e4m3(a * multiplier)), np.uint8(casts.e4m3(b * multiplier))
        codes[first + 64], codes[first + 96] = (
            np.uint8(casts.e4m3(c * multiplier)),
            np.uint8(casts.e4m3(d * multiplier)),
        )


# --- 4. fused ---------------------------------------------------------------------------------------

# A thread owns 16 neighbours of a row, in registers as two vectors of eight float32. B / 16 neighbouring threads share
# a block of B elements. Five functions:
#
#   place(16, rows, columns)                            (row, column, left) of the first
#   read(source, row, column, left)                     their values
#   block_max(v)                                        the block's largest magnitude, found by shuffles
#   scale_block(block_amax, out, row, column, left)     what elements are multiplied by, by the declared rule; the
#                                                       first of the threads that share the block stores its scale
#   cast(v, multiplier, data, (row, stride, column), left)    stores the codes; a row of `data` is `stride` long
#
# left: the number of elements from here to the end of the row. It may exceed the elements of the thread; outside the
# matrix it is 0 or negative: a read gives zeros there and nothing is stored, but the thread goes on, for the warp
# shuffles in `block_max`.


@dataclass(frozen=True)
class ByBlocks(Spec):
    """What the kernels below have in common.

    Attributes:
        storage: dtype of the values.
        direction: the scaling's rowwise direction; the columnwise one is `direction.other`.
    """

    storage: str
    direction: Direction

    def __str__(self):
        return f"{self.title}: {self.storage} -> {self.direction.name}"


@dataclass(frozen=True)
class BlockRows(ByBlocks):
    """One copy along the rows.

    Attributes:
        whole: rows are a multiple of 16 elements (what a thread owns) and every array is aligned to 16 bytes: a thread
            has all of its elements or none, in wide accesses. Else each element is an access of its own.
    """

    whole: bool

    title = "blocks along rows"

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
            row, column, left = place(16, out.outer, out.inner)
            v = read(source, row, column, left)
            multiplier = scale_block(block_max(v), out, row, column, left)
            cast(v, multiplier, out.data, (row, out.inner, column), left)

        return block_rows


@dataclass(frozen=True)
class BothBlocks(ByBlocks):
    """Both copies, or the columnwise one, from one read, through a tile in shared memory (see `tiles`).

    256 threads own 128 rows x 128 columns (float32: 64). Eight neighbours of a row in each step of `fill`, which also
    casts them into the rowwise copy; eight of a column in each step of `turn`, which casts them into the columnwise
    one. B / 8 threads share a block.

    Attributes:
        rowwise: whether the rowwise copy is made. Else `row_out` is ignored.
        whole_rows: as `whole` of `BlockRows`, of eight elements, of the values and the rowwise codes.
        whole_columns: the same of the columnwise codes.
    """

    rowwise: bool
    whole_rows: bool
    whole_columns: bool

    title = "blocks in both directions"

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
            fill(tile, source, row_out, source.rows, source.width)
            cuda.syncthreads()  # all threads' values are in the tile; it is filled once, so one barrier is enough
            turn(tile, column_out, source.rows, source.width)

        return both_blocks


# --- 5. their launch --------------------------------------------------------------------------------


def quantize(gpu, job):
    """Fill the copies of a `copies.BlockJob`: both by one kernel if a block of a row fits a tile, else each by its own.

    Its front is a tensor as it is. `gpu` is the backend (`gpu.GPU`): `gpu.launch(spec, (rows, columns), *operands)`
    starts a kernel, `gpu.whole(front, n, *stored)` says whether rows are whole accesses of n elements in what is read
    and stored.
    """
    front, rowwise, columnwise = job.front, job.rowwise, job.columnwise
    fits = job.direction.block[1] <= tile_columns(front.storage)  # a tile of float32 is 64 columns wide
    together = rowwise is not None and columnwise is not None and fits
    if rowwise is not None and not together:
        spec = BlockRows(front.storage, rowwise.direction, gpu.whole(front, 16, rowwise.data))
        gpu.launch(spec, front.matrix_shape, front.source(), rowwise.blocks())
    if columnwise is not None:
        whole_rows = gpu.whole(front, VECTOR, rowwise.data if together else None)
        # Not `gpu.whole`, which asks about rows of what is read: columns come out of the tile.
        whole_columns = columnwise.inner % VECTOR == 0 and columnwise.data.aligned
        spec = BothBlocks(front.storage, columnwise.direction.other, together, whole_rows, whole_columns)
        row_out = rowwise if together else columnwise  # `put_nothing` ignores the one that stands in
        gpu.launch(spec, front.matrix_shape, front.source(), row_out.blocks(), columnwise.blocks())


# --- 6. their cost ----------------------------------------------------------------------------------


def costs():
    """The `operands.Cost` of each kernel, from bfloat16.

    Bytes are those that a thread with all of its elements reads and writes; budgets are instructions for each of
    them, compiled for (H100, B200); then 16-byte loads and stores.
    """
    direction, stored = direction_of(BlockScaling(E4M3, 1), False), 1 + 4 / 128  # a code, and its part of a scale
    spec = BlockRows("bfloat16", direction, True)
    yield Cost("bf16 -> 1x128 blocks", spec, 16 * (2 + stored), budget=(2.75, 2.4), wide_loads=2, wide_stores=1)
    spec = BothBlocks("bfloat16", direction, rowwise=True, whole_rows=True, whole_columns=True)
    yield Cost("bf16 -> 1x128 blocks both", spec, 128 * 128 / 256 * (2 + 2 * stored))
