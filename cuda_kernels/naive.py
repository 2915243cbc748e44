"""Teaching kernels: each family first as simply as it can be written, then with its memory accesses in order.

    naive        a thread computes one element, or one block of a scale; no vectors, no shared memory
    coalesced    the threads of a warp touch neighbouring addresses (left out where the naive kernel's do)
    fused        the kernel that the package runs: 16-byte accesses, values in registers, several results from one read

`NAIVE` lists the first two with the fast kernel that follows. They read bfloat16, take any number of rows, and columns
that divide by 64 (MXFP8: by 128), so that stored scales need no padding along a row. Results have the bits of `refops`.
"""

import math
from collections import namedtuple

import numpy as np

from cuda_kernels.families.blocks import blocks_coalesced, blocks_naive
from cuda_kernels.families.dequantize import dequantize_naive
from cuda_kernels.families.elementwise import make_gated
from cuda_kernels.families.four_over_six import chosen_naive
from cuda_kernels.families.hadamard_transform import hadamard_naive
from cuda_kernels.families.mxfp8 import mxfp8_coalesced, mxfp8_naive
from cuda_kernels.families.nvfp4 import nvfp4_coalesced, nvfp4_naive
from cuda_kernels.families.per_tensor import transpose_coalesced, transpose_naive
from cuda_kernels.families.row_scaled import scaled_gradient_coalesced, scaled_gradient_naive
from cuda_kernels.families.squares import squares_coalesced, squares_naive
from cuda_kernels.families.sums import dbias_coalesced, dbias_naive
from cuda_kernels.operands import pointer, scalar
from cuda_kernels.simt import THREADS


def one_thread_for(elements):
    """Return `shape(rows, columns)`: (grid, block) with one thread for so many elements of a row."""
    return lambda rows, columns: ((math.ceil(rows * (columns // elements) / THREADS), 1, 1), (THREADS, 1, 1))


def one_thread_for_a_column(rows, columns):
    """(grid, block) with one thread for each column."""
    return (math.ceil(columns / THREADS), 1, 1), (THREADS, 1, 1)


def one_warp_for_a_row(rows, columns):
    """(grid, block) with 32 threads for each row."""
    return (1, math.ceil(rows / 8), 1), (32, 8, 1)


def one_thread_for_a_row(rows, columns):
    """(grid, block) with one thread for each row."""
    return (math.ceil(rows / THREADS), 1, 1), (THREADS, 1, 1)


def tiles_of_32(threads_down, along_rows):
    """Return `shape(rows, columns)`: blocks of 32 x `threads_down` threads for 32 columns (and, or not, 32 rows)."""

    def shape(rows, columns):
        return (math.ceil(columns / 32), math.ceil(rows / 32) if along_rows else 1, 1), (32, threads_down, 1)

    return shape


def squares_of_128(threads):
    """Return `shape(rows, columns)`: one thread, or a block of 32 x 32, for each square of 128 x 128."""

    def shape(rows, columns):
        down, across = math.ceil(rows / 128), columns // 128
        of_one = (math.ceil(down * across / THREADS), 1, 1), (THREADS, 1, 1)
        return of_one if threads == 1 else ((across, down, 1), (32, 32, 1))

    return shape


#: kernel; shape(rows, columns) -> (grid, block); arguments: name -> description for `launch`; a sentence.
Naive = namedtuple("Naive", "kernel shape arguments description")

_SIZES = {"rows": scalar(np.int32), "columns": scalar(np.int32)}
_X, _BYTES, _FLOAT = pointer(np.uint16), pointer(np.uint8), pointer(np.float32)
_VALUES = {"x": _X, "y": _X, **_SIZES}
_MXFP8 = {"x": _X, "codes": _BYTES, "scales": _BYTES, **_SIZES}
_BLOCKS = {"x": _X, "codes": _BYTES, "scales": _FLOAT, **_SIZES}
_TRANSPOSE = {"x": _X, "scale": _FLOAT, "rowwise": _BYTES, "columnwise": _BYTES, **_SIZES}
_SQUARES = {"x": _X, "rowwise": _BYTES, "columnwise": _BYTES, "scales": _FLOAT, **_SIZES}
_NVFP4 = {"x": _X, "tensor_scales": _FLOAT, "codes": _BYTES, "scales": _BYTES, **_SIZES}
_SUMS = {"x": _X, "sums": _X, **_SIZES}
_SCALED = {"dy": _X, "x": _X, "row_scales": _FLOAT, "dx": _X, "drow_scales": _FLOAT, **_SIZES}
_DEQUANTIZE = {"codes": _BYTES, "scales": _BYTES, "y": _X, **_SIZES}

#: In reading order; the fused kernel of a family is named in its last row.
NAIVE = {
    "swiglu naive": Naive(
        make_gated("swiglu"),
        one_thread_for(1),
        _VALUES,
        "one element a thread, coalesced as it is; fused: Elementwise and ElementwiseGradient",
    ),
    "mxfp8 naive": Naive(mxfp8_naive, one_thread_for(32), _MXFP8, "one block of 32 a thread"),
    "mxfp8 coalesced": Naive(
        mxfp8_coalesced,
        one_thread_for(1),
        _MXFP8,
        "one element a thread, one block a warp; fused: MXFP8Rows, MXFP8GradientRows and MXFP8Columns",
    ),
    "blocks naive": Naive(blocks_naive, one_thread_for(128), _BLOCKS, "one block of 128 a thread"),
    "blocks coalesced": Naive(
        blocks_coalesced,
        one_thread_for(4),
        _BLOCKS,
        "four elements a thread, one block a warp; fused: BlockRows and BothBlocks",
    ),
    "squares naive": Naive(squares_naive, squares_of_128(1), _SQUARES, "one square of 128 x 128 a thread"),
    "squares coalesced": Naive(
        squares_coalesced,
        squares_of_128(1024),
        _SQUARES,
        "1024 threads a square; fused: Squares, of larger ones of float32 SquareMaxima, GivenRows and GivenSquares",
    ),
    "fp8 transpose naive": Naive(transpose_naive, one_thread_for(1), _TRANSPOSE, "one element a thread"),
    "fp8 transpose coalesced": Naive(
        transpose_coalesced,
        tiles_of_32(8, True),
        _TRANSPOSE,
        "a tile of 32 x 32 turned in shared memory; fused: BothPerTensor",
    ),
    "nvfp4 naive": Naive(nvfp4_naive, one_thread_for(16), _NVFP4, "one block of 16 a thread"),
    "nvfp4 coalesced": Naive(
        nvfp4_coalesced,
        one_thread_for(2),
        _NVFP4,
        "two elements a thread, eight threads a block; fused: NVFP4Rows and BothNVFP4",
    ),
    "hadamard naive": Naive(
        hadamard_naive,
        one_thread_for(1),
        _VALUES,
        "one output of 16 a thread, by the formula; fused: HadamardRows",
    ),
    "nvfp4 4over6 naive": Naive(
        chosen_naive,
        one_thread_for(16),
        {"x": _X, "amax": _FLOAT, "codes": _BYTES, "scales": _BYTES, **_SIZES},
        "one block of 16 a thread; fused: ChosenRows, ChosenBoth and ChosenSquares",
    ),
    "dbias naive": Naive(dbias_naive, one_thread_for_a_column, _SUMS, "one column a thread"),
    "dbias coalesced": Naive(
        dbias_coalesced,
        tiles_of_32(32, False),
        _SUMS,
        "32 threads a column; fused: Band, with the gradient and its cast, and FinishSums",
    ),
    "scaled gradient naive": Naive(scaled_gradient_naive, one_thread_for_a_row, _SCALED, "one row a thread"),
    "scaled gradient coalesced": Naive(
        scaled_gradient_coalesced,
        one_warp_for_a_row,
        _SCALED,
        "one row a warp, 32 neighbouring elements at once; fused: ScaledGradient",
    ),
    "dequantize naive": Naive(
        dequantize_naive,
        one_thread_for(1),
        _DEQUANTIZE,
        "one element a thread, coalesced as it is; fused: DequantizeRows, DequantizeColumns and DequantizeTurned",
    ),
}
