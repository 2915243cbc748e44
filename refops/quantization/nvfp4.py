"""NVFP4: E2M1 elements, an E4M3 scale for 16 of them, a float32 amax for the tensor.

Sources: TE `common/cast/nvfp4/core_nvfp4.cuh` (scales), `quantize_transpose_nvfp4.cuh` (data),
`quantize_4over6_nvfp4.cuh` (4over6), `dequantize_nvfp4.cuh`. The order of every float32 operation is theirs.
"""

import numpy as np

from refops.formats import E2M1, E4M3, encode_tile, pack_fp4, unpack_fp4
from refops.quantization.blocks import blocks_of
from refops.quantization.hadamard import transform_groups
from refops.quantization.layout import block_amax, block_view
from refops.quantization.result import Quantized
from refops.rounding import philox_bytes
from refops.scaling import NVFP4Scaling
from refops.tiles import Source, column_amax, for_each, row_amax, sum_in_order, tensor_amax, tile_slices

F = np.float32
BLOCK = NVFP4Scaling.block_size
FLT_MAX = np.finfo(np.float32).max
ONE_SIXTH = F(1) / F(6)


def global_encode_scale(amax, e4m3_max=448):
    """Return S_enc = e4m3_max * 6 / amax for each global amax (float32), made safe: 1 where amax is 0 or inf."""
    with np.errstate(all="ignore"):
        scale = np.fmin(F(e4m3_max * 6) / amax, FLT_MAX)
    return np.where((amax == 0) | (scale == 0), F(1), scale)


def block_scale_byte(amax, s_enc):
    """Return the stored E4M3 byte for each block amax: amax * (S_enc * 1/6), the inner product rounded first."""
    return encode_tile(np.fmin(amax * (s_enc * ONE_SIXTH), FLT_MAX), E4M3)


def encode_multiplier(scale_bytes, s_enc):
    """Return 1 / (scale * 1 / S_enc), at most FLT_MAX: what elements are multiplied with before the cast."""
    return np.fmin(F(1) / (E4M3.values[scale_bytes] * (F(1) / s_enc)), FLT_MAX)


class HadamardSource(Source):
    """A source whose groups of 16 rows went through the Hadamard transform and were rounded to the nominal dtype."""

    def __init__(self, source, sign_mask):
        super().__init__(source.tensor_shape, source.shape, source.dtype)
        self._source, self._sign_mask = source, sign_mask

    def read(self, rows, columns):
        tile = self._source.read(rows, columns)
        groups = tile.reshape(-1, BLOCK, tile.shape[1])
        return transform_groups(groups, self._sign_mask, self.dtype).astype(np.float32).reshape(tile.shape)


def quantize_nvfp4(values, amax_values, scaling, rowwise, columnwise):
    """Quantize under `NVFP4Scaling`.

    Args:
        values: source of what is cast; block amaxes come from it.
        amax_values: source of the global amax.

    Raises:
        ValueError: M or K not divisible by 16 (32 for row-scaled columnwise output), random bits of the wrong shape,
            or row scaling with 4over6 columnwise.
    """
    m, k = values.shape
    check_shape(values.tensor_shape, m, k, scaling, columnwise)
    row_bits, column_bits = given_bits(scaling, m, k, rowwise, columnwise)
    column_values = HadamardSource(values, scaling.sign_mask) if scaling.rht else values
    q = Quantized.allocate(values, scaling, rowwise, columnwise)
    row_data, column_data = q.row_matrix, q.column_matrix
    _fill_amax(q, amax_values, column_values)
    codes_serve_both = scaling.two_d and not scaling.stochastic_rounding

    def work(rows, columns):
        tile = values.read(rows, columns)
        row_blocks, column_blocks = blocks_of(rows, BLOCK), blocks_of(columns, BLOCK)
        if rowwise:
            bits = tile_bits(scaling, row_bits, rows, columns, k // BLOCK, 0)
            shape = (BLOCK, BLOCK) if scaling.two_d else (1, BLOCK)
            amax = q.amax_rowwise[rows, None] if scaling.row_scaled else q.amax_rowwise[:, None]
            codes, scales = _quantize_tile(tile, shape, amax, scaling, bits)
            row_data[rows, _half(columns)] = pack_fp4(codes)
            q.rowwise_scale_inv[rows, column_blocks] = np.repeat(scales, shape[0], axis=0)
        if columnwise:
            if not (rowwise and codes_serve_both):
                column_tile = column_values.read(rows, columns) if scaling.rht else tile
                first = m * (k // BLOCK)  # columnwise blocks are numbered after all rowwise ones
                bits = tile_bits(scaling, column_bits, columns, rows, m // BLOCK, first)
                shape = (BLOCK, BLOCK) if scaling.two_d else (BLOCK, 1)
                amax = q.amax_columnwise[None, columns] if scaling.row_scaled else q.amax_columnwise[:, None]
                codes, scales = _quantize_tile(column_tile, shape, amax, scaling, None if bits is None else bits.T)
            column_data[columns, _half(rows)] = pack_fp4(codes.T)
            q.columnwise_scale_inv[columns, row_blocks] = np.repeat(scales, shape[1], axis=1).T

    for_each(tile_slices((m, k)), work)
    return q


def check_shape(tensor_shape, m, k, scaling, columnwise):
    multiple = 32 if scaling.row_scaled and columnwise else BLOCK
    if m % multiple or k % multiple:
        what = "row-scaled columnwise NVFP4" if multiple == 32 else "NVFP4"
        raise ValueError(
            f"x must have M % {multiple} == 0 and K % {multiple} == 0 for {what} "
            f"(K the last dimension, M the product of the others); got shape {tensor_shape}, M={m}, K={k}"
        )
    if scaling.row_scaled and scaling.four_over_six and columnwise:
        raise ValueError("columnwise must be False with row_scaled and four_over_six together; got columnwise=True")


def _fill_amax(q, amax_values, column_values):
    """Compute the amaxes that `q` has room for: of the tensor or of rows and columns; columnwise after RHT."""
    amax_row, amax_column, scaling = q.amax_rowwise, q.amax_columnwise, q.scaling
    if scaling.row_scaled:
        if amax_row is not None:
            amax_row[:] = row_amax(amax_values)
        if amax_column is not None:
            amax_column[:] = column_amax(amax_values)
        return
    shared = tensor_amax(amax_values) if amax_row is not None or not scaling.rht else None
    if amax_row is not None:
        amax_row[:] = shared
    if amax_column is not None:
        amax_column[:] = tensor_amax(column_values) if scaling.rht else shared


def _quantize_tile(tile, block_shape, amax, scaling, bits):
    """Return the codes of (R, C) `tile` and the scale byte of each block.

    Args:
        tile: float32 (R, C), both divisible by the block.
        block_shape: (rows, columns) of a block.
        amax: global amax, float32 (1, 1), or a row's or a column's: (R, 1) or (1, C).
        bits: uint8 (R, C) random bits, or None to round to nearest.
    """
    blocks = block_view(tile, *block_shape)
    block_maxima = block_amax(blocks)
    s_enc = global_encode_scale(amax, scaling.e4m3_max)
    if scaling.four_over_six:
        return _four_over_six(blocks, block_maxima, amax, s_enc, scaling)
    scales = block_scale_byte(block_maxima, s_enc)
    scaled = (blocks * encode_multiplier(scales, s_enc)[:, None, :, None]).reshape(tile.shape)
    if bits is None:
        return encode_tile(scaled, E2M1), scales
    return encode_tile(scaled, E2M1, rounding="stochastic", random_bits=bits), scales


def _four_over_six(blocks, block_maxima, amax, s_enc, scaling):
    """Quantize each block twice, its maximum mapped to 6 and to 4, and keep the better (ties: 6)."""
    candidates = []
    for factor in (F(1), F(1.5)):
        scales = four_over_six_byte(block_maxima, s_enc, factor)
        codes = encode_tile(blocks * encode_multiplier(scales, s_enc)[:, None, :, None], E2M1)
        candidates.append((codes, scales, _block_error(codes, scales, blocks, amax, scaling)))
    (codes6, scales6, error6), (codes4, scales4, error4) = candidates
    use4 = error4 < error6
    codes = np.where(use4[:, None, :, None], codes4, codes6)
    rows, block_rows, columns, block_columns = blocks.shape
    return codes.reshape(rows * block_rows, columns * block_columns), np.where(use4, scales4, scales6)


def four_over_six_byte(amax, s_enc, factor):
    """Return the E4M3 byte for each block amax: factor 1 maps it to 6, factor 1.5 to 4."""
    return encode_tile(np.fmin(((amax / F(6)) * s_enc) * factor, F(448)), E4M3)


def _block_error(codes, scales, blocks, amax, scaling):
    """Return the float32 error of each block, summed in TE's order.

    Along 16 elements: one after the other. Over the rows of a 16x16 tile: as a tree, row i with i + 8, then 4, 2, 1.
    """
    scale = E4M3.values[scales][:, None, :, None]
    difference = ((E2M1.values[codes] * scale) * amax[:, None, :, None]) / F(6 * scaling.e4m3_max) - blocks
    error = np.abs(difference) if scaling.four_over_six == "mae" else difference * difference
    if error.shape[3] == 1:  # columnwise 1 x 16: the block runs along axis 1
        return sum_in_order(np.moveaxis(error, 1, 0))[..., 0]
    rows = sum_in_order(np.moveaxis(error, 3, 0))  # (block rows, rows of a block, block columns)
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


def given_bits(scaling, m, k, rowwise, columnwise):
    """Return the caller's random bits as (rowwise (M, K), columnwise (K, M)); None where Philox makes them."""
    if scaling.random_bits is None:
        return None, None
    bits = scaling.random_bits
    if not isinstance(bits, tuple):
        if rowwise and columnwise:
            raise ValueError("random_bits must be a (rowwise, columnwise) pair for both directions; got one array")
        bits = (bits, bits)
    for made, array, shape, direction in (
        (rowwise, bits[0], (m, k), "rowwise"),
        (columnwise, bits[1], (k, m), "columnwise"),
    ):
        if made and array.shape != shape:
            raise ValueError(f"random_bits for {direction} output must have shape {shape}; got {array.shape}")
    return bits


def tile_bits(scaling, given, outer, inner, blocks_per_row, first):
    """Random bits of a rectangle in a direction's stored orientation, or None without stochastic rounding."""
    if not scaling.stochastic_rounding:
        return None
    if given is not None:
        return given[outer, inner]
    block = np.arange(inner.start // BLOCK, inner.stop // BLOCK)
    number = first + np.arange(outer.start, outer.stop)[:, None] * blocks_per_row + block
    return philox_bytes(scaling.seed, scaling.offset, number.ravel()).reshape(number.shape[0], number.shape[1] * BLOCK)


def _half(elements):
    """The slice of packed bytes that a slice of elements covers."""
    return slice(elements.start // 2, elements.stop // 2)


def dequantize_tile(q, rows, columns, columnwise):
    """float32 values of a rectangle: element * ((scale * amax) * float32(1 / (6 e4m3_max))).

    As in TE, scale * amax overflows for amax above FLT_MAX / 448 (7.6e35): such a block comes back as inf, its zeros as
    NaN. Columnwise data come back in (M, K) orientation, with RHT undone in float64 (tile edges are multiples of 16).
    """
    if columnwise:
        data, scales, amax = q.columnwise_data, q.columnwise_scale_inv, q.amax_columnwise
        outer, inner = columns, rows
    else:
        data, scales, amax = q.row_matrix, q.rowwise_scale_inv, q.amax_rowwise
        outer, inner = rows, columns
    codes = unpack_fp4(data[outer, _half(inner)])
    amax = amax[outer, None] if q.scaling.row_scaled else amax
    factor = (E4M3.values[scales[outer, blocks_of(inner, BLOCK)]] * amax) * (F(1) / F(6 * q.scaling.e4m3_max))
    values = E2M1.values[codes] * np.repeat(factor, BLOCK, axis=1)
    if not columnwise:
        return values
    values = np.ascontiguousarray(values.T)
    if q.scaling.rht:
        groups = values.reshape(-1, BLOCK, values.shape[1])
        values = transform_groups(groups, q.scaling.sign_mask, np.float32, inverse=True).reshape(values.shape)
    return values
