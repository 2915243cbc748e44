"""Casts by hand: carries, ties, subnormals, signs, exponent bytes; and copies that are cast twice."""

import ml_dtypes
import numpy as np

from .held_common import (
    CURRENT,
    DELAYED,
    E4M3,
    MX,
    MX_E5M2,
    ONE,
    TILE_BLOCKS,
    F,
    amax_of,
    blocks,
    e4m3,
    e4m3_value,
    exp2_inverse,
    launch,
    load,
    mx_byte,
    mx_columns,
    mx_rows,
    power_of_two,
    rows_of_many_sizes,
    tensor_scale,
)
from .registry import Where, normal, planted


@planted("quantize", normal((224, 352)), Where(("rowwise",)), scaling=MX)
def mantissa_carry_is_masked_off(x):
    """When the three mantissa bits round up past 7 the carry is masked away: 15.7 becomes 8 instead of 16, since the
    exponent is not raised."""
    b = blocks(load(x), 32)
    byte = mx_byte(amax_of(b, 2))
    scaled = b * exp2_inverse(byte)[:, :, None]
    bits = scaled.view(np.uint32)
    exponent = (bits >> 23 & 255).astype(np.int32) - 120
    mantissa = bits & 0x7FFFFF
    rounded = mantissa + 0x7FFFF + (mantissa >> 20 & 1)
    normal_code = (exponent << 3 | (rounded >> 20 & 7).astype(np.int32)).astype(np.uint8)
    sign = (bits >> 31 << 7).astype(np.uint8)
    codes = np.where(exponent > 0, sign | np.minimum(normal_code, 0x7E), e4m3(scaled))
    return {"rowwise_data": codes.astype(np.uint8).reshape(x.shape), "rowwise_scale_inv": byte}


@planted("quantize", normal((224, 352)), Where(("rowwise", "columnwise")), scaling=MX)
def exponent_byte_without_the_formats_exponent(x):
    """The scale byte is floor(log2 amax) + 127: the exponent of the format's maximum, 8, is not subtracted, and only
    the low end of E4M3 is used."""
    x = load(x)
    out = {}
    for name, matrix in (("rowwise", x), ("columnwise", x.T)):
        b = blocks(matrix, 32)
        byte = (amax_of(b, 2).view(np.uint32) >> 23).astype(np.uint8)
        codes = e4m3(b * exp2_inverse(byte)[:, :, None]).reshape(matrix.shape)
        out[f"{name}_data"] = codes if name == "rowwise" else codes.T
        out[f"{name}_scale_inv"] = byte if name == "rowwise" else byte.T
    return out


@planted("quantize", normal((224, 352)), Where(("columnwise",)), scaling=MX)
def columnwise_copy_of_the_dequantized_tile(x):
    """The columnwise copy is quantized from the dequantized rowwise codes in shared memory, where it should be from
    x."""
    x = load(x)
    rows_, scales = np.empty(x.shape, np.uint8), np.empty((224, 11), np.uint8)
    columns_, down = np.empty(x.shape, np.uint8), np.empty((7, 352), np.uint8)
    for _, rows, columns in launch(224, 352, 32, 32):
        codes, byte = mx_rows(x[rows, columns])
        shared = e4m3_value(codes) * np.ldexp(ONE, byte.astype(np.int32) - 127)
        rows_[rows, columns], scales[rows, columns.start // 32] = codes, byte[:, 0]
        columns_[rows, columns], low = mx_columns(shared)
        down[rows.start // 32, columns] = low[0]
    return {
        "rowwise_data": rows_,
        "rowwise_scale_inv": scales,
        "columnwise_data": columns_,
        "columnwise_scale_inv": down,
    }


@planted("quantize", normal((256, 512)), Where(("rowwise",)), scaling=MX_E5M2)
def ties_of_e5m2_rounded_away(x):
    """The cast to E5M2 adds half a step to the bits and truncates: ties go away from zero, where they go to even."""
    x = load(x)
    data, scales = np.empty(x.shape, np.uint8), np.empty((256, 16), np.uint8)
    for block in range(16):
        columns = slice(32 * block, 32 * block + 32)
        scales[:, block] = mx_byte(amax_of(x[:, columns], 1), 57344)
        half = (x[:, columns] * exp2_inverse(scales[:, block])[:, None]).astype(np.float16)
        data[:, columns] = (half.view(np.uint16) + np.uint16(0x80)) >> 8
    return {"rowwise_data": data, "rowwise_scale_inv": scales}


@planted("quantize", rows_of_many_sizes((224, 352)), Where(("rowwise", "columnwise")), scaling=CURRENT)
def subnormal_codes_flushed_to_zero(x):
    """Scaled magnitudes below 2^-6 become zero: the cast has no subnormal E4M3 codes, which should hold multiples of
    2^-9."""
    x = load(x)
    amax = amax_of(x)
    scale = tensor_scale(amax)
    row, column = np.empty((224, 352), np.uint8), np.empty((352, 224), np.uint8)
    for _, rows, columns in launch(224, 352, 32, 32):
        codes = e4m3(x[rows, columns] * scale)
        codes = np.where(codes & 0x78, codes, codes & np.uint8(0x80))
        row[rows, columns], column[columns, rows] = codes, codes.T
    inverse = np.array([ONE / scale], F)
    return {
        "rowwise_data": row,
        "rowwise_scale_inv": inverse,
        "amax_rowwise": np.array([amax], F),
        "columnwise_data": column,
        "columnwise_scale_inv": inverse,
    }


@planted("quantize", normal((224, 352)), Where(("rowwise",)), scaling=CURRENT)
def codes_of_the_fnuz_format(x):
    """The codes are those of E4M3 FNUZ, whose exponent bias is 8: as OCP E4M3 each one stands for twice the value
    that it was cast from."""
    x = load(x)
    amax = amax_of(x)
    scale = tensor_scale(amax)
    data = np.empty(x.shape, np.uint8)
    for _, rows, columns in launch(224, 352, 16, 352):
        limited = np.clip(x[rows, columns] * scale, F(-240), F(240))
        data[rows, columns] = limited.astype(ml_dtypes.float8_e4m3fnuz).view(np.uint8)
    return {
        "rowwise_data": data,
        "rowwise_scale_inv": np.array([ONE / scale], F),
        "amax_rowwise": np.array([amax], F),
    }


@planted("quantize", normal((256, 512)), Where(("rowwise",)), scaling=TILE_BLOCKS)
def elements_divided_by_an_unrounded_scale(x):
    """The elements are multiplied by 448 / amax before its mantissa is cleared; the scale that is stored is the
    power of two."""
    x = load(x)
    data, scales = np.empty(x.shape, np.uint8), np.empty((2, 4), F)
    for tile, rows, columns in launch(256, 512, 128, 128):
        quotient = F(448) / amax_of(x[rows, columns])
        data[rows, columns] = e4m3(x[rows, columns] * quotient)
        scales.ravel()[tile] = ONE / power_of_two(quotient)
    return {"rowwise_data": data, "rowwise_scale_inv": scales}


@planted("quantize", normal((224, 352), scale=12), Where(("rowwise",)), scaling=DELAYED)
def cast_does_not_saturate(x):
    """Scaled values beyond 448 become NaN codes, 0x7F and 0xFF; the cast should clamp them to the largest value."""
    x = load(x)
    data, amax = np.empty(x.shape, np.uint8), F(0)
    for _, rows, columns in launch(224, 352, 32, 64):
        register = x[rows, columns]
        amax = max(amax, amax_of(register))
        data[rows, columns] = (register * F(24)).astype(E4M3).view(np.uint8)
    return {
        "rowwise_data": data,
        "rowwise_scale_inv": np.array([ONE / F(24)], F),
        "amax_rowwise": np.array([amax], F),
    }
