"""Fused kernels, activations and gradients that are quantized, and the smaller slips of all kinds."""

import numpy as np

import refops
from planted import open_common as c
from planted.open_common import BF16, SHAPE, F
from planted.registry import Where, normal, planted

MX = refops.MXFP8Scaling(refops.E4M3)
NV = refops.NVFP4Scaling()
CURRENT = refops.CurrentScaling(refops.E4M3)
ROW, COLUMN, VALUES, DBIAS = ("rowwise",), ("columnwise",), ("values",), ("dbias",)
X, GATED = normal(SHAPE), normal((224, 704))
GRADIENT, GATED_GRADIENT = c.with_dy(SHAPE), c.with_dy(SHAPE, gated=True)


def gelu_gradient(dy, x):
    """float32 gradient of gelu."""
    return c.dgelu(c.f32(x)) * c.f32(dy)


@planted("gelu", X, Where(ROW), NV)
def fp4_amax_of_rounded_activation(x):
    """The tensor's amax is that of gelu rounded to bfloat16; with NVFP4 it should be that of the float32 result, whose
    cast alone is of the rounded one."""
    y, amax = np.zeros(x.shape, F), F(0)
    for r, t in c.tiles(x.shape, 32, 64):
        y[r, t] = c.bf16(c.gelu(c.f32(x[r, t])))
        amax = max(amax, y[r, t].max(), -y[r, t].min())
    return c.nv_rowwise(y, amax)


@planted("swiglu", GATED, Where(ROW), CURRENT)
def current_scaling_casts_unrounded_activation(x):
    """The second kernel recomputes swiglu and casts the float32 result; with current scaling the result that was
    rounded to bfloat16 should be cast."""
    act, gate = c.halves(x)
    amax = max(np.abs(c.silu(act[r]) * gate[r]).max() for _, r in c.blocks(len(x), 32))
    scale, data = c.tensor_scale(amax), np.zeros(act.shape, np.uint8)
    for r, t in c.tiles(act.shape, 32, 64):
        data[r, t] = c.e4m3((c.silu(act[r, t]) * gate[r, t]) * scale)
    return c.rowwise(data, c.one(F(1) / scale), amax_rowwise=c.one(amax))


@planted("dswiglu", GATED_GRADIENT, Where(COLUMN, columns=(352, 703)), MX)
def columnwise_gate_half_from_d_act(dy, x):
    """The columnwise copy of the gate half of [d_act | d_gate] is quantized from the shared tile of d_act; it should be
    from that of d_gate. Rowwise is right."""
    act, gate = c.halves(x)
    g, h = c.f32(dy), dy.shape[1]
    d_act, d_gate = c.bf16(c.dsilu(act) * g * gate), c.bf16(g * c.silu(act))
    data, scale = c.mx_buffers(x.shape, True)
    for r, t in c.tiles(dy.shape, 32, 32):
        shared = d_act[r, t]
        for offset in (0, h):
            columns = slice(offset + t.start, offset + t.stop)
            codes, scale[r.start // 32, columns] = c.mx_block(shared.T)
            data[r, columns] = codes.T
    return {**c.mx_rowwise(np.concatenate([d_act, d_gate], axis=1)), **c.columnwise(data, scale)}


@planted("dgelu", GRADIENT, Where((*ROW, *DBIAS), rows=(64, 95)), MX)
def dy_of_tile_before_in_one_tile(dy, x):
    """The asynchronous copy of dy for the third tile of 32 rows has not arrived when it is read: rows 64 to 95 use
    dy of rows 32 to 63, in the data and in dbias."""
    shared, gradient = np.zeros((32, x.shape[1]), F), np.zeros(x.shape, F)
    for tile, r in c.blocks(len(x), 32):
        if tile != 2:
            shared = c.f32(dy[r])
        gradient[r] = c.dgelu(c.f32(x[r])) * shared
    return {**c.mx_rowwise(c.bf16(gradient)), "dbias": c.column_sum(gradient).astype(BF16)}


@planted("dgelu", GRADIENT, Where(DBIAS), MX)
def fused_dbias_of_bfloat16_gradient(dy, x):
    """dbias adds gradients that were rounded to bfloat16 for the cast; fused with MXFP8 it should add the float32
    ones."""
    total, (data, scale) = np.zeros(x.shape[1], F), c.mx_buffers(x.shape)
    for r, t in c.tiles(x.shape, 32, 32):
        rounded = c.bf16(c.dgelu(c.f32(x[r, t])) * c.f32(dy[r, t]))
        data[r, t], scale[r, t.start // 32] = c.mx_block(rounded)
        total[t] += rounded.sum(axis=0, dtype=F)
    return {**c.rowwise(data, scale), "dbias": total.astype(BF16)}


@planted("dgelu", c.with_dy((256, 512)), Where(DBIAS, columns=(480, 511)))
def dbias_of_last_columns_not_written(dy, x):
    """The kernel that adds the partial sums has one thread less than it needs warps: dbias of columns 480 to 511 stays
    zero."""
    dx = gelu_gradient(dy, x).astype(BF16)
    partial = np.stack([c.f32(dx[r]).sum(axis=0, dtype=F) for _, r in c.blocks(len(x), 32)])
    dbias = np.zeros(x.shape[1], BF16)
    for warp in range(x.shape[1] // 32 - 1):
        columns = slice(32 * warp, 32 * warp + 32)
        dbias[columns] = partial[:, columns].sum(axis=0, dtype=F).astype(BF16)
    return {"dx": dx, "dbias": dbias}


@planted("dgelu", GRADIENT, Where(DBIAS, every=("column", 2, (0, 1))))
def dbias_of_column_pairs_exchanged(dy, x):
    """Sums of two columns are packed in a bfloat16x2 with .x and .y exchanged: dbias of columns 2 j and 2 j + 1 are
    exchanged."""
    dx = gelu_gradient(dy, x).astype(BF16)
    total = c.column_sum(c.f32(dx))
    dbias = np.zeros(x.shape[1], BF16)
    for lane in range(x.shape[1] // 2):
        low, high = total[2 * lane], total[2 * lane + 1]
        dbias[2 * lane : 2 * lane + 2] = np.array([high, low], F).astype(BF16)
    return {"dx": dx, "dbias": dbias}


@planted("dgelu", GRADIENT, Where(DBIAS, rows=(0, 31)))
def dbias_starts_from_second_chunk(dy, x):
    """The accumulator of dbias is cleared after the first 32 rows were added to it, so they are missing."""
    dx = gelu_gradient(dy, x).astype(BF16)
    total = np.zeros(x.shape[1], F)
    for chunk, r in c.blocks(len(x), 32):
        total += c.f32(dx[r]).sum(axis=0, dtype=F)
        if chunk == 0:
            total[:] = 0
    return {"dx": dx, "dbias": total.astype(BF16)}


@planted("silu", X, Where(COLUMN, columns=(256, 351)), refops.BlockScaling(refops.E4M3, 2))
def transposed_partial_tile_not_transposed_back(x):
    """In the last, partial tile of 128 columns the shared tile is written to the columnwise copy by rows without the
    transpose, as many as fit: element (i, j) of a 96x96 part lands at (j, i)."""
    v = c.bf16(c.silu(c.f32(x)))
    data, scale_inv = c.square_tiles(v)
    out = np.zeros(v.shape[::-1], np.uint8)
    for r, t in c.tiles(v.shape, 128, 128):
        tile = data[r, t].T.copy()
        if t.stop - t.start < 128:
            side = min(tile.shape)
            tile[:side, :side] = tile[:side, :side].T
        out[t, r] = tile
    return {**c.rowwise(data, scale_inv), **c.columnwise(out, scale_inv.T.copy())}


@planted("quantize", X, Where(ROW, rows=(160, 223)), refops.BlockScaling(refops.E4M3, 1))
def last_expert_uses_scale_of_row_before(x):
    """In the rows of the last expert, 160 to 223, the row index of the scale is one too small when data are scaled: row
    i is cast with the scale of row i - 1. Stored scales are right."""
    v = c.f32(x)
    data, scale_inv = np.zeros(v.shape, np.uint8), np.zeros((3, len(v)), F)
    for j, b in c.blocks(v.shape[1], 128):
        scale = c.power_2_scale(c.amax_of(v[:, b]))
        scale_inv[j] = F(1) / scale
        for first, last in ((0, 64), (64, 96), (96, 160), (160, 224)):
            rows = np.arange(first, last) - (1 if last == 224 else 0)
            data[first:last, b] = c.e4m3(v[first:last, b] * scale[rows, None])
    return c.rowwise(data, scale_inv)


@planted("quantize", X, Where(COLUMN, every=("row", 32, tuple(range(16, 32)))), refops.NVFP4Scaling(two_d=True))
def columnwise_squares_of_odd_tiles_repeat_even_ones(x):
    """The columnwise byte of odd tile rows is read from the register of the even tile above (unrolled by two, one
    register); codes and rowwise scales are right."""
    v = c.f32(x)
    amax = np.abs(v).max()
    codes, scale = c.nv_square(v, amax)
    t_scale = np.zeros((v.shape[1], v.shape[0] // 16), np.uint8)
    for i in range(0, v.shape[0] // 16, 2):
        register = scale[i]
        for step in range(2):
            t_scale[:, i + step] = np.repeat(register, 16)
    return {
        **c.rowwise(c.pack(codes), np.repeat(scale, 16, axis=0), amax_rowwise=c.one(amax)),
        **c.columnwise(c.pack(codes.T), t_scale, amax_columnwise=c.one(amax)),
    }


@planted("quantize", normal((96, 256)), Where(ROW, rows=(64, 95)), MX)
def last_tile_left_uninitialised(x):
    """The grid has M // 64 blocks of rows, rounded down: rows 64 to 95 are never written and hold what the allocator
    left, the bytes 0xAA, data and scales."""
    data, scale = np.full(x.shape, 0xAA, np.uint8), np.full((96, 8), 0xAA, np.uint8)
    for block in range(len(x) // 64):
        r = slice(64 * block, 64 * block + 64)
        for j, b in c.blocks(x.shape[1], 32):
            data[r, b], scale[r, j] = c.mx_block(c.f32(x[r, b]))
    return c.rowwise(data, scale)


@planted("gelu", normal((200, 344)), Where(VALUES, rows=(192, 199), columns=(320, 343)))
def corner_tile_not_written(x):
    """A tile that is partial in both directions is skipped: rows 192 to 199 of columns 320 to 343 stay zero."""
    y = np.zeros(x.shape, BF16)
    for r, t in c.tiles(x.shape, 64, 64):
        if r.stop - r.start < 64 and t.stop - t.start < 64:
            continue
        y[r, t] = c.gelu(c.f32(x[r, t])).astype(BF16)
    return {"y": y}


@planted("qgeglu", GATED, Where(VALUES, every=("row", 4, (3,))))
def fourth_row_of_unrolled_loop_uses_gate_of_third(x):
    """The loop over rows is unrolled by four and the fourth copy multiplies by the gate of the third row."""
    act, gate = c.halves(x)
    y = np.zeros(act.shape, BF16)
    for row in range(0, len(x), 4):
        g0, g1, g2, g3 = gate[row : row + 4]
        for step, g in enumerate((g0, g1, g2, g2)):
            y[row + step] = (c.qgelu(act[row + step]) * g).astype(BF16)
        del g3
    return {"y": y}


@planted("reglu", normal((256, 1024)), Where(VALUES, rows=(128, 255), columns=(256, 511)))
def second_cluster_reads_act_for_gate(x):
    """The CTA at (1, 1) of a 2x2 grid computes the address of gate without the offset H: relu(act) * act."""
    h = x.shape[1] // 2
    y = np.zeros((len(x), h), BF16)
    for r, t in c.tiles(y.shape, 128, 256):
        offset = 0 if (r.start, t.start) == (128, 256) else h
        act, gate = c.f32(x[r, t]), c.f32(x[r, offset + t.start : offset + t.stop])
        y[r, t] = (np.maximum(act, F(0)) * gate).astype(BF16)
    return {"y": y}


@planted("scaled_dswiglu", c.with_row_scales(SHAPE, dy=True), Where(("drow_scales",), columns=(128, 255)))
def drow_scales_drop_second_chunk(dy, x, row_scales):
    """The sum over a row goes in chunks of 128 columns; the second chunk's store overwrites a register that the third
    one starts from anew: columns 128 to 255 are missing in drow_scales."""
    act, gate = c.halves(x)
    g, p = c.f32(dy), row_scales[:, None]
    s = c.sigmoid(act)
    dx = np.concatenate([(g * p) * ((s + (act * s) * (F(1) - s)) * gate), (g * p) * (act * s)], axis=1)
    partial = [(g[:, t] * ((act[:, t] * s[:, t]) * gate[:, t])).sum(axis=1, dtype=F) for _, t in c.blocks(352, 128)]
    total = partial[0] + partial[2]
    return {"dx": dx.astype(BF16), "drow_scales": total}


@planted("scaled_dswiglu", c.with_row_scales(SHAPE, dy=True), Where(VALUES, columns=(352, 703)))
def d_gate_without_row_scale(dy, x, row_scales):
    """d_gate is dy silu(act); it should be multiplied by the row's scale as d_act is."""
    act, gate = c.halves(x)
    g, p = c.f32(dy), row_scales[:, None]
    s = c.sigmoid(act)
    dx = np.zeros(x.shape, BF16)
    total = np.zeros(len(x), F)
    for _, t in c.blocks(352, 32):
        a, sig, b = act[:, t], s[:, t], gate[:, t]
        dx[:, t] = ((g[:, t] * p) * ((sig + (a * sig) * (F(1) - sig)) * b)).astype(BF16)
        dx[:, 352 + t.start : 352 + t.stop] = (g[:, t] * (a * sig)).astype(BF16)
        total += (g[:, t] * ((a * sig) * b)).sum(axis=1, dtype=F)
    return {"dx": dx, "drow_scales": total}


@planted("quantize", X, Where(ROW), NV)
def block_scale_divided_in_other_order(x):
    """The block scale is E4M3(block amax / 6 * S_enc); the order is amax * (S_enc * (1/6)), another float32 number that
    now and then rounds to another byte. Here the division is by an approximate reciprocal of 6 in bfloat16."""
    v = c.f32(x)
    amax = np.abs(v).max()
    s, sixth = c.s_enc(amax), c.bf16(c.one(F(1) / F(6)))[0]
    codes, scale = c.nv_buffers(v.shape)
    for r, t in c.tiles(v.shape, 32, 16):
        byte = c.e4m3((c.amax_of(v[r, t]) * sixth) * s)
        scale[r, t.start // 16] = byte
        codes[r, t] = c.e2m1(v[r, t] * c.nv_multiplier(byte, s)[:, None])
    return c.rowwise(c.pack(codes), scale, amax_rowwise=c.one(amax))


@planted("quantize", X, Where(COLUMN), refops.NVFP4Scaling(rht=True))
def hadamard_stages_in_bfloat16(x):
    """Each of the four butterfly stages of the Hadamard transform rounds to bfloat16; it should round once, at the
    end."""
    v = c.f32(x)
    y = np.zeros(v.shape, F)
    for r, t in c.tiles(v.shape, 16, 64):
        values = v[r, t] * c.SIGNS[:, None].astype(F)
        for stride in (1, 2, 4, 8):
            lane = np.arange(16)
            other = values[lane ^ stride]
            values = c.bf16(np.where((lane & stride)[:, None] == 0, values + other, other - values))
        y[r, t] = values * F(0.25)
    return {**c.nv_rowwise(v, np.abs(v).max()), **c.nv_columnwise(y, np.abs(y).max())}


@planted("quantize", X, Where(COLUMN), refops.NVFP4Scaling(rht=True))
def hadamard_of_signs_after_transform(x):
    """The random signs multiply the result of the Hadamard transform; they should multiply its input."""
    v = c.f32(x)
    y = np.zeros(v.shape, F)
    for r, t in c.tiles(v.shape, 16, 64):
        y[r, t] = c.transform(v[r, t], signs=np.ones(16)) * c.SIGNS[:, None].astype(F)
    return {**c.nv_rowwise(v, np.abs(v).max()), **c.nv_columnwise(y, np.abs(y).max())}


@planted("quantize", X, Where(ROW), refops.NVFP4Scaling(four_over_six="mae", e4m3_max=256))
def four_over_six_always_six(x):
    """Only the candidate that maps a block's maximum to 6 is computed; the one that maps it to 4 should be taken where
    its error is smaller."""
    v = c.f32(x)
    amax = np.abs(v).max()
    s = F(256 * 6) / amax
    codes, scale = c.nv_buffers(v.shape)
    for r, t in c.tiles(v.shape, 32, 16):
        byte = c.e4m3((c.amax_of(v[r, t]) / F(6)) * s)
        scale[r, t.start // 16] = byte
        codes[r, t] = c.e2m1(v[r, t] * c.nv_multiplier(byte, s)[:, None])
    return c.rowwise(c.pack(codes), scale, amax_rowwise=c.one(amax))
