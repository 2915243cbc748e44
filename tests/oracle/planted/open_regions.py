"""A wrong rule in one place: a direction, the last partial tile, a CTA, an expert, odd blocks, a tail, a half warp."""

from itertools import pairwise

import numpy as np

import refops
from planted import open_common as c
from planted.open_common import BF16, SHAPE, F
from planted.registry import Where, normal, planted

MX = refops.MXFP8Scaling(refops.E4M3)
NV = refops.NVFP4Scaling()
ROW, COLUMN = ("rowwise",), ("columnwise",)
X = normal(SHAPE)


@planted("quantize", X, Where(COLUMN), MX)
def floor_byte_in_columnwise_copy(x):
    """The columnwise copy takes the scale byte from the exponent of amax rounded down (floor(log2 amax) - 8), not
    rounded up as it should be; the rowwise copy is right."""
    v = c.f32(x)
    data, scale = c.mx_buffers(v.shape, True)
    for i, r in c.blocks(len(v), 32):
        scale[i] = c.byte_floor(np.abs(v[r]).max(axis=0))
        data[r] = c.e4m3(v[r] * c.inverse(scale[i]))
    return {**c.mx_rowwise(v), **c.columnwise(data, scale)}


@planted("quantize", X, Where(ROW, columns=(256, 351)), MX)
def floor_byte_in_last_column_tile(x):
    """The last tile of columns, 96 of 128, goes through a branch whose scale byte is floor(log2 amax) - 8 instead of
    rounded up."""
    data, scale = c.mx_buffers(x.shape)
    for r, t in c.tiles(x.shape, 32, 128):
        full = t.stop - t.start == 128
        tile = c.f32(x[r, t])
        for j, b in c.blocks(tile.shape[1], 32):
            amax = c.amax_of(tile[:, b])
            byte = c.byte_up(amax) if full else c.byte_floor(amax)
            scale[r, t.start // 32 + j] = byte
            data[r, t.start + b.start : t.start + b.stop] = c.e4m3(tile[:, b] * c.inverse(byte)[:, None])
    return c.rowwise(data, scale)


@planted("quantize", X, Where(ROW, rows=(192, 223)), MX)
def e5m2_limit_in_last_row_tile(x):
    """The guarded path of the last tile of 64 rows, which has 32, divides amax by E5M2's 57344 instead of E4M3's 448,
    so its scale bytes are 7 too small and elements saturate."""
    data, scale = c.mx_buffers(x.shape)
    for r, t in c.tiles(x.shape, 64, 32):
        tile = c.f32(x[r, t])
        limit = 448 if len(tile) == 64 else 57344
        byte = c.byte_up(c.amax_of(tile), limit)
        scale[r, t.start // 32] = byte
        data[r, t] = c.e4m3(tile * c.inverse(byte)[:, None])
    return c.rowwise(data, scale)


@planted("quantize", X, Where(ROW, rows=(64, 127), columns=(128, 191)), MX)
def truncating_cast_in_one_cta(x):
    """The CTA at block (1, 2) of a grid of 64x64 tiles truncates elements toward zero instead of rounding to nearest
    even; scales are right."""
    data, scale = c.mx_buffers(x.shape)
    for r, t in c.tiles(x.shape, 64, 64):
        cta = r.start // 64, t.start // 64
        for _, b in c.blocks(t.stop - t.start, 32):
            columns = slice(t.start + b.start, t.start + b.stop)
            tile = c.f32(x[r, columns])
            byte = c.byte_up(c.amax_of(tile))
            scaled = tile * c.inverse(byte)[:, None]
            data[r, columns] = c.truncate_e4m3(scaled) if cta == (1, 2) else c.e4m3(scaled)
            scale[r, columns.start // 32] = byte
    return c.rowwise(data, scale)


EXPERTS = (0, 64, 96, 160, 224)


@planted("quantize", X, Where(ROW, rows=(96, 159)), MX)
def expert_two_scales_twice_too_large(x):
    """In a grouped kernel expert 2, rows 96 to 159, adds 1 to each scale byte and quantizes with it: its scales are
    twice too large and its elements half as large as they should be."""
    data, scale = c.mx_buffers(x.shape)
    for expert, (first, last) in enumerate(pairwise(EXPERTS)):
        margin = 1 if expert == 2 else 0
        for j, b in c.blocks(x.shape[1], 32):
            block = c.f32(x[first:last, b])
            byte = c.byte_up(c.amax_of(block)) + np.uint8(margin)
            scale[first:last, j] = byte
            data[first:last, b] = c.e4m3(block * c.inverse(byte)[:, None])
    return c.rowwise(data, scale)


@planted("quantize", X, Where(ROW, every=("column", 64, tuple(range(32, 64)))), MX)
def odd_blocks_round_scale_to_nearest(x):
    """Two blocks of 32 go through the loop at a time; the second, odd one rounds log2(amax / 448) to the nearest
    integer for its scale byte instead of up."""
    data, scale = c.mx_buffers(x.shape)
    for _, pair in c.blocks(x.shape[1], 64):
        for half, b in c.blocks(pair.stop - pair.start, 32):
            columns = slice(pair.start + b.start, pair.start + b.stop)
            block = c.f32(x[:, columns])
            amax = c.amax_of(block)
            nearest = (np.rint(np.log2(amax / F(448))) + 127).astype(np.uint8)
            byte = nearest if half else c.byte_up(amax)
            scale[:, columns.start // 32] = byte
            data[:, columns] = c.e4m3(block * c.inverse(byte)[:, None])
    return c.rowwise(data, scale)


@planted("quantize", normal((256, 512)), Where(ROW, columns=(480, 511), every=("row", 8, (7,))), MX)
def every_128th_block_without_abs(x):
    """A batch has 128 blocks of 32 in row-major order; the last of each batch is reduced outside of the loop by max(x)
    without the absolute value, so where a negative element is the largest its scale is too small."""
    v = c.f32(x).reshape(-1, 32)
    data, scale = np.zeros(v.shape, np.uint8), np.zeros(len(v), np.uint8)
    for _, batch in c.blocks(len(v), 128):
        amax = np.zeros(128, F)
        amax[:127] = c.amax_of(v[batch][:127])
        amax[127] = v[batch][127].max()
        scale[batch] = c.byte_up(amax)
        data[batch] = c.e4m3(v[batch] * c.inverse(scale[batch])[:, None])
    return c.rowwise(data.reshape(256, 512), scale.reshape(256, 16))


@planted("quantize", X, Where(ROW, columns=(320, 351)), NV)
def unrolled_tail_forgets_sixth(x):
    """The loop handles four blocks of 16 at a time; the tail behind it, columns 320 to 351, computes the scale byte as
    E4M3(amax * S_enc) without the factor 1/6."""
    v = c.f32(x)
    amax = np.abs(v).max()
    s = c.s_enc(amax)
    codes, scale = c.nv_buffers(v.shape)
    j = 0
    while j + 4 <= v.shape[1] // 16:
        for k in range(j, j + 4):
            codes[:, 16 * k : 16 * k + 16], scale[:, k] = c.nv_block(v[:, 16 * k : 16 * k + 16], s)
        j += 4
    for k in range(j, v.shape[1] // 16):
        block = v[:, 16 * k : 16 * k + 16]
        scale[:, k] = c.e4m3(c.amax_of(block) * s)
        codes[:, 16 * k : 16 * k + 16] = c.e2m1(block * c.nv_multiplier(scale[:, k], s)[:, None])
    return c.rowwise(c.pack(codes), scale, amax_rowwise=c.one(amax))


@planted("quantize", X, Where(ROW, every=("row", 32, tuple(range(16, 32)))), NV)
def upper_half_warp_multiplies_in_bfloat16(x):
    """Each lane of a warp has a row; lanes 16 to 31 keep the encode multiplier of a block in bfloat16, which should be
    float32. Scale bytes are right."""
    v = c.f32(x)
    amax = np.abs(v).max()
    s = c.s_enc(amax)
    codes, scale = c.nv_buffers(v.shape)
    for warp in range(0, len(v), 32):
        lane = np.arange(32)
        for j, b in c.blocks(v.shape[1], 16):
            block = v[warp : warp + 32, b]
            byte = c.nv_byte(c.amax_of(block), s)
            multiplier = c.nv_multiplier(byte, s)
            multiplier = np.where(lane >= 16, c.bf16(multiplier), multiplier)
            codes[warp : warp + 32, b], scale[warp : warp + 32, j] = c.e2m1(block * multiplier[:, None]), byte
    return c.rowwise(c.pack(codes), scale, amax_rowwise=c.one(amax))


@planted("quantize", X, Where(COLUMN), NV)
def columnwise_tensor_scale_of_256(x):
    """The columnwise copy computes S_enc as 256 * 6 / amax where it should be 448 * 6 / amax; rowwise is right."""
    v = c.f32(x)
    amax = np.abs(v).max()
    s = F(256 * 6) / amax
    codes, scale = c.nv_buffers(v.T.shape)
    for i, r in c.blocks(len(v), 16):
        codes[:, r], scale[:, i] = c.nv_block(v[r].T, s)
    return {**c.nv_rowwise(v, amax), **c.columnwise(c.pack(codes), scale, amax_columnwise=c.one(amax))}


@planted("quantize", X, Where(ROW, columns=(256, 351)), refops.BlockScaling(refops.E4M3, 1))
def last_partial_vector_keeps_mantissa_of_scale(x):
    """The last block of a row, 96 of 128 columns, uses 448 / amax as it is; its mantissa should be cleared, as that of
    full blocks is."""
    v = c.f32(x)
    data, scale_inv = np.zeros(v.shape, np.uint8), np.zeros((3, len(v)), F)
    for j, b in c.blocks(v.shape[1], 128):
        amax = c.amax_of(v[:, b])
        scale = c.power_2_scale(amax) if b.stop - b.start == 128 else F(448) / amax
        data[:, b], scale_inv[j] = c.e4m3(v[:, b] * scale[:, None]), F(1) / scale
    return c.rowwise(data, scale_inv)


@planted("quantize", X, Where(ROW, rows=(128, 223), columns=(128, 255)), refops.BlockScaling(refops.E4M3, 2))
def one_tile_rounds_scale_up(x):
    """The CTA of tile (1, 1) of 128x128 rounds the scale up to the next power of two, where it should be rounded down;
    its largest elements saturate."""
    v = c.f32(x)
    data, scale_inv = np.zeros(v.shape, np.uint8), np.zeros((2, 3), F)
    for r, t in c.tiles(v.shape, 128, 128):
        tile, cta = v[r, t], (r.start // 128, t.start // 128)
        scale = c.power_2_scale(np.abs(tile).max())
        if cta == (1, 1):
            scale = scale * F(2)
        data[r, t], scale_inv[cta] = c.e4m3(tile * scale), F(1) / scale
    return c.rowwise(data, scale_inv)


@planted("quantize", normal((200, 349)), Where(ROW, columns=(344, 348)), refops.CurrentScaling(refops.E4M3))
def scalar_tail_casts_unscaled(x):
    """Vectors of 8 elements are scaled and cast; the scalar tail of a row, columns 344 to 348, casts x without
    multiplying by the scale."""
    v = c.f32(x)
    amax = np.abs(v).max()
    scale, data = c.tensor_scale(amax), np.zeros(v.shape, np.uint8)
    whole = v.shape[1] // 8 * 8
    for j in range(0, whole, 8):
        data[:, j : j + 8] = c.e4m3(v[:, j : j + 8] * scale)
    for j in range(whole, v.shape[1]):
        data[:, j] = c.e4m3(v[:, j])
    return c.rowwise(data, c.one(F(1) / scale), amax_rowwise=c.one(amax))


@planted("gelu", X, Where(ROW, every=("row", 2, (1,))), refops.DelayedScaling(refops.E4M3, 60.0))
def odd_rows_round_before_cast(x):
    """Warps with an odd row keep gelu's result in bfloat16 before they scale and cast it; delayed scaling should cast
    the float32 result, as even rows do."""
    amax, data = F(0), np.zeros(x.shape, np.uint8)
    for row in range(len(x)):
        y = c.gelu(c.f32(x[row]))
        amax = max(amax, np.abs(y).max())
        if row % 2:
            y = c.bf16(y)
        data[row] = c.e4m3(y * F(60))
    return c.rowwise(data, c.one(F(1) / F(60)), amax_rowwise=c.one(amax))


@planted("gelu", normal((200, 352)), Where(("values",), rows=(192, 199)))
def last_row_tile_without_cubic_term(x):
    """The guarded path of the last tile of 64 rows, which has 8, leaves the cubic term out of tanh's argument: gelu
    with tanh(0.798 x)."""
    y = np.zeros(x.shape, BF16)
    for r, t in c.tiles(x.shape, 64, 64):
        v = c.f32(x[r, t])
        if r.stop - r.start == 64:
            y[r, t] = c.gelu(v).astype(BF16)
        else:
            y[r, t] = (v * (F(0.5) + F(0.5) * c.tanh(c.LINEAR * v))).astype(BF16)
    return {"y": y}


@planted("swiglu", normal((224, 704)), Where(("values",), every=("column", 128, tuple(range(64, 128)))))
def odd_column_tiles_exchange_act_and_gate(x):
    """Of tiles of 64 columns the odd ones have the pointers of act and gate exchanged: silu(gate) * act instead of
    silu(act) * gate."""
    h = x.shape[1] // 2
    y = np.zeros((len(x), h), BF16)
    for r, t in c.tiles(y.shape, 32, 64):
        first, second = c.f32(x[r, t]), c.f32(x[r, h + t.start : h + t.stop])
        if t.start // 64 % 2:
            first, second = second, first
        y[r, t] = (c.silu(first) * second).astype(BF16)
    return {"y": y}


@planted("dgelu", c.with_dy(SHAPE), Where(("values",), rows=(64, 127), columns=(128, 255)))
def one_cta_drops_first_term_of_dgelu(dy, x):
    """The CTA at (1, 1) of a grid of 64x128 tiles computes 0.5 (1 + tanh u) alone as gelu's derivative; the term with
    1 - tanh^2 is missing."""
    dx = np.zeros(x.shape, BF16)
    for r, t in c.tiles(x.shape, 64, 128):
        v, g = c.f32(x[r, t]), c.f32(dy[r, t])
        slope = c.dgelu(v)
        if (r.start // 64, t.start // 128) == (1, 1):
            slope = F(0.5) * (F(1) + c.tanh((c.LINEAR * v) * (F(1) + (c.RATIO * v) * v)))
        dx[r, t] = (slope * g).astype(BF16)
    return {"dx": dx}


@planted("scaled_swiglu", c.with_row_scales(SHAPE), Where(("values",), rows=(64, 95)))
def expert_one_without_token_probability(x, row_scales):
    """Expert 1, rows 64 to 95 of a grouped kernel, does not multiply its rows by row_scales."""
    h = x.shape[1] // 2
    y = np.zeros((len(x), h), BF16)
    for expert in range(4):
        first, last = EXPERTS[expert], EXPERTS[expert + 1]
        act, gate = c.halves(x[first:last])
        out = c.silu(act) * gate
        if expert != 1:
            out = out * row_scales[first:last, None]
        y[first:last] = out.astype(BF16)
    return {"y": y}


@planted("quantize", X, Where(COLUMN), refops.NVFP4Scaling(two_d=True))
def columnwise_copy_of_squares_has_line_blocks(x):
    """The columnwise copy takes the block scale from 16 elements of a column; it should be that of the 16x16 tile, as
    in the rowwise copy."""
    v = c.f32(x)
    amax = np.abs(v).max()
    codes, scale = c.nv_square(v, amax)
    right = c.rowwise(c.pack(codes), np.repeat(scale, 16, axis=0), amax_rowwise=c.one(amax))
    s = c.s_enc(amax)
    t_codes, t_scale = c.nv_buffers(v.T.shape)
    for i, r in c.blocks(len(v), 16):
        t_codes[:, r], t_scale[:, i] = c.nv_block(v[r].T, s)
    return {**right, **c.columnwise(c.pack(t_codes), t_scale, amax_columnwise=c.one(amax))}


@planted("quantize", X, Where(COLUMN, every=("row", 32, tuple(range(16, 32)))), refops.NVFP4Scaling(rht=True))
def second_group_of_rows_without_signs(x):
    """A tile has 32 rows, two groups of the Hadamard transform; the second group is not multiplied by the random signs
    before the transform."""
    v = c.f32(x)
    y = np.zeros(v.shape, F)
    for tile in range(0, len(v), 32):
        y[tile : tile + 16] = c.transform(v[tile : tile + 16])
        y[tile + 16 : tile + 32] = c.transform(v[tile + 16 : tile + 32], signs=np.ones(16))
    return {**c.nv_rowwise(v, np.abs(v).max()), **c.nv_columnwise(y, np.abs(y).max())}


def stored_mx(rng):
    """A right MXFP8 tensor to dequantize."""
    return c.mx_rowwise(c.f32(c.draw(rng, SHAPE)))


@planted("dequantize", stored_mx, Where(("values",), columns=(256, 351)), MX)
def last_tile_decodes_with_bias_128(rowwise_data, rowwise_scale_inv):
    """The last tile of 128 columns, which has 96, decodes scale bytes as 2^(byte - 128) instead of 2^(byte - 127):
    half of the right values."""
    y = np.zeros(rowwise_data.shape, BF16)
    for r, t in c.tiles(y.shape, 32, 128):
        bias = 127 if t.stop - t.start == 128 else 128
        for j in range(t.start // 32, t.stop // 32):
            factor = (2.0 ** (rowwise_scale_inv[r, j].astype(np.float64) - bias)).astype(F)
            b = slice(32 * j, 32 * j + 32)
            y[r, b] = (c.e4m3_value(rowwise_data[r, b]) * factor[:, None]).astype(BF16)
    return {"y": y}


@planted("quantize", normal((256, 512)), Where(ROW, every=("row", 128, (127,))), refops.BlockScaling(refops.E4M3, 1))
def last_row_of_each_tile_has_scale_one(x):
    """A CTA has 128 rows; the amax of its last row is never reduced (off by one), so row 127 of every 128 keeps the
    initial scale 1 for its blocks."""
    v = c.f32(x)
    data, scale_inv = np.zeros(v.shape, np.uint8), np.zeros((4, len(v)), F)
    for r, t in c.tiles(v.shape, 128, 128):
        scale = np.ones(128, F)
        for row in range(127):
            scale[row] = c.power_2_scale(np.abs(v[r.start + row, t]).max())
        data[r, t], scale_inv[t.start // 128, r] = c.e4m3(v[r, t] * scale[:, None]), F(1) / scale
    return c.rowwise(data, scale_inv)


@planted("gelu", X, Where(ROW, rows=(0, 31), columns=(0, 127)), MX)
def first_tile_skips_rounding_of_activation(x):
    """The first tile of 32x128, peeled out of the loop as prologue, quantizes gelu's float32 result; it should be
    rounded to bfloat16 first, as in the loop."""
    data, scale = c.mx_buffers(x.shape)
    for number, (r, t) in enumerate(c.tiles(x.shape, 32, 128)):
        y = c.gelu(c.f32(x[r, t]))
        if number > 0:
            y = c.bf16(y)
        for j, b in c.blocks(y.shape[1], 32):
            codes, scale[r, t.start // 32 + j] = c.mx_block(y[:, b])
            data[r, t.start + b.start : t.start + b.stop] = codes
    return c.rowwise(data, scale)


@planted("quantize", normal((200, 352)), Where(COLUMN, rows=(192, 199)), MX)
def short_block_of_rows_divides_by_its_length(x):
    """The last block of a column has 8 of 32 rows; its amax is multiplied by 8/32 before the scale byte is computed,
    which should not happen."""
    v = c.f32(x)
    data, scale = c.mx_buffers(v.shape, True)
    for i, r in c.blocks(len(v), 32):
        amax = np.abs(v[r]).max(axis=0) * F((r.stop - r.start) / 32)
        scale[i] = c.byte_up(amax)
        data[r] = c.e4m3(v[r] * c.inverse(scale[i]))
    return c.columnwise(data, scale)


@planted("quantize", X, Where(ROW, every=("column", 32, tuple(range(16, 32)))), NV)
def odd_blocks_truncate_scale(x):
    """The block scale of odd blocks of 16 is truncated to E4M3 (rounded toward zero); it should be rounded to nearest
    as in even blocks."""
    v = c.f32(x)
    amax = np.abs(v).max()
    s = c.s_enc(amax)
    codes, scale = c.nv_buffers(v.shape)
    for j, b in c.blocks(v.shape[1], 16):
        ratio = c.amax_of(v[:, b]) * (s * (F(1) / F(6)))
        byte = c.truncate_e4m3(ratio) if j & 1 else c.e4m3(ratio)
        codes[:, b], scale[:, j] = c.e2m1(v[:, b] * c.nv_multiplier(byte, s)[:, None]), byte
    return c.rowwise(c.pack(codes), scale, amax_rowwise=c.one(amax))


@planted("quantize", X, Where(ROW, rows=(128, 223)), NV)
def second_row_tile_forgets_scale_limit(x):
    """From the second tile of 128 rows on (rows 128 to 223) S_enc is 6 / amax; the factor 448 is missing."""
    v = c.f32(x)
    amax = np.abs(v).max()
    codes, scale = c.nv_buffers(v.shape)
    for r, b in c.tiles(v.shape, 128, 16):
        s = F(448 * 6) / amax if r.start == 0 else F(6) / amax
        codes[r, b], scale[r, b.start // 16] = c.nv_block(v[r, b], s)
    return c.rowwise(c.pack(codes), scale, amax_rowwise=c.one(amax))


@planted("relu", X, Where(("values",), every=("column", 64, tuple(range(32, 64)))))
def upper_lanes_leak_negative_values(x):
    """A warp has 64 columns, two a lane; lanes 16 to 31 compute max(x, 0.01 x) (leaky) instead of max(x, 0)."""
    y = np.zeros(x.shape, BF16)
    for r, t in c.tiles(x.shape, 8, 64):
        v = c.f32(x[r, t])
        lane = np.arange(v.shape[1]) // 2
        y[r, t] = np.where(v > 0, v, np.where(lane >= 16, F(0.01) * v, F(0))).astype(BF16)
    return {"y": y}


@planted("silu", X, Where(COLUMN), MX)
def columnwise_copy_of_input(x):
    """The columnwise copy quantizes the input x; it should quantize silu(x), as the rowwise copy does."""
    v = c.f32(x)
    y = c.bf16(c.silu(v))
    data, scale = c.mx_buffers(x.shape, True)
    for r, t in c.tiles(x.shape, 32, 32):
        codes, scale[r.start // 32, t] = c.mx_block(v[r, t].T)
        data[r, t] = codes.T
    return {**c.mx_rowwise(y), **c.columnwise(data, scale)}


@planted("quantize", X, Where(ROW, columns=(176, 351)), refops.DelayedScaling(refops.E4M3, 40.0))
def second_cta_of_a_row_reads_default_scale(x):
    """Two CTAs share a row; the second one, columns 176 to 351, casts with scale 1 because the scale was loaded by
    block 0 alone."""
    v = c.f32(x)
    data = np.zeros(x.shape, np.uint8)
    for block in range(2):
        scale = F(40) if block == 0 else F(1)
        half = slice(176 * block, 176 * block + 176)
        data[:, half] = c.e4m3(v[:, half] * scale)
    return c.rowwise(data, c.one(F(1) / F(40)), amax_rowwise=c.one(np.abs(v).max()))


@planted("quantize", normal((256, 512)), Where(ROW, every=("row", 64, tuple(range(48, 64)))), MX)
def fourth_warp_saturates_at_240(x):
    """The fourth warp of each CTA of 64 rows clamps scaled elements at 240, the limit of E4M3 with its other encoding;
    the limit is 448."""
    data, scale = c.mx_buffers(x.shape)
    for warp, r in c.blocks(len(x), 16):
        limit = F(240) if warp % 4 == 3 else F(448)
        for j, b in c.blocks(x.shape[1], 32):
            block = c.f32(x[r, b])
            scale[r, j] = c.byte_up(c.amax_of(block))
            data[r, b] = c.e4m3(np.clip(block * c.inverse(scale[r, j])[:, None], -limit, limit))
    return c.rowwise(data, scale)
