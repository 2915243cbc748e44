"""A wrong rule in a part of the result: one direction, the last tile, one CTA, an expert, odd blocks, a tail, half a
warp."""

import numpy as np

from .held_common import (
    BF16,
    MX,
    ONE,
    ROW_BLOCKS,
    TILE_BLOCKS,
    F,
    amax_of,
    bf16,
    block_multiplier,
    blocks,
    e4m3,
    exp2_inverse,
    gelu,
    halves,
    launch,
    load,
    mx_byte,
    mx_columns,
    mx_rows,
    power_of_two,
    silu,
)
from .registry import Where, normal, planted


@planted("quantize", normal((224, 352)), Where(("columnwise",)), scaling=MX)
def columnwise_exponent_rounded_to_nearest(x):
    """The columnwise scale bytes are the exponent of amax / 448 rounded to the nearest power of two instead of up; the
    rowwise ones are right."""
    x = load(x)
    data, scales = mx_rows(x)
    columns, down = np.empty(x.shape, np.uint8), np.empty((x.shape[0] // 32, x.shape[1]), np.uint8)
    for b in range(len(down)):
        rows = slice(b * 32, b * 32 + 32)
        ratio = amax_of(x[rows], 0) * (ONE / F(448))
        bits = ratio.view(np.uint32) + np.uint32(1 << 22)
        down[b] = bits >> 23
        columns[rows] = e4m3(x[rows] * exp2_inverse(down[b]))
    return {
        "rowwise_data": data,
        "rowwise_scale_inv": scales,
        "columnwise_data": columns,
        "columnwise_scale_inv": down,
    }


@planted("quantize", normal((224, 352)), Where(("rowwise",), rows=(192, 223)), scaling=MX)
def last_row_tile_maximum_without_abs(x):
    """The remainder path for the last partial tile of 64 rows takes the block maximum of x, not of |x|."""
    x = load(x)
    data, scales = np.empty(x.shape, np.uint8), np.empty((224, 11), np.uint8)
    for _, rows, columns in launch(*x.shape, 64, 352):
        b = blocks(x[rows, columns], 32)
        full = rows.stop - rows.start == 64
        amax = amax_of(b, 2) if full else np.maximum(b.max(axis=2), F(0))
        byte = mx_byte(amax)
        data[rows] = e4m3(b * exp2_inverse(byte)[:, :, None]).reshape(-1, 352)
        scales[rows] = byte
    return {"rowwise_data": data, "rowwise_scale_inv": scales}


@planted("quantize", normal((256, 512)), Where(("rowwise",), rows=(128, 255), columns=(256, 383)), scaling=TILE_BLOCKS)
def cta_of_cluster_reads_e5m2_limit(x):
    """The CTA of block row 1, block column 2 reads its limit from the constant bank of E5M2, 57344, where all others
    have 448."""
    x = load(x)
    data, scales = np.empty(x.shape, np.uint8), np.zeros((2, 4), F)
    limits = np.full(8, 448, F)
    limits[6] = 57344
    for cta, rows, columns in launch(256, 512, 128, 128):
        scale = block_multiplier(amax_of(x[rows, columns]), limits[cta])
        data[rows, columns] = e4m3(x[rows, columns] * scale)
        scales[cta // 4, cta % 4] = ONE / scale
    return {"rowwise_data": data, "rowwise_scale_inv": scales}


@planted("swiglu", normal((256, 704)), Where(("rowwise", "columnwise"), rows=(128, 191)), scaling=MX)
def third_expert_reads_gate_first(x):
    """The rows of the third of four experts are read as [gate | act], so silu is applied to the wrong half; the other
    experts read [act | gate]."""
    first = np.array([0, 64, 128, 192, 256])
    out = {
        "rowwise_data": np.empty((256, 352), np.uint8),
        "rowwise_scale_inv": np.empty((256, 11), np.uint8),
        "columnwise_data": np.empty((256, 352), np.uint8),
        "columnwise_scale_inv": np.empty((8, 352), np.uint8),
    }
    for expert in range(4):
        rows = slice(first[expert], first[expert + 1])
        act, gate = halves(load(x[rows]))
        if expert == 2:
            act, gate = gate, act
        y = bf16(silu(act) * gate)
        out["rowwise_data"][rows], out["rowwise_scale_inv"][rows] = mx_rows(y)
        codes, bytes_ = mx_columns(y)
        out["columnwise_data"][rows] = codes
        out["columnwise_scale_inv"][rows.start // 32 : rows.stop // 32] = bytes_
    return out


@planted(
    "quantize",
    normal((256, 512)),
    Where(("rowwise",), every=("column", 256, tuple(range(128, 256)))),
    scaling=ROW_BLOCKS,
)
def odd_row_blocks_use_the_fnuz_limit(x):
    """Odd blocks of 128 columns get their scale from 240, the largest value of E4M3 FNUZ, where it should be 448."""
    x = load(x)
    data, scales = np.empty(x.shape, np.uint8), np.empty((4, 256), F)
    for block in range(4):
        columns = slice(128 * block, 128 * block + 128)
        top = F(240) if block & 1 else F(448)
        scale = power_of_two(top / amax_of(x[:, columns], 1))
        data[:, columns] = e4m3(x[:, columns] * scale[:, None])
        scales[block] = ONE / scale
    return {"rowwise_data": data, "rowwise_scale_inv": scales}


@planted("silu", normal((193, 363)), Where(("values",), columns=(360, 362)))
def vector_tail_copies_the_input(x):
    """The scalar tail behind the last whole vector of 8 columns stores x itself, not silu(x)."""
    k = x.shape[1]
    y = np.empty_like(x)
    whole = k // 8 * 8
    for c in range(0, whole, 8):
        y[:, c : c + 8] = silu(load(x[:, c : c + 8])).astype(BF16)
    for c in range(whole, k):
        register = load(x[:, c])
        y[:, c] = register.astype(BF16)
    return {"y": y}


@planted("gelu", normal((224, 384)), Where(("values",), every=("column", 128, tuple(range(64, 128)))))
def upper_half_warp_truncates_the_store(x):
    """Lanes 16 to 31, which hold columns 64 to 127 of each 128, store the upper 16 bits of the float32 result instead
    of rounding to the nearest bfloat16."""
    x = load(x)
    y = np.empty(x.shape, BF16)
    for start in range(0, x.shape[1], 128):
        for lane in range(32):
            columns = slice(start + 4 * lane, start + 4 * lane + 4)
            value = gelu(x[:, columns])
            if lane < 16:
                y[:, columns] = value.astype(BF16)
            else:
                y[:, columns] = (value.view(np.uint32) >> 16).astype(np.uint16).view(BF16)
    return {"y": y}


@planted("quantize", normal((128, 512), scale=0.25), Where(("rowwise",), columns=(0, 31), every=("row", 8, (0,))), MX)
def every_128th_block_starts_from_one(x):
    """The amax of every 128th block in row-major order (block 0 of every eighth row) starts from 1 instead of 0."""
    x = load(x)
    flat = x.reshape(-1, 32)
    codes, scales = np.empty(flat.shape, np.uint8), np.empty(len(flat), np.uint8)
    for chunk in range(0, len(flat), 128):  # a CTA has 128 blocks, thread 0 left its barrier count in the register
        amax = np.zeros(128, F)
        amax[0] = 1
        part = slice(chunk, chunk + 128)
        amax = np.maximum(amax, amax_of(flat[part], 1))
        scales[part] = mx_byte(amax)
        codes[part] = e4m3(flat[part] * exp2_inverse(scales[part])[:, None])
    return {"rowwise_data": codes.reshape(x.shape), "rowwise_scale_inv": scales.reshape(128, 16)}
