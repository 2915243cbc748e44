"""FP8 with one float32 scale for 1x128 elements or a 128x128 tile.

Sources: TE `common/transpose/quantize_transpose_vector_blockwise.cu` (1x128), `..._square_blockwise.cu` (128x128),
`common/recipe/recipe_common.cuh` (scale), `common/swizzle/swizzle_block_scaling.cu` (Blackwell's view of the scales).
"""

import numpy as np

from refops.arguments import BFLOAT16, shown
from refops.hints import Array
from refops.quantization.blocks import blocks_of, quantize_blocks
from refops.quantization.layout import ceil_div, pad_to_blocks, swizzle
from refops.quantization.per_tensor import scale_from_amax
from refops.quantization.result import Quantized
from refops.scaling import BlockScaling
from refops.tiles import for_each, tile_slices

BLOCK = BlockScaling.block_size
#: What an overflowing scale becomes: the largest finite value of the *input* dtype.
LARGEST_SCALE = {
    np.dtype(np.float32): np.finfo(np.float32).max,
    np.dtype(np.float16): np.float32(65504),
    BFLOAT16: np.uint32(0x7F7F0000).view(np.float32),
}


def quantize_block(values, scaling, rowwise, columnwise):
    """Quantize the source `values` under `BlockScaling`; blocks at the edge are partial."""
    q = Quantized.allocate(values, scaling, rowwise, columnwise)
    row_data, column_data = q.row_matrix, q.column_matrix
    row_scales, column_scales = q.rowwise_scale_inv, q.columnwise_scale_inv

    def scale_of(amax):
        scale = scale_from_amax(
            amax,
            scaling.fmt,
            epsilon=scaling.amax_epsilon,
            power_2=scaling.power_2_scale,
            value_for_inf=LARGEST_SCALE[values.dtype],
        )
        return np.float32(1) / scale, scale

    def work(rows, columns):
        tile = values.read(rows, columns)
        row_blocks, column_blocks = blocks_of(rows, BLOCK), blocks_of(columns, BLOCK)
        if scaling.block_dim == 2:
            codes, scale_inv = quantize_blocks(tile, BLOCK, BLOCK, scaling.fmt, scale_of)
            if rowwise:
                row_data[rows, columns] = codes
                row_scales[row_blocks, column_blocks] = scale_inv
            if columnwise:
                column_data[columns, rows] = codes.T
                column_scales[column_blocks, row_blocks] = scale_inv.T
            return
        if rowwise:
            codes, scale_inv = quantize_blocks(tile, 1, BLOCK, scaling.fmt, scale_of)
            row_data[rows, columns] = codes
            row_scales[column_blocks, rows] = scale_inv.T
        if columnwise:
            codes, scale_inv = quantize_blocks(tile, BLOCK, 1, scaling.fmt, scale_of)
            column_data[columns, rows] = codes.T
            column_scales[row_blocks, columns] = scale_inv

    for_each(tile_slices(values.shape), work)
    return q


def valid_scales(q, columnwise=False):
    """The decode scales of one direction without padding, [outer, block]; outer counts rows or, 128x128, row blocks."""
    m, k = q.matrix_shape
    scales = q.columnwise_scale_inv if columnwise else q.rowwise_scale_inv
    outer, inner = (k, m) if columnwise else (m, k)
    if q.scaling.block_dim == 2:
        return scales[: ceil_div(outer, BLOCK), : ceil_div(inner, BLOCK)]
    return scales[:, :outer].T


def dequantize_tile(q, rows, columns, columnwise):
    """float32 values of a rectangle of the (M, K) matrix."""
    codes = q.column_matrix[columns, rows] if columnwise else q.row_matrix[rows, columns]
    outer, inner = (columns, rows) if columnwise else (rows, columns)
    scales = valid_scales(q, columnwise)
    row_index = np.arange(outer.start, outer.stop) // (BLOCK if q.scaling.block_dim == 2 else 1)
    column_index = np.arange(inner.start, inner.stop) // BLOCK
    values = q.scaling.fmt.values[codes] * scales[row_index[:, None], column_index]
    return values.T if columnwise else values


def block_scales_as_mxfp8(q: Quantized) -> tuple[Array | None, Array | None]:
    """Return a block-scaled tensor's scales as the swizzled E8M0 scales that Blackwell's GEMM emulation reads.

    Each float32 power of two becomes its exponent byte, repeated for the four 32-element blocks (and, for 128x128, the
    128 rows) that it covers, padded and swizzled as MXFP8 scales are.

    Returns:
        (rowwise, columnwise): uint8 (up128(M), 4 ceil(K/128)) and uint8 (up128(K), 4 ceil(M/128)), or None for a
        direction that `q` lacks.

    Raises:
        TypeError: `q` is not block-scaled. ValueError: its scales are not powers of two.
    """
    if not isinstance(q, Quantized) or not isinstance(q.scaling, BlockScaling):
        raise TypeError(f"q must be a Quantized made with BlockScaling; got {shown(q)}")
    if not q.scaling.power_2_scale:
        raise ValueError(f"q must have power_2_scale=True: E8M0 holds powers of two; got {q.scaling}")
    m, k = q.matrix_shape
    block_dim = q.scaling.block_dim
    rowwise = None if q.rowwise_data is None else _scales_as_bytes(valid_scales(q), m, block_dim)
    columnwise = None if q.columnwise_data is None else _scales_as_bytes(valid_scales(q, True), k, block_dim)
    return rowwise, columnwise


def _scales_as_bytes(scales, outer, block_dim):
    exponents = (np.ascontiguousarray(scales).view(np.uint32) >> 23).astype(np.uint8)
    if block_dim == 2:
        exponents = np.repeat(exponents, BLOCK, axis=0)[:outer]
    exponents = np.repeat(exponents, 4, axis=1)
    return swizzle(pad_to_blocks(exponents, 128, 4))
