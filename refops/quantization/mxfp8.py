"""MXFP8: 32 elements share a power-of-two scale, stored as an E8M0 byte.

Sources: OCP Microscaling Formats (MX) 1.0, section 6.3; TE `common/cast/mxfp8/quantize_mxfp8.cuh` and
`common/util/ptx_arch_spec.cuh` (the scale byte rounds up).
"""

import numpy as np

from refops.formats import E8M0, encode_tile
from refops.quantization.blocks import blocks_of, quantize_blocks
from refops.quantization.result import Quantized
from refops.scaling import MXFP8Scaling
from refops.tiles import for_each, tile_slices

F = np.float32
BLOCK = MXFP8Scaling.block_size


def _encode_multipliers():
    """2^(127 - byte) for every scale byte; 2^-127 (subnormal) for 254, NaN for 255."""
    multipliers = (2.0 ** (127.0 - np.arange(256))).astype(np.float32)
    multipliers[255] = np.nan
    return multipliers


#: Scale byte -> what elements are multiplied with before the cast.
ENCODE_MULTIPLIER = _encode_multipliers()


def scale_byte(amax, fmt, scale_rounding="up"):
    """Return the E8M0 byte for each block amax (float32, >= 0, no NaN). Zero gives 0x00, inf 0xFE.

    "up" is round-up(amax * float32(1 / max)): a multiplication, as in TE's kernel.
    """
    if scale_rounding == "up":
        return encode_tile(amax * (F(1) / fmt.max), E8M0, rounding="up")
    emax = int(np.log2(fmt.max))
    bits = amax.view(np.uint32)
    if scale_rounding == "even":
        bits = bits + (np.uint32(1) << np.uint32(22 - fmt.mantissa_bits))
    exponent = (bits >> np.uint32(23)).astype(np.int32)
    if scale_rounding == "ceil_ocp":
        exponent += (bits & np.uint32(0x7FFFFF)) != 0
    return np.where(np.isinf(amax), 254, np.clip(exponent - emax, 0, 254)).astype(np.uint8)


def quantize_mxfp8(values, scaling, rowwise, columnwise):
    """Quantize the source `values` under `MXFP8Scaling`; blocks at the edge are partial."""
    q = Quantized.allocate(values, scaling, rowwise, columnwise)
    row_data, column_data = q.row_matrix, q.column_matrix
    row_scales, column_scales = q.rowwise_scale_inv, q.columnwise_scale_inv

    def scale_of(amax):
        byte = scale_byte(amax, scaling.fmt, scaling.scale_rounding)
        return byte, ENCODE_MULTIPLIER[byte]

    def work(rows, columns):
        tile = values.read(rows, columns)
        row_blocks, column_blocks = blocks_of(rows, BLOCK), blocks_of(columns, BLOCK)
        if scaling.two_d:
            codes, scales = quantize_blocks(tile, BLOCK, BLOCK, scaling.fmt, scale_of)
            if rowwise:
                row_data[rows, columns] = codes
                row_scales[rows, column_blocks] = np.repeat(scales, BLOCK, axis=0)[: tile.shape[0]]
            if columnwise:
                column_data[rows, columns] = codes
                column_scales[row_blocks, columns] = np.repeat(scales, BLOCK, axis=1)[:, : tile.shape[1]]
            return
        if rowwise:
            codes, scales = quantize_blocks(tile, 1, BLOCK, scaling.fmt, scale_of)
            row_data[rows, columns], row_scales[rows, column_blocks] = codes, scales
        if columnwise:
            codes, scales = quantize_blocks(tile, BLOCK, 1, scaling.fmt, scale_of)
            column_data[rows, columns], column_scales[row_blocks, columns] = codes, scales

    for_each(tile_slices(values.shape), work)
    return q


def dequantize_tile(q, rows, columns, columnwise):
    """float32 values of a rectangle of the (M, K) matrix: 2^(byte - 127) * element."""
    codes = (q.column_matrix if columnwise else q.row_matrix)[rows, columns]
    row_index, column_index = np.arange(rows.start, rows.stop), np.arange(columns.start, columns.stop)
    if columnwise:
        scales = q.columnwise_scale_inv[row_index[:, None] // BLOCK, column_index]
    else:
        scales = q.rowwise_scale_inv[row_index[:, None], column_index // BLOCK]
    return E8M0.values[scales] * q.scaling.fmt.values[codes]
