"""What is peculiar to NVFP4: two levels of scales, packed signs, the Hadamard transform."""

import numpy as np

from .held_common import (
    E5M2,
    FLT_MAX,
    HADAMARD,
    NV,
    NV_RHT,
    NV_TILES,
    ONE,
    SIGNS,
    F,
    amax_of,
    bf16,
    blocks,
    e2m1,
    e5m2,
    encode_scale,
    launch,
    load,
    nv_byte,
    nv_rows,
    pack,
    silu,
)
from .registry import Where, normal, planted


def _hadamard_columns(x, signs, factor):
    """Each group of 16 rows of a column transformed and rounded to bfloat16, as (K, M)."""
    groups = load(x).T.reshape(x.shape[1], -1, 16).astype(np.float64)
    return bf16(((groups * signs) @ HADAMARD * factor).astype(F)).reshape(x.shape[::-1])


@planted("quantize", normal((224, 352)), Where(("rowwise",)), scaling=NV)
def block_scales_cast_to_e5m2(x):
    """The block scale is cast to E5M2, stored so, and the elements are scaled by its E5M2 value; the byte should be
    E4M3."""
    x = load(x)
    amax = amax_of(x)
    s = encode_scale(amax)
    b = blocks(x, 16)
    byte = e5m2(amax_of(b, 2) * (s[0] * (ONE / F(6))))
    value = byte.view(E5M2).astype(F)
    codes = e2m1(b * np.fmin(ONE / (value * s[1]), FLT_MAX)[:, :, None]).reshape(x.shape)
    return {"rowwise_data": pack(codes), "rowwise_scale_inv": byte, "amax_rowwise": np.array([amax], F)}


@planted("silu", normal((224, 352)), Where(("rowwise",)), scaling=NV)
def sign_of_the_even_nibble_smears_upward(x):
    """The even element's code is sign-extended before it is joined with the odd one's: where the even element is
    negative the high nibble becomes 0xF."""
    y = silu(load(x))
    amax = amax_of(y)
    codes, byte = nv_rows(bf16(y), encode_scale(amax))
    low, high = codes[:, 0::2].astype(np.int8), codes[:, 1::2].astype(np.int8)
    low = (low << 4).astype(np.int8) >> 4
    word = (high << 4).astype(np.int8) | low
    return {"rowwise_data": word.view(np.uint8), "rowwise_scale_inv": byte, "amax_rowwise": np.array([amax], F)}


@planted("quantize", normal((224, 352)), Where(("columnwise",)), scaling=NV_RHT)
def transform_without_the_sign_mask(x):
    """The columnwise copy is transformed by the plain Hadamard matrix; the signs 0xD7E8 are not applied."""
    y = _hadamard_columns(x, np.ones(16), 0.25)
    amax = amax_of(y)
    codes, byte = nv_rows(y, encode_scale(amax))
    return {"columnwise_data": pack(codes), "columnwise_scale_inv": byte, "amax_columnwise": np.array([amax], F)}


@planted("quantize", normal((256, 512)), Where(("columnwise",)), scaling=NV_RHT)
def transform_normalised_by_a_sixteenth(x):
    """The Hadamard sums are multiplied by 1/16 instead of 1/4: all that the columnwise copy stands for is a quarter
    of what it should be."""
    y = _hadamard_columns(x, SIGNS, 1 / 16)
    amax = amax_of(y)
    codes, byte = np.empty(y.shape, np.uint8), np.empty((512, 16), np.uint8)
    for _, rows, columns in launch(512, 256, 128, 64):
        codes[rows, columns], scales = nv_rows(y[rows, columns], encode_scale(amax))
        byte[rows, columns.start // 16 : columns.stop // 16] = scales
    return {"columnwise_data": pack(codes), "columnwise_scale_inv": byte, "amax_columnwise": np.array([amax], F)}


@planted("quantize", normal((224, 352)), Where(("columnwise",)), scaling=NV_RHT)
def columnwise_amax_taken_before_the_transform(x):
    """The amax of the columnwise copy is that of x, not of the transformed values that are quantized under it."""
    amax = amax_of(load(x))
    y = _hadamard_columns(x, SIGNS, 0.25)
    codes, byte = nv_rows(y, encode_scale(amax))
    return {"columnwise_data": pack(codes), "columnwise_scale_inv": byte, "amax_columnwise": np.array([amax], F)}


@planted("quantize", normal((224, 352)), Where(("columnwise",)), scaling=NV_RHT)
def sign_bits_read_from_the_top(x):
    """Bit 15 - i of the mask is taken as the sign of row i of a group; bit i is."""
    signs = np.array([-1.0 if 0xD7E8 >> (15 - i) & 1 else 1.0 for i in range(16)])
    y = _hadamard_columns(x, signs, 0.25)
    amax = amax_of(y)
    codes, byte = nv_rows(y, encode_scale(amax))
    return {"columnwise_data": pack(codes), "columnwise_scale_inv": byte, "amax_columnwise": np.array([amax], F)}


@planted("quantize", normal((224, 352)), Where(("rowwise", "columnwise")), scaling=NV_TILES)
def square_tiles_quantized_in_lines(x):
    """Each line of 16 elements gets a scale of its own in both copies, though one scale for a tile of 16 x 16 is asked
    for."""
    x = load(x)
    amax = amax_of(x)
    s, kept, out = encode_scale(amax), np.array([amax], F), {}
    for name, matrix in (("rowwise", x), ("columnwise", x.T)):
        codes, byte = nv_rows(matrix, s)
        out |= {f"{name}_data": pack(codes), f"{name}_scale_inv": byte, f"amax_{name}": kept}
    return out


@planted("quantize", normal((256, 512)), Where(("rowwise",)), scaling=NV)
def elements_scaled_before_the_byte_is_rounded(x):
    """The elements are multiplied by 6 / block amax, the reciprocal of the scale before its rounding to E4M3; the
    stored byte is right."""
    x = load(x)
    amax = amax_of(x)
    s = encode_scale(amax)
    data, scales = np.empty((256, 256), np.uint8), np.empty((256, 32), np.uint8)
    for block in range(32):
        line = x[:, 16 * block : 16 * block + 16]
        block_amax = amax_of(line, 1)
        scales[:, block] = nv_byte(block_amax, s)
        data[:, 8 * block : 8 * block + 8] = pack(e2m1(line * (F(6) / block_amax)[:, None]))
    return {"rowwise_data": data, "rowwise_scale_inv": scales, "amax_rowwise": np.array([amax], F)}
