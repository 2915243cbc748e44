"""Precision and bits: half where float32 belongs, roundings too many or too few, carries, signs, bytes, dtypes."""

import ml_dtypes
import numpy as np

import refops
from planted import open_common as c
from planted.open_common import BF16, SHAPE, F
from planted.registry import Where, normal, planted

MX = refops.MXFP8Scaling(refops.E4M3)
MX_E5M2 = refops.MXFP8Scaling(refops.E5M2)
NV = refops.NVFP4Scaling()
ROW, COLUMN, VALUES = ("rowwise",), ("columnwise",), ("values",)
X, GATED = normal(SHAPE), normal((224, 704))


def mx_tiles(shape, read, block=c.mx_block):
    """A rowwise MXFP8 kernel of 32x32 tiles: `read` loads a tile in float32, `block` scales and casts it."""
    data, scale = c.mx_buffers(shape)
    for r, t in c.tiles(shape, 32, 32):
        data[r, t], scale[r, t.start // 32] = block(read(r, t))
    return c.rowwise(data, scale)


def nv_tiles(x, block, tensor=c.s_enc):
    """A rowwise NVFP4 kernel of 32x16 tiles: `block` scales and casts a tile, given S_enc."""
    v = c.f32(x)
    amax = np.abs(v).max()
    s = tensor(amax)
    codes, scale = c.nv_buffers(v.shape)
    for r, t in c.tiles(v.shape, 32, 16):
        codes[r, t], scale[r, t.start // 16] = block(v[r, t], s)
    return c.rowwise(c.pack(codes), scale, amax_rowwise=c.one(amax))


def fp8_tiles(x, scale, activation, cast=c.e4m3):
    """A rowwise kernel of delayed scaling, tile by tile."""
    data, amax = np.zeros(x.shape, np.uint8), F(0)
    for r, t in c.tiles(x.shape, 32, 64):
        y = activation(c.f32(x[r, t]))
        amax = max(amax, np.abs(y).max())
        data[r, t] = cast(y * F(scale))
    return c.rowwise(data, c.one(F(1) / F(scale)), amax_rowwise=c.one(amax))


@planted("silu", X, Where(VALUES))
def sigmoid_in_half(x):
    """The sigmoid is rounded to half before it multiplies x; it should stay in float32."""
    y = np.zeros(x.shape, BF16)
    for r, t in c.tiles(x.shape, 32, 64):
        v = c.f32(x[r, t])
        y[r, t] = (v * c.fp16(c.sigmoid(v))).astype(BF16)
    return {"y": y}


@planted("swiglu", GATED, Where(ROW), MX)
def exponential_in_bfloat16(x):
    """e^-x is computed by ex2.approx.bf16, rounded to bfloat16, before 1 is added; it should be float32."""
    act, gate = c.halves(x)

    def read(r, t):
        power = c.bf16(c.exp(-act[r, t]))
        return c.bf16(act[r, t] * (F(1) / (F(1) + power)) * gate[r, t])

    return mx_tiles(act.shape, read)


@planted("gelu", X, Where(VALUES))
def tanh_of_bfloat16_argument(x):
    """tanh's argument is rounded to bfloat16 (tanh.approx.bf16x2 takes it so); it should stay in float32."""
    y = np.zeros(x.shape, BF16)
    for r, t in c.tiles(x.shape, 32, 64):
        v = c.f32(x[r, t])
        u = c.bf16(v * (c.LINEAR + (c.CUBIC * v) * v))
        y[r, t] = (v * (F(0.5) + F(0.5) * c.tanh(u))).astype(BF16)
    return {"y": y}


@planted("dgelu", c.with_dy(SHAPE), Where(VALUES))
def tanh_in_half(dy, x):
    """tanh is computed in half (tanh.approx.f16x2) in gelu's derivative, argument and result; 1 - t^2 loses what is
    left. It should be float32."""
    dx = np.zeros(x.shape, BF16)
    for r, t in c.tiles(x.shape, 32, 64):
        v = c.f32(x[r, t])
        th = c.fp16(c.tanh(c.fp16((c.LINEAR * v) * (F(1) + (c.RATIO * v) * v))))
        slope = (F(0.5) * v) * ((F(1) - th * th) * (c.LINEAR + (c.SLOPE * v) * v)) + F(0.5) * (F(1) + th)
        dx[r, t] = (slope * c.f32(dy[r, t])).astype(BF16)
    return {"dx": dx}


@planted("dswiglu", c.with_dy(SHAPE, gated=True), Where(VALUES, columns=(0, 351)))
def slope_of_silu_in_bfloat16(dy, x):
    """silu'(act) is rounded to bfloat16 before it is multiplied by dy and gate, in d_act; d_gate is right."""
    h = dy.shape[1]
    dx = np.zeros(x.shape, BF16)
    for r, t in c.tiles(dy.shape, 32, 32):
        gate = slice(h + t.start, h + t.stop)
        g, act = c.f32(dy[r, t]), c.f32(x[r, t])
        dx[r, t] = (c.bf16(c.dsilu(act)) * g * c.f32(x[r, gate])).astype(BF16)
        dx[r, gate] = (g * c.silu(act)).astype(BF16)
    return {"dx": dx}


@planted("swiglu", GATED, Where(VALUES))
def activated_half_rounded_before_gate(x):
    """silu(act) is stored in a bfloat16 register array before it is multiplied by the gate: one rounding too many."""
    h = x.shape[1] // 2
    y = np.zeros((len(x), h), BF16)
    for r, t in c.tiles(y.shape, 32, 32):
        activated = c.silu(c.f32(x[r, t])).astype(BF16)
        y[r, t] = (c.f32(activated) * c.f32(x[r, h + t.start : h + t.stop])).astype(BF16)
    return {"y": y}


@planted("scaled_swiglu", c.with_row_scales(SHAPE), Where(VALUES))
def output_rounded_before_row_scale(x, row_scales):
    """The activation is rounded to bfloat16 and then multiplied by the row's scale; it should be rounded once,
    after."""
    y = np.zeros((len(x), x.shape[1] // 2), BF16)
    for _, r in c.blocks(len(x), 32):
        act, gate = c.halves(x[r])
        y[r] = (c.bf16(c.silu(act) * gate) * row_scales[r, None]).astype(BF16)
    return {"y": y}


@planted("scaled_swiglu", c.with_row_scales(SHAPE), Where(VALUES))
def row_scale_in_bfloat16(x, row_scales):
    """The float32 row scales are converted to bfloat16 when they are loaded; they should stay in float32."""
    y = np.zeros((len(x), x.shape[1] // 2), BF16)
    for _, r in c.blocks(len(x), 32):
        act, gate = c.halves(x[r])
        y[r] = (c.silu(act) * gate * c.bf16(row_scales[r, None])).astype(BF16)
    return {"y": y}


@planted("quantize", X, Where(ROW), NV)
def block_scale_in_e5m2(x):
    """The block scale is cast and stored in E5M2; its format is E4M3."""

    def block(tile, s):
        byte = c.e5m2(c.amax_of(tile) * (s * (F(1) / F(6))))
        value = byte.view(ml_dtypes.float8_e5m2).astype(F)
        return c.e2m1(tile * (F(1) / (value * (F(1) / s)))[:, None]), byte

    return nv_tiles(x, block)


@planted("quantize", X, Where(ROW), NV)
def sign_of_low_nibble_in_high(x):
    """Codes are signed 8-bit numbers when they are joined, (high << 4) | low: the sign of a negative low code is
    extended and sets all bits of the high nibble."""
    v = c.f32(x)
    amax = np.abs(v).max()
    data, scale = np.zeros((len(v), v.shape[1] // 2), np.uint8), np.zeros((len(v), v.shape[1] // 16), np.uint8)
    for j, b in c.blocks(v.shape[1], 16):
        codes, scale[:, j] = c.nv_block(v[:, b], c.s_enc(amax))
        signed = ((codes.astype(np.int16) ^ 8) - 8).astype(np.int8)
        word = (signed[:, 1::2].astype(np.int32) << 4) | signed[:, 0::2].astype(np.int32)
        data[:, b.start // 2 : b.stop // 2] = word.astype(np.uint8)
    return c.rowwise(data, scale, amax_rowwise=c.one(amax))


@planted("quantize", X, Where(COLUMN), MX)
def columnwise_copy_of_dequantized_rowwise(x):
    """The columnwise copy is quantized from the values that the rowwise codes stand for; it should come from x."""
    right = c.mx_rowwise(c.f32(x))
    data, scale = c.mx_buffers(x.shape, True)
    for r, t in c.tiles(x.shape, 32, 32):
        byte = right["rowwise_scale_inv"][r, t.start // 32]
        values = c.e4m3_value(right["rowwise_data"][r, t]) / c.inverse(byte)[:, None]
        codes, scale[r.start // 32, t] = c.mx_block(values.T)
        data[r, t] = codes.T
    return {**right, **c.columnwise(data, scale)}


@planted("quantize", X, Where(COLUMN), NV)
def columnwise_fp4_of_dequantized_rowwise(x):
    """The columnwise copy is quantized from the dequantized rowwise one (x was overwritten in shared memory); it should
    come from x, with x's amax."""
    v = c.f32(x)
    amax = np.abs(v).max()
    right = c.nv_rowwise(v, amax)
    codes = c.unpack(right["rowwise_data"])
    t_codes, t_scale = c.nv_buffers(v.T.shape)
    for r, t in c.tiles(v.shape, 16, 16):
        factor = c.e4m3_value(right["rowwise_scale_inv"][r, t.start // 16]) / c.s_enc(amax)
        shared = c.e2m1_value(codes[r, t]) * factor[:, None]
        t_codes[t, r], t_scale[t, r.start // 16] = c.nv_block(shared.T, c.s_enc(amax))
    return {**right, **c.columnwise(c.pack(t_codes), t_scale, amax_columnwise=c.one(amax))}


@planted("quantize", X, Where(ROW), MX)
def mantissa_carry_lost(x):
    """A cast by hand rounds the mantissa to 3 bits and masks it with 7: where it rounds up to 8 the carry into the
    exponent is lost, and 1.96 becomes 1 instead of 2."""

    def block(tile):
        byte = c.byte_up(c.amax_of(tile))
        scaled = tile * c.inverse(byte)[:, None]
        bits = scaled.view(np.uint32)
        exponent = (bits >> np.uint32(23) & np.uint32(0xFF)).astype(np.int32) - 120
        half_even = np.uint32(0x7FFFF) + (bits >> np.uint32(20) & np.uint32(1))
        mantissa = ((bits & np.uint32(0x7FFFFF)) + half_even >> np.uint32(20)) & np.uint32(7)
        code = (bits >> np.uint32(31) << np.uint32(7)) | (exponent.clip(0).astype(np.uint32) << np.uint32(3)) | mantissa
        return np.where(exponent > 0, code.astype(np.uint8), c.e4m3(scaled)), byte

    return mx_tiles(x.shape, lambda r, t: c.f32(x[r, t]), block)


@planted("quantize", X, Where(ROW), MX)
def byte_without_exponent_of_format(x):
    """The scale byte is floor(log2 amax) + 127: the exponent of E4M3's largest value, 8, is not taken off, and elements
    use a fraction of the format's range."""

    def block(tile):
        byte = (c.amax_of(tile).view(np.uint32) >> np.uint32(23)).astype(np.uint8)
        return c.e4m3(tile * c.inverse(byte)[:, None]), byte

    return mx_tiles(x.shape, lambda r, t: c.f32(x[r, t]), block)


@planted("quantize", X, Where(ROW), MX_E5M2)
def e5m2_with_exponent_of_e4m3(x):
    """The scale byte of an E5M2 tensor is computed with the limit of E4M3, 448; it should be 57344."""

    def block(tile):
        byte = c.byte_up(c.amax_of(tile), 448)
        return c.e5m2(tile * c.inverse(byte)[:, None]), byte

    return mx_tiles(x.shape, lambda r, t: c.f32(x[r, t]), block)


@planted("silu", X, Where(ROW), MX)
def activation_not_rounded_before_mxfp8(x):
    """silu's float32 result is quantized; it should be rounded to bfloat16 first, MXFP8 quantizes what would be
    stored."""
    return mx_tiles(x.shape, lambda r, t: c.silu(c.f32(x[r, t])))


@planted("silu", X, Where(ROW), refops.DelayedScaling(refops.E4M3, 50.0))
def activation_rounded_before_delayed_cast(x):
    """silu's result is rounded to bfloat16 before amax and cast; delayed scaling takes the float32 result."""
    return fp8_tiles(x, 50, lambda v: c.bf16(c.silu(v)))


@planted("dgelu", c.with_dy(SHAPE), Where(("dbias",)), MX)
def dbias_of_rounded_gradient(dy, x):
    """dbias adds gradients that were rounded to E5M2 for the cast of another recipe; it should add float32 values."""
    total, data = np.zeros(x.shape[1], F), c.mx_buffers(x.shape)
    for r, t in c.tiles(x.shape, 32, 32):
        gradient = c.dgelu(c.f32(x[r, t])) * c.f32(dy[r, t])
        data[0][r, t], data[1][r, t.start // 32] = c.mx_block(c.bf16(gradient))
        total[t] += c.e5m2(gradient).view(ml_dtypes.float8_e5m2).astype(F).sum(axis=0, dtype=F)
    return {**c.rowwise(*data), "dbias": total.astype(BF16)}


@planted("relu", X, Where(VALUES))
def bfloat16_read_as_half(x):
    """The bits of bfloat16 inputs are taken for half (wrong dtype of the template), relu is applied and stored as
    bfloat16."""
    y = np.zeros(x.shape, BF16)
    for r, t in c.tiles(x.shape, 32, 64):
        v = np.ascontiguousarray(x[r, t]).view(np.float16).astype(F)
        y[r, t] = np.maximum(v, F(0)).astype(BF16)
    return {"y": y}


@planted("quantize", X, Where(ROW), refops.DelayedScaling(refops.E4M3, 40.0))
def codes_of_the_fnuz_format(x):
    """Elements are cast to E4M3 FNUZ, whose bias is 8, the FP8 of other hardware; it should be E4M3 with bias 7. The
    same bits stand for half the value."""
    fnuz = ml_dtypes.float8_e4m3fnuz
    return fp8_tiles(x, 40, lambda v: v, lambda v: np.clip(v, F(-240), F(240)).astype(fnuz).view(np.uint8))


@planted("quantize", X, Where(ROW), refops.BlockScaling(refops.E4M3, 1))
def vector_cast_toward_zero(x):
    """Elements are cast to E4M3 by dropping mantissa bits, rounding toward zero; it should be to nearest even."""
    v = c.f32(x)
    data, scale_inv = np.zeros(v.shape, np.uint8), np.zeros((3, len(v)), F)
    for r, b in c.tiles(v.shape, 32, 128):
        scale = c.power_2_scale(c.amax_of(v[r, b]))
        scale_inv[b.start // 128, r] = F(1) / scale
        data[r, b] = c.truncate_e4m3(v[r, b] * scale[:, None])
    return c.rowwise(data, scale_inv)


@planted("quantize", X, Where(ROW), refops.DelayedScaling(refops.E4M3, 300.0))
def overflow_becomes_nan(x):
    """The cast does not saturate: scaled elements above 448 become NaN (cvt without satfinite); they should be 448."""
    return fp8_tiles(x, 300, lambda v: v, lambda v: v.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


@planted("quantize", X, Where(ROW), refops.DelayedScaling(refops.E5M2, 40.0))
def e5m2_by_way_of_e4m3(x):
    """Elements are rounded to E4M3 and then to E5M2, two roundings (ties go wrong); they should be cast once."""

    def cast(v):
        return c.e5m2(c.e4m3_value(c.e4m3(v)))

    return fp8_tiles(x, 40, lambda v: v, cast)


@planted("quantize", X, Where(ROW), NV)
def scaled_elements_in_half(x):
    """Block multipliers and products are kept in half before the E2M1 cast; they should be float32."""

    def block(tile, s):
        byte = c.nv_byte(c.amax_of(tile), s)
        multiplier = c.fp16(c.nv_multiplier(byte, s))
        return c.e2m1(c.fp16(tile * multiplier[:, None])), byte

    return nv_tiles(x, block)


@planted("quantize", X, Where(ROW), NV)
def tensor_scale_in_bfloat16(x):
    """S_enc is kept in bfloat16 between the two kernels, so block scales and multipliers come from a rounded one; it
    should be float32."""
    return nv_tiles(x, c.nv_block, lambda amax: c.bf16(c.one(c.s_enc(amax)))[0])


@planted("quantize", X, Where(ROW), NV)
def fp4_rounded_as_integers(x):
    """Scaled magnitudes are rounded to the nearest integer code on a linear grid (x * 7/6), not to E2M1's values
    0, 0.5, 1, 1.5, 2, 3, 4, 6."""

    def block(tile, s):
        byte = c.nv_byte(c.amax_of(tile), s)
        scaled = tile * c.nv_multiplier(byte, s)[:, None]
        magnitude = np.minimum(np.rint(np.abs(scaled) * F(7 / 6)), 7).astype(np.uint8)
        return magnitude | np.signbit(scaled).astype(np.uint8) << np.uint8(3), byte

    return nv_tiles(x, block)


def on_ties(rng):
    """Numbers on E2M1's midpoints once scaled: blocks whose largest element is 6."""
    grid = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.5, 3.0])
    x = rng.choice(grid, SHAPE) * rng.choice([-1, 1], SHAPE)
    x[:, ::16] = 6
    return {"x": x.astype(BF16)}


@planted("quantize", on_ties, Where(ROW), NV)
def fp4_ties_away_from_zero(x):
    """Ties between two E2M1 values go to the larger magnitude (a chain of >= comparisons); they should go to the even
    code."""
    midpoints = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], F)

    def block(tile, s):
        byte = c.nv_byte(c.amax_of(tile), s)
        scaled = tile * c.nv_multiplier(byte, s)[:, None]
        code = np.zeros(tile.shape, np.uint8)
        for midpoint in midpoints:
            code += (np.abs(scaled) >= midpoint).astype(np.uint8)
        return code | np.signbit(scaled).astype(np.uint8) << np.uint8(3), byte

    return nv_tiles(x, block)


def exact_powers(rng):
    """Blocks whose amax is 448 times a power of two, every second one."""
    x = np.clip(rng.standard_normal(SHAPE), -1.5, 1.5)
    x[:, ::64] = 1.75
    return {"x": x.astype(BF16)}


@planted("quantize", exact_powers, Where(ROW), MX)
def exact_power_rounded_up_too(x):
    """The byte is the exponent of amax / 448 plus 1 always; where the quotient is a power of two it should not be
    raised."""

    def block(tile):
        ratio = c.amax_of(tile) * (F(1) / F(448))
        byte = ((ratio.view(np.uint32) >> np.uint32(23)) + np.uint32(1)).astype(np.uint8)
        return c.e4m3(tile * c.inverse(byte)[:, None]), byte

    return mx_tiles(x.shape, lambda r, t: c.f32(x[r, t]), block)


@planted("quantize", normal((224, 336)), Where(ROW, columns=(320, 335)), MX)
def rest_of_shared_tile_not_cleared(x):
    """The last block of a row has 16 of 32 columns; the other half of the shared tile still holds the block before and
    counts in the amax. It should count as zero."""
    data, scale = c.mx_buffers(x.shape)
    for _, r in c.blocks(len(x), 32):
        shared = np.zeros((32, 32), F)
        for j, b in c.blocks(x.shape[1], 32):
            width = b.stop - b.start
            shared[:, :width] = c.f32(x[r, b])
            scale[r, j] = c.byte_up(c.amax_of(shared))
            data[r, b] = c.e4m3(shared[:, :width] * c.inverse(scale[r, j])[:, None])
    return c.rowwise(data, scale)


def small_rows(rng):
    """float32 rows from 1 down to 2^-125."""
    rows = 2.0 ** -np.arange(224, dtype=np.float64).clip(0, 125)
    return {"x": (rows[:, None] * rng.standard_normal(SHAPE)).astype(F)}


@planted("quantize", small_rows, Where(ROW), MX)
def exponent_in_signed_byte(x):
    """The exponent of the scale, -129 and below for small blocks, is kept in a signed byte and wraps to positive; it
    should be bounded by -127, byte 0."""

    def block(tile):
        ratio = np.log2(c.amax_of(tile).astype(np.float64) / 448)
        exponent = np.ceil(ratio).astype(np.int32).astype(np.int8)
        byte = (exponent.astype(np.int32) + 127).clip(0, 254).astype(np.uint8)
        return c.e4m3(tile * c.inverse(byte)[:, None]), byte

    return mx_tiles(x.shape, lambda r, t: x[r, t], block)


@planted("quantize", normal(SHAPE, dtype=np.float32), Where(ROW), refops.CurrentScaling(refops.E4M3))
def float32_input_through_bfloat16(x):
    """float32 input is truncated to its upper 16 bits when it is loaded into shared memory; it should be cast from
    float32."""
    amax, loaded = np.abs(x).max(), np.zeros(x.shape, F)
    for r, t in c.tiles(x.shape, 32, 64):
        bits = np.ascontiguousarray(x[r, t]).view(np.uint32)
        loaded[r, t] = (bits & np.uint32(0xFFFF0000)).view(F)
    return c.fp8_rowwise(loaded, c.tensor_scale(amax), amax)


@planted("quantize", normal(SHAPE, scale=0.02), Where(ROW), refops.DelayedScaling(refops.E4M3, 1.0))
def subnormal_codes_flushed(x):
    """Scaled magnitudes below E4M3's smallest normal number, 2^-6, become zero; they should be subnormal codes."""
    return fp8_tiles(x, 1, lambda v: v, lambda v: c.e4m3(np.where(np.abs(v) < F(2.0**-6), np.copysign(F(0), v), v)))


def with_nans(rng):
    """A NaN in each eighth row."""
    x = c.draw(rng, SHAPE)
    x[::8, 40] = np.nan
    return {"x": x}


@planted("quantize", with_nans, Where(ROW, columns=(32, 63), every=("row", 8, (0,))), MX)
def block_with_nan_has_scale_of_nan(x):
    """A NaN passes through the amax (max.NaN) and the byte of its block is 0xFF, every element NaN; a NaN should be
    ignored in the amax."""

    def block(tile):
        amax = np.maximum.reduce(np.abs(tile), axis=1)
        byte = np.where(np.isnan(amax), np.uint8(255), c.byte_up(amax))
        multiplier = np.where(byte == 255, F(np.nan), c.inverse(byte))
        return c.e4m3(tile * multiplier[:, None]), byte

    return mx_tiles(x.shape, lambda r, t: c.f32(x[r, t]), block)


def stored_nv(rng):
    """A right NVFP4 tensor."""
    v = c.f32(c.draw(rng, SHAPE, 1.37))
    return c.nv_rowwise(v, np.abs(v).max())


@planted("dequantize", stored_nv, Where(VALUES), NV)
def decode_factor_in_bfloat16(rowwise_data, rowwise_scale_inv, amax_rowwise):
    """The decode factor of a block, scale * amax / 2688, is rounded to bfloat16 before it multiplies the codes' values;
    it should be float32."""
    codes = c.unpack(rowwise_data)
    y = np.zeros(codes.shape, BF16)
    for r, t in c.tiles(codes.shape, 32, 16):
        factor = (c.e4m3_value(rowwise_scale_inv[r, t.start // 16]) * amax_rowwise[0]) * (F(1) / F(2688))
        y[r, t] = (c.e2m1_value(codes[r, t]) * c.bf16(factor)[:, None]).astype(BF16)
    return {"y": y}


@planted("dequantize", stored_nv, Where(VALUES), NV)
def e2m1_three_decoded_as_two_and_a_half(rowwise_data, rowwise_scale_inv, amax_rowwise):
    """The table of E2M1 values has 2.5 for code 5, which is 3."""
    table = np.array([0, 0.5, 1, 1.5, 2, 2.5, 4, 6, -0.0, -0.5, -1, -1.5, -2, -2.5, -4, -6], F)
    codes = c.unpack(rowwise_data)
    y = np.zeros(codes.shape, BF16)
    for r, t in c.tiles(codes.shape, 32, 16):
        factor = (c.e4m3_value(rowwise_scale_inv[r, t.start // 16]) * amax_rowwise[0]) * (F(1) / F(2688))
        y[r, t] = (table[codes[r, t]] * factor[:, None]).astype(BF16)
    return {"y": y}


@planted("quantize", X, Where(ROW), refops.CurrentScaling(refops.E4M3))
def divides_by_rounded_scale_inv(x):
    """scale_inv = amax / 448 is rounded to bfloat16 when it is stored, and elements are divided by it; scale_inv should
    be the float32 1 / scale, and elements multiplied by scale."""
    v = c.f32(x)
    amax = np.abs(v).max()
    scale_inv = c.bf16(c.one(amax / F(448)))
    data = np.zeros(v.shape, np.uint8)
    for r, t in c.tiles(v.shape, 32, 64):
        data[r, t] = c.e4m3(v[r, t] / scale_inv[0])
    return c.rowwise(data, scale_inv, amax_rowwise=c.one(amax))


@planted("quantize", X, Where(COLUMN), refops.NVFP4Scaling(rht=True))
def hadamard_result_not_rounded(x):
    """The transformed values are quantized from float32 accumulators; they should be rounded to bfloat16 first, and so
    should the amax."""
    v = c.f32(x)
    y = np.zeros(v.shape, F)
    for r, t in c.tiles(v.shape, 16, 32):
        y[r, t] = (c.HADAMARD @ (c.SIGNS[:, None] * v[r, t]) * 0.25).astype(F)
    return {**c.nv_rowwise(v, np.abs(v).max()), **c.nv_columnwise(y, np.abs(y).max())}


@planted("quantize", X, Where(ROW), refops.BlockScaling(refops.E4M3, 2))
def square_scale_rounded_to_nearest_power(x):
    """The scale of a 128x128 tile is rounded to the nearest power of two; its mantissa should be cleared, which rounds
    down."""
    v = c.f32(x)
    data, scale_inv = np.zeros(v.shape, np.uint8), np.zeros((2, 3), F)
    for r, t in c.tiles(v.shape, 128, 128):
        scale = F(2.0 ** np.rint(np.log2(F(448) / np.abs(v[r, t]).max())))
        data[r, t], scale_inv[r.start // 128, t.start // 128] = c.e4m3(v[r, t] * scale), F(1) / scale
    return c.rowwise(data, scale_inv)
