"""Teaching kernels: each family once as simply as it can be written, then with its memory accesses in order.

    naive        a thread computes one element, or one block of a scale; no vectors, no shared memory
    coalesced    the threads of a warp touch neighbouring addresses (left out where the naive kernel's do)
    fused        the kernel that the package runs: 16-byte accesses, values in registers, several results from one read

`NAIVE` lists the first two with the fast kernel that follows. They read bfloat16, take any number of rows, and columns
that divide by 64 (MXFP8: by 128), so that stored scales need no padding along a row. Results have the bits of `refops`.
"""

import math
from collections import namedtuple

import numpy as np

from cuda_kernels import casts
from cuda_kernels.families.blocks import blocks_coalesced, blocks_naive
from cuda_kernels.families.dequantize import dequantize_naive
from cuda_kernels.formulas import functions_of
from cuda_kernels.operands import pointer, scalar
from cuda_kernels.scale_rules import RuleWords
from cuda_kernels.simt import I32, THREADS, F, cuda, kernel, larger_magnitude, offset, select, thread_number
from cuda_kernels.vectors import make_group_max
from refops.scalings import NVFP4Scaling

ZERO = F(0)
INVERSE_LIMIT = F(1) / F(448)
widen = casts.widen_bf16
max_of_32, max_of_8 = make_group_max(32), make_group_max(8)


# --- gated activations ------------------------------------------------------------------------------


def make_gated(name):
    """Return the kernel x (M, 2 columns) = [act | gate] -> y (M, columns): one thread one element of y."""
    functions = functions_of(name)
    value = functions.value

    @kernel
    def gated(x, y, rows, columns):
        i = thread_number()
        row, column = i // columns, i % columns
        if row < rows:
            act = widen(x[offset(row, 2 * columns, column)])
            gate = widen(x[offset(row, 2 * columns, column + columns)])
            y[offset(row, columns, column)] = casts.narrow_bf16(value(act, ZERO) * gate)

    return gated


# --- MXFP8 rowwise ----------------------------------------------------------------------------------


@kernel
def mxfp8_naive(x, codes, scales, rows, columns):
    """x (M, columns) -> codes, scales (M, columns / 32): one thread one block, read twice.

    Neighbouring threads read 64 bytes apart: a warp's load touches 32 different lines of memory.
    """
    i = thread_number()
    row, block = i // (columns // 32), i % (columns // 32)
    if row < rows:
        first, amax = offset(row, columns, block * 32), ZERO
        for k in range(32):
            amax = larger_magnitude(amax, widen(x[first + k]))
        byte = casts.e8m0_up(amax * INVERSE_LIMIT)
        scales[offset(row, columns // 32, block)] = np.uint8(byte)
        for k in range(32):
            codes[first + k] = np.uint8(casts.e4m3(widen(x[first + k]) * casts.e8m0_multiplier(byte)))


@kernel
def mxfp8_coalesced(x, codes, scales, rows, columns):
    """As `mxfp8_naive`: one thread one element, a warp one block, whose amax goes round by shuffles.

    A warp reads 64 neighbouring bytes at once, and each element once. Every thread takes part in the shuffles.
    """
    i = thread_number()
    row, column = i // columns, i % columns
    inside = row < rows
    value = widen(x[offset(row, columns, column)]) if inside else ZERO
    byte = casts.e8m0_up(max_of_32(larger_magnitude(ZERO, value)) * INVERSE_LIMIT)
    if inside:
        codes[offset(row, columns, column)] = np.uint8(casts.e4m3(value * casts.e8m0_multiplier(byte)))
        if column % 32 == 0:
            scales[offset(row, columns // 32, column // 32)] = np.uint8(byte)


# --- FP8 and its transpose --------------------------------------------------------------------------


@kernel
def transpose_naive(x, scale, rowwise, columnwise, rows, columns):
    """x (M, columns), scale (1,) -> rowwise (M, columns), columnwise (columns, M): one thread one element.

    Reads and rowwise stores are coalesced; a warp's columnwise store writes 32 bytes to 32 different lines.
    """
    i = thread_number()
    row, column = i // columns, i % columns
    if row < rows:
        code = np.uint8(casts.e4m3(widen(x[offset(row, columns, column)]) * scale[0]))
        rowwise[offset(row, columns, column)] = code
        columnwise[offset(column, rows, row)] = code


@kernel
def transpose_coalesced(x, scale, rowwise, columnwise, rows, columns):
    """As `transpose_naive`: 32 x 8 threads own a tile of 32 x 32, which turns round in shared memory.

    The tile's rows are 33 long: the 32 elements of a column lie in different banks.
    """
    tile = cuda.shared.array((32, 33), np.uint32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    row0, column0 = I32(cuda.blockIdx.y * 32), I32(cuda.blockIdx.x * 32)
    for k in range(0, 32, 8):
        row, column = I32(row0 + ty + k), I32(column0 + tx)
        if row < rows and column < columns:
            tile[ty + k, tx] = casts.e4m3(widen(x[offset(row, columns, column)]) * scale[0])
            rowwise[offset(row, columns, column)] = np.uint8(tile[ty + k, tx])
    cuda.syncthreads()
    for k in range(0, 32, 8):
        row, column = I32(row0 + tx), I32(column0 + ty + k)
        if row < rows and column < columns:
            columnwise[offset(column, rows, row)] = np.uint8(tile[tx, ty + k])


# --- NVFP4 in blocks of 16 --------------------------------------------------------------------------


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


# --- the gradient of a bias -------------------------------------------------------------------------


@kernel
def dbias_naive(x, sums, rows, columns):
    """x (M, columns) -> sums (columns,): one thread one column, from the first row to the last.

    Coalesced, but there are only as many threads as columns: far too few to keep a GPU's memory busy.
    """
    column = thread_number()
    if column < columns:
        total = ZERO
        for row in range(rows):
            total = total + widen(x[offset(row, columns, column)])
        sums[column] = casts.narrow_bf16(total)


@kernel
def dbias_coalesced(x, sums, rows, columns):
    """As `dbias_naive`: 32 x 32 threads share 32 columns; each adds every 32nd row, one warp adds the 32 sums."""
    partial = cuda.shared.array((32, 32), np.float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    column, total = I32(cuda.blockIdx.x * 32 + tx), ZERO
    if column < columns:
        for row in range(ty, rows, 32):
            total = total + widen(x[offset(row, columns, column)])
    partial[ty, tx] = total
    cuda.syncthreads()
    if ty == 0 and column < columns:
        for k in range(1, 32):
            total = total + partial[k, tx]
        sums[column] = casts.narrow_bf16(total)


# --- the table --------------------------------------------------------------------------------------


def one_thread_for(elements):
    """Return `shape(rows, columns)`: (grid, block) with one thread for so many elements of a row."""
    return lambda rows, columns: ((math.ceil(rows * (columns // elements) / THREADS), 1, 1), (THREADS, 1, 1))


def one_thread_for_a_column(rows, columns):
    """(grid, block) with one thread for each column."""
    return (math.ceil(columns / THREADS), 1, 1), (THREADS, 1, 1)


def tiles_of_32(threads_down, along_rows):
    """Return `shape(rows, columns)`: blocks of 32 x `threads_down` threads for 32 columns (and, or not, 32 rows)."""

    def shape(rows, columns):
        return (math.ceil(columns / 32), math.ceil(rows / 32) if along_rows else 1, 1), (32, threads_down, 1)

    return shape


#: kernel; shape(rows, columns) -> (grid, block); arguments: name -> description for `launch`; a sentence.
Naive = namedtuple("Naive", "kernel shape arguments description")

_SIZES = {"rows": scalar(np.int32), "columns": scalar(np.int32)}
_X, _BYTES, _FLOAT = pointer(np.uint16), pointer(np.uint8), pointer(np.float32)
_GATED = {"x": _X, "y": _X, **_SIZES}
_MXFP8 = {"x": _X, "codes": _BYTES, "scales": _BYTES, **_SIZES}
_BLOCKS = {"x": _X, "codes": _BYTES, "scales": _FLOAT, **_SIZES}
_TRANSPOSE = {"x": _X, "scale": _FLOAT, "rowwise": _BYTES, "columnwise": _BYTES, **_SIZES}
_NVFP4 = {"x": _X, "tensor_scales": _FLOAT, "codes": _BYTES, "scales": _BYTES, **_SIZES}
_SUMS = {"x": _X, "sums": _X, **_SIZES}
_DEQUANTIZE = {"codes": _BYTES, "scales": _BYTES, "y": _X, **_SIZES}

#: In reading order; the fused kernel of a family is named in its last row.
NAIVE = {
    "swiglu naive": Naive(
        make_gated("swiglu"),
        one_thread_for(1),
        _GATED,
        "one element a thread, coalesced as it is; fused: prologues.gated with any epilogue, make_row_kernel",
    ),
    "mxfp8 naive": Naive(mxfp8_naive, one_thread_for(32), _MXFP8, "one block of 32 a thread"),
    "mxfp8 coalesced": Naive(
        mxfp8_coalesced,
        one_thread_for(1),
        _MXFP8,
        "one element a thread, one block a warp; fused: epilogues.blocks, make_row_kernel and make_column_kernel",
    ),
    "blocks naive": Naive(blocks_naive, one_thread_for(128), _BLOCKS, "one block of 128 a thread"),
    "blocks coalesced": Naive(
        blocks_coalesced,
        one_thread_for(4),
        _BLOCKS,
        "four elements a thread, one block a warp; fused: BlockRows and BothBlocks",
    ),
    "fp8 transpose naive": Naive(transpose_naive, one_thread_for(1), _TRANSPOSE, "one element a thread"),
    "fp8 transpose coalesced": Naive(
        transpose_coalesced,
        tiles_of_32(8, True),
        _TRANSPOSE,
        "a tile of 32 x 32 turned in shared memory; fused: epilogues.per_tensor, make_tile_kernel",
    ),
    "nvfp4 naive": Naive(nvfp4_naive, one_thread_for(16), _NVFP4, "one block of 16 a thread"),
    "nvfp4 coalesced": Naive(
        nvfp4_coalesced,
        one_thread_for(2),
        _NVFP4,
        "two elements a thread, eight threads a block; fused: epilogues.blocks, make_row_kernel and make_tile_kernel",
    ),
    "dbias naive": Naive(dbias_naive, one_thread_for_a_column, _SUMS, "one column a thread"),
    "dbias coalesced": Naive(
        dbias_coalesced,
        tiles_of_32(32, False),
        _SUMS,
        "32 threads a column; fused: make_band_kernel and make_finish_sums, with the gradient and its cast",
    ),
    "dequantize naive": Naive(
        dequantize_naive,
        one_thread_for(1),
        _DEQUANTIZE,
        "one element a thread, coalesced as it is; fused: DequantizeRows, DequantizeColumns and DequantizeTurned",
    ),
}
