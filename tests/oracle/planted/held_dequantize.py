"""Dequantization: biases, orders and factors of the way back."""

import numpy as np

from .held_common import (
    E5M2,
    MX,
    NV,
    ONE,
    TILE_BLOCKS,
    F,
    amax_of,
    block_multiplier,
    e2m1_value,
    e4m3,
    e4m3_value,
    encode_scale,
    launch,
    mx_rows,
    nv_rows,
    pack,
    unpack,
)
from .registry import Where, planted


def _mx(shape):
    """A tensor in MXFP8 whose rows differ in magnitude."""

    def make(rng):
        x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 7, (shape[0], 1))).astype(F)
        codes, byte = mx_rows(x)
        return {"rowwise_data": codes, "rowwise_scale_inv": byte}

    return make


def _nv(rng):
    x = rng.standard_normal((128, 256), np.float32)
    amax = amax_of(x)
    codes, byte = nv_rows(x, encode_scale(amax))
    return {"rowwise_data": pack(codes), "rowwise_scale_inv": byte, "amax_rowwise": np.array([amax], F)}


def _factor(byte):
    return np.ldexp(ONE, byte.astype(np.int32) - 127)


@planted("dequantize", _mx((224, 352)), Where(("values",)), scaling=MX)
def exponent_bias_of_128(rowwise_data, rowwise_scale_inv):
    """The scale is 2^(byte - 128): every value is half of what it should be."""
    y = np.empty(rowwise_data.shape, F)
    for block in range(11):
        columns = slice(32 * block, 32 * block + 32)
        scale = np.ldexp(ONE, rowwise_scale_inv[:224, block].astype(np.int32) - 128)
        y[:, columns] = e4m3_value(rowwise_data[:, columns]) * scale[:, None]
    return {"y": y}


@planted("dequantize", _mx((256, 512)), Where(("values",)), scaling=MX)
def scale_row_of_the_tile(rowwise_data, rowwise_scale_inv):
    """All 32 rows of a tile are multiplied by the scales of its first row: the scale's index has row // 32 * 32 for
    row."""
    y = np.empty(rowwise_data.shape, F)
    for _, rows, columns in launch(256, 512, 32, 32):
        scale = _factor(rowwise_scale_inv[rows.start, columns.start // 32])
        y[rows, columns] = e4m3_value(rowwise_data[rows, columns]) * scale
    return {"y": y}


@planted("dequantize", _nv, Where(("values",)), scaling=NV)
def odd_element_taken_from_the_low_nibble(rowwise_data, rowwise_scale_inv, amax_rowwise):
    """The high nibble is unpacked as the even element and the low one as the odd; it is the other way round."""
    codes = np.stack([rowwise_data >> 4, rowwise_data & 15], axis=-1).reshape(128, 256)
    factor = (e4m3_value(rowwise_scale_inv) * amax_rowwise[0]) * (ONE / F(2688))
    return {"y": e2m1_value(codes) * np.repeat(factor, 16, axis=1)}


@planted("dequantize", _nv, Where(("values",)), scaling=NV)
def second_level_divides_by_448_only(rowwise_data, rowwise_scale_inv, amax_rowwise):
    """The factor is scale * amax / 448, where it is scale * amax / 2688: the 6 of E2M1 is missing."""
    y = np.empty((128, 256), F)
    for block in range(16):
        factor = (e4m3_value(rowwise_scale_inv[:, block]) * amax_rowwise[0]) * (ONE / F(448))
        codes = unpack(rowwise_data[:, 8 * block : 8 * block + 8])
        y[:, 16 * block : 16 * block + 16] = e2m1_value(codes) * factor[:, None]
    return {"y": y}


def _tiles(rng):
    x = rng.standard_normal((256, 256), np.float32) * (2.0 ** np.array([[0, 3], [5, 1]])).repeat(128, 0).repeat(128, 1)
    x = x.astype(F)
    scales, data = np.zeros((2, 4), F), np.empty((256, 256), np.uint8)
    for tile, rows, columns in launch(256, 256, 128, 128):
        scale = block_multiplier(amax_of(x[rows, columns]))
        data[rows, columns], scales[tile // 2, tile % 2] = e4m3(x[rows, columns] * scale), ONE / scale
    return {"rowwise_data": data, "rowwise_scale_inv": scales}


@planted("dequantize", _tiles, Where(("values",)), scaling=TILE_BLOCKS)
def tile_scale_read_at_transposed_index(rowwise_data, rowwise_scale_inv):
    """The scale of tile (r, c) is read from [c, r]: the two tiles off the diagonal have each other's."""
    y = np.empty((256, 256), F)
    for _, rows, columns in launch(256, 256, 128, 128):
        scale = rowwise_scale_inv[columns.start // 128, rows.start // 128]
        y[rows, columns] = e4m3_value(rowwise_data[rows, columns]) * scale
    return {"y": y}


@planted("dequantize", _mx((224, 352)), Where(("values",), every=("column", 2, (1,))), scaling=MX)
def odd_elements_lose_their_sign(rowwise_data, rowwise_scale_inv):
    """Codes are widened in pairs and the odd element of each pair is masked with 0x7F: its sign is lost."""
    y = np.empty(rowwise_data.shape, F)
    scale = np.repeat(_factor(rowwise_scale_inv[:224, :11]), 32, axis=1)
    for c in range(0, 352, 2):
        even, odd = rowwise_data[:, c], rowwise_data[:, c + 1] & 0x7F
        y[:, c] = e4m3_value(even) * scale[:, c]
        y[:, c + 1] = e4m3_value(odd) * scale[:, c + 1]
    return {"y": y}


@planted("dequantize", _mx((256, 512)), Where(("values",), rows=(64, 127)), scaling=MX)
def one_cta_decodes_e5m2(rowwise_data, rowwise_scale_inv):
    """The CTA of rows 64 to 127 decodes its codes as E5M2; the tensor's are E4M3."""
    y = np.empty(rowwise_data.shape, F)
    for cta, rows, columns in launch(256, 512, 64, 512):
        codes = rowwise_data[rows, columns]
        values = codes.view(E5M2).astype(F) if cta == 1 else e4m3_value(codes)
        y[rows] = values * np.repeat(_factor(rowwise_scale_inv[rows, :16]), 32, axis=1)
    return {"y": y}
