"""Arrays that are right but for a constant, and bias gradients of a part: dropped, doubled, stored, badly added."""

import numpy as np

import refops
from planted import open_common as c
from planted.open_common import BF16, SHAPE, F
from planted.registry import Where, normal, planted

MX = refops.MXFP8Scaling(refops.E4M3)
NV = refops.NVFP4Scaling()
CURRENT = refops.CurrentScaling(refops.E4M3)
ROW, COLUMN, DBIAS, VALUES = ("rowwise",), ("columnwise",), ("dbias",), ("values",)
X = normal(SHAPE)
GRADIENT = c.with_dy(SHAPE)


def cast_in_tiles(v, scale, cast=c.e4m3):
    """Codes of a tensor with one scale, tile by tile."""
    data = np.zeros(v.shape, np.uint8)
    for r, t in c.tiles(v.shape, 32, 128):
        data[r, t] = cast(v[r, t] * F(scale))
    return data


@planted("quantize", X, Where(ROW), CURRENT)
def scale_stored_as_its_inverse(x):
    """The second kernel stores the scale, 448 / amax, in scale_inv; it should store 1 / scale. Data are right."""
    v = c.f32(x)
    amax = max(np.abs(v[r]).max() for _, r in c.blocks(len(v), 32))
    scale = c.tensor_scale(amax)
    return c.rowwise(cast_in_tiles(v, scale), c.one(scale), amax_rowwise=c.one(amax))


@planted("quantize", X, Where(COLUMN), refops.DelayedScaling(refops.E4M3, 48.0))
def columnwise_scale_inv_not_inverted(x):
    """columnwise_scale_inv is the scale, 48, itself; rowwise_scale_inv is 1 / 48, and both should be."""
    v = c.f32(x)
    scale, amax = F(48), np.abs(v).max()
    data = cast_in_tiles(v, scale)
    right = c.rowwise(data, c.one(F(1) / scale), amax_rowwise=c.one(amax))
    return {**right, **c.columnwise(data.T.copy(), c.one(scale), amax_columnwise=c.one(amax))}


@planted("quantize", X, Where(ROW), CURRENT)
def scale_inv_for_limit_240(x):
    """scale_inv is amax / 240, for the limit of the other E4M3, while data are scaled by 448 / amax: scale_inv is
    448/240 times too large."""
    v = c.f32(x)
    amax = np.abs(v).max()
    return c.rowwise(cast_in_tiles(v, c.tensor_scale(amax)), c.one(F(1) / (F(240) / amax)), amax_rowwise=c.one(amax))


@planted("quantize", X, Where(ROW), refops.BlockScaling(refops.E4M3, 1))
def vector_scale_inv_is_scale(x):
    """Blocks of 1x128 store their scale, the power of two that x is multiplied by, instead of its reciprocal."""
    v = c.f32(x)
    data, stored = np.zeros(v.shape, np.uint8), np.zeros((3, len(v)), F)
    for r, b in c.tiles(v.shape, 32, 128):
        scale = c.power_2_scale(c.amax_of(v[r, b]))
        data[r, b] = c.e4m3(v[r, b] * scale[:, None])
        stored[b.start // 128, r] = scale
    return c.rowwise(data, stored)


@planted("quantize", X, Where(ROW), MX)
def byte_of_encode_scale_stored(x):
    """The byte stored is that of the multiplier 2^(127 - byte), 254 - byte, not that of the decode scale."""
    data, stored = c.mx_buffers(x.shape)
    for r, b in c.tiles(x.shape, 32, 32):
        block = c.f32(x[r, b])
        multiplier = c.inverse(c.byte_up(c.amax_of(block)))
        data[r, b] = c.e4m3(block * multiplier[:, None])
        stored[r, b.start // 32] = (multiplier.view(np.uint32) >> np.uint32(23)).astype(np.uint8)
    return c.rowwise(data, stored)


@planted("quantize", X, Where(COLUMN), MX)
def stored_byte_one_too_large(x):
    """Columnwise scale bytes are stored with bias 128 (one too large, twice the scale), while the elements are
    scaled by the right power of two."""
    v = c.f32(x)
    data, stored = c.mx_buffers(v.shape, True)
    for i, r in c.blocks(len(v), 32):
        exponent = c.byte_up(np.abs(v[r]).max(axis=0)).astype(np.int32) - 127
        data[r] = c.e4m3(v[r] * (2.0**-exponent).astype(F))
        stored[i] = (exponent + 128).astype(np.uint8)
    return {**c.mx_rowwise(v), **c.columnwise(data, stored)}


@planted("quantize", X, Where(("amax",)), NV)
def amax_slot_holds_decode_scale(x):
    """The amax slot is given amax / 2688, the tensor's decode scale, where the amax itself belongs."""
    v = c.f32(x)
    amax = np.abs(v).max()
    right = c.nv_rowwise(v, amax)
    right["amax_rowwise"] = c.one(F(1) / c.s_enc(amax))
    return right


@planted("quantize", X, Where(("amax",)), CURRENT)
def amax_slot_holds_scale(x):
    """The amax slot is given the scale 448 / amax where the amax belongs; data and scale_inv are right."""
    v = c.f32(x)
    scale = c.tensor_scale(np.abs(v).max())
    return c.rowwise(cast_in_tiles(v, scale), c.one(F(1) / scale), amax_rowwise=c.one(scale))


@planted("quantize", X, Where(("amax",)), refops.DelayedScaling(refops.E4M3, 32.0))
def amax_of_scaled_values(x):
    """The amax for the history is taken after the multiplication with the scale, 32 times too large; it should be max
    |x|."""
    v = c.f32(x)
    amax, data = F(0), np.zeros(v.shape, np.uint8)
    for r, t in c.tiles(v.shape, 32, 128):
        scaled = v[r, t] * F(32)
        amax = max(amax, np.abs(scaled).max())
        data[r, t] = c.e4m3(scaled)
    return c.rowwise(data, c.one(F(1) / F(32)), amax_rowwise=c.one(amax))


def gelu_gradient(dy, x):
    """float32 gradient of gelu."""
    return c.dgelu(c.f32(x)) * c.f32(dy)


@planted("dgelu", GRADIENT, Where(DBIAS))
def dbias_divided_by_rows(dy, x):
    """dbias is the mean over rows, sum / M; it should be the sum."""
    dx = gelu_gradient(dy, x).astype(BF16)
    total = np.zeros(x.shape[1], F)
    for _, r in c.blocks(len(x), 32):
        total += c.f32(dx[r]).sum(axis=0, dtype=F)
    return {"dx": dx, "dbias": (total * (F(1) / F(len(x)))).astype(BF16)}


@planted("dgelu", GRADIENT, Where(DBIAS))
def dbias_added_by_two_warps(dy, x):
    """Two warps hold the same partial sums after the reduction and both add them to dbias: it is twice the right
    sum."""
    dx = gelu_gradient(dy, x).astype(BF16)
    total = np.zeros(x.shape[1], F)
    for _, r in c.blocks(len(x), 64):
        partial = c.f32(dx[r]).sum(axis=0, dtype=F)
        for _ in range(2):
            total += partial
    return {"dx": dx, "dbias": total.astype(BF16)}


@planted("dsilu", GRADIENT, Where(DBIAS, rows=(192, 223)), MX)
def dbias_drops_last_chunk(dy, x):
    """The number of 64-row chunks is M // 64, rounded down: the last 32 rows are not added to dbias, though they are
    quantized."""
    gradient = c.dsilu(c.f32(x)) * c.f32(dy)
    total = np.zeros(x.shape[1], F)
    for chunk in range(len(x) // 64):
        total += gradient[64 * chunk : 64 * chunk + 64].sum(axis=0, dtype=F)
    return {**c.mx_rowwise(c.bf16(gradient)), "dbias": total.astype(BF16)}


@planted("dgelu", c.with_dy((200, 352)), Where(DBIAS, rows=(136, 191)))
def dbias_counts_overlapping_rows_twice(dy, x):
    """The last chunk of 64 rows starts at M - 64 = 136 so as not to run over the end; rows 136 to 191, which the chunk
    before has too, are added twice to dbias."""
    dx = gelu_gradient(dy, x).astype(BF16)
    total = np.zeros(x.shape[1], F)
    for start in range(0, len(x), 64):
        start = min(start, len(x) - 64)
        total += c.f32(dx[start : start + 64]).sum(axis=0, dtype=F)
    return {"dx": dx, "dbias": total.astype(BF16)}


@planted("dqgelu", GRADIENT, Where(DBIAS))
def dbias_stored_by_last_warp(dy, x):
    """Each warp stores its partial sum of 32 rows in dbias instead of adding it: only the last 32 rows remain."""
    z = F(1.702) * c.f32(x)
    s = c.sigmoid(z)
    dx = ((z * (s * (F(1) - s)) + s) * c.f32(dy)).astype(BF16)
    dbias = np.zeros(x.shape[1], F)
    for _, warp in c.blocks(len(x), 32):
        dbias = c.f32(dx[warp]).sum(axis=0, dtype=F)
    return {"dx": dx, "dbias": dbias.astype(BF16)}


@planted("dgelu", GRADIENT, Where(DBIAS))
def dbias_accumulated_in_bfloat16(dy, x):
    """dbias is accumulated in bfloat16, rounded after each row; it should be accumulated in float32 and rounded
    once."""
    dx = gelu_gradient(dy, x).astype(BF16)
    total = np.zeros(x.shape[1], BF16)
    for row in dx:
        total = (c.f32(total) + c.f32(row)).astype(BF16)
    return {"dx": dx, "dbias": total}


@planted("drelu", GRADIENT, Where(DBIAS))
def dbias_sums_incoming_gradient(dy, x):
    """dbias is the column sum of dy, the gradient before the activation's derivative; it should be that of dx."""
    dx, total = np.zeros(x.shape, BF16), np.zeros(x.shape[1], F)
    for r, t in c.tiles(x.shape, 32, 64):
        g = c.f32(dy[r, t])
        dx[r, t] = np.where(c.f32(x[r, t]) > 0, g, F(0)).astype(BF16)
        total[t] += g.sum(axis=0, dtype=F)
    return {"dx": dx, "dbias": total.astype(BF16)}


@planted("dgelu", GRADIENT, Where(DBIAS), MX)
def dbias_sums_quantized_values(dy, x):
    """dbias adds the values that the codes stand for after the MXFP8 cast; it should add the float32 gradient."""
    gradient = gelu_gradient(dy, x)
    data, scale = c.mx_buffers(x.shape)
    total = np.zeros(x.shape[1], F)
    for r, b in c.tiles(x.shape, 32, 32):
        data[r, b], byte = c.mx_block(c.bf16(gradient[r, b]))
        scale[r, b.start // 32] = byte
        total[b] += (c.e4m3_value(data[r, b]) / c.inverse(byte)[:, None]).sum(axis=0, dtype=F)
    return {**c.rowwise(data, scale), "dbias": total.astype(BF16)}


@planted("quantize", X, Where(DBIAS), MX)
def dbias_of_half_a_warp(x):
    """The shuffle reduction over 32 rows of a warp stops at offset 8: dbias gets the rows of lanes 0 to 15 of each 32
    alone."""
    v = c.f32(x)
    total = np.zeros(v.shape[1], F)
    for _, warp in c.blocks(len(v), 32):
        lanes = v[warp].copy()
        for offset in (8, 4, 2, 1):
            lanes[:-offset] = lanes[:-offset] + lanes[offset:]
        total += lanes[0]
    return {**c.mx_rowwise(v), "dbias": total.astype(BF16)}


@planted("scaled_dswiglu", c.with_row_scales(SHAPE, dy=True), Where(("drow_scales",)))
def drow_scales_of_scaled_output(dy, x, row_scales):
    """drow_scales sums dy times the output that was already multiplied by the row's scale; it should sum dy times the
    unscaled activation, so it is row_scales times too large."""
    act, gate = c.halves(x)
    g, p = c.f32(dy), row_scales[:, None]
    s = c.sigmoid(act)
    dx = np.concatenate([(g * p) * ((s + (act * s) * (F(1) - s)) * gate), (g * p) * (act * s)], axis=1)
    total = np.zeros(len(x), F)
    for _, t in c.blocks(dy.shape[1], 128):
        out = (act[:, t] * s[:, t]) * gate[:, t] * p
        total += (g[:, t] * out).sum(axis=1, dtype=F)
    return {"dx": dx.astype(BF16), "drow_scales": total}


@planted("scaled_swiglu", c.with_row_scales(SHAPE), Where(VALUES))
def row_scale_applied_twice(x, row_scales):
    """Both the activated value and the gate are multiplied by the row's scale, so the output has its square; it should
    be applied once."""
    y = np.zeros((len(x), x.shape[1] // 2), BF16)
    for _, r in c.blocks(len(x), 32):
        act, gate = c.halves(x[r])
        p = row_scales[r, None]
        y[r] = ((c.silu(act) * p) * (gate * p)).astype(BF16)
    return {"y": y}


def stored_mx(rng):
    """A right MXFP8 tensor."""
    return c.mx_rowwise(c.f32(c.draw(rng, SHAPE)))


@planted("dequantize", stored_mx, Where(VALUES), MX)
def decodes_with_bias_126(rowwise_data, rowwise_scale_inv):
    """The decode scale is built as 2^(byte - 126), twice what it should be, 2^(byte - 127)."""
    y = np.zeros(rowwise_data.shape, BF16)
    for r, b in c.tiles(y.shape, 32, 32):
        factor = np.ldexp(F(1), rowwise_scale_inv[r, b.start // 32].astype(np.int32) - 126).astype(F)
        y[r, b] = (c.e4m3_value(rowwise_data[r, b]) * factor[:, None]).astype(BF16)
    return {"y": y}


@planted("quantize", X, Where(COLUMN), refops.NVFP4Scaling(rht=True))
def hadamard_without_normalisation(x):
    """The Hadamard transform is not multiplied by 1/4: the columnwise copy and its amax are those of values four times
    too large."""
    v = c.f32(x)
    y = np.zeros(v.shape, F)
    for r, t in c.tiles(v.shape, 16, 16):
        y[r, t] = c.transform(v[r, t], norm=1.0)
    return {**c.nv_rowwise(v, np.abs(v).max()), **c.nv_columnwise(y, np.abs(y).max())}


@planted("update_delayed_scale", c.histories, Where(("scale",)), params={"fmt": refops.E4M3, "margin": 2})
def margin_multiplies_scale(amax_history, scale):
    """The new scale is 448 * 2^margin / amax; a margin should make it smaller, 448 * 2^-margin / amax."""
    history, new_scale = np.zeros_like(amax_history), scale.copy()
    for tensor in range(len(scale)):
        column = amax_history[:, tensor]
        new_scale[tensor] = F(448) * F(2.0**2) / column.max()
        history[:-1, tensor], history[-1, tensor] = column[1:], column[0]
        history[0, tensor] = 0
    return {"amax_history": history, "scale": new_scale}


@planted("quantize", X, Where(ROW), refops.BlockScaling(refops.E4M3, 2))
def square_scale_inv_divided_by_limit(x):
    """scale_inv of a 128x128 tile is 1 / (scale * 448); the limit is divided out twice, it should be 1 / scale."""
    v = c.f32(x)
    data, scale_inv = np.zeros(v.shape, np.uint8), np.zeros((2, 3), F)
    for r, t in c.tiles(v.shape, 128, 128):
        scale = c.power_2_scale(np.abs(v[r, t]).max())
        data[r, t] = c.e4m3(v[r, t] * scale)
        scale_inv[r.start // 128, t.start // 128] = F(1) / (scale * F(448))
    return c.rowwise(data, scale_inv)


@planted("dsilu", GRADIENT, Where(DBIAS), CURRENT)
def dbias_in_units_of_fp8(dy, x):
    """dbias sums the gradient after it was multiplied by the scale of the cast; the scale should be divided out,
    dbias is 448 / amax times too large."""
    gradient = c.dsilu(c.f32(x)) * c.f32(dy)
    amax = np.abs(gradient).max()
    scale, rounded = c.tensor_scale(amax), c.bf16(gradient)
    data, total = np.zeros(x.shape, np.uint8), np.zeros(x.shape[1], F)
    for r, t in c.tiles(x.shape, 32, 64):
        scaled = rounded[r, t] * scale
        data[r, t] = c.e4m3(scaled)
        total[t] += scaled.sum(axis=0, dtype=F)
    return {**c.rowwise(data, c.one(F(1) / scale), amax_rowwise=c.one(amax)), "dbias": total.astype(BF16)}
